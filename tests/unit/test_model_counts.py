"""Parameter counts of model-spec section 6, exactly."""

import json

import pytest
from click.testing import CliRunner

from lightnet_llm.cli import main

ROWS = [
    ("wikitext103", 45_068_800, 45_003_264, 45_065_728, 45_855_232),
    ("pile_150m", 146_361_600, 146_263_296, 146_350_080, 149_310_720),
    ("pile_379m", 378_791_936, 378_660_864, 378_765_312, 385_607_680),
    ("pile_1b", 1_004_507_136, 1_004_244_992, 1_004_470_272, None),
    ("pile_2.9b", 2_960_271_360, 2_959_943_680, 2_960_179_200, None),
]
CASES = [
    (f"{name}{suffix}", count)
    for name, *counts in ROWS
    for suffix, count in zip(("", "_no_tpe", "_no_lrpe", "_no_share"), counts, strict=True)
    if count is not None
] + [("bidirectional/cramming", 140_095_488)]


@pytest.mark.parametrize(("preset", "count"), CASES)
def test_count(preset: str, count: int) -> None:
    result = CliRunner().invoke(main, ["train", preset, "--dry-run", "--json", "--gpus", "1", "train.micro_batch=1"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parameters"] == count
