"""Parameter counts of model-spec section 6, exactly."""

import json

import pytest
import torch
from click.testing import CliRunner

from lightnet_llm.cli import main
from lightnet_llm.config import load_config
from lightnet_llm.models import build_model, count_parameters

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
IMAGES = [  # without LRPE is no row of the denoisers'
    ("classify/tiny", 6_009_640, 5_960_488, 6_007_336),
    ("classify/small", 22_635_112, 22_536_808, 22_630_504),
    ("classify/base", 87_736_552, 87_539_944, 87_727_336),
    ("diffuse/small", 33_532_448, 33_434_144, None),
    ("diffuse/base", 131_060_768, 130_864_160, None),
    ("diffuse/large", 470_050_848, 469_788_704, None),
    ("diffuse/xlarge", 678_523_424, 678_228_512, None),
]


@pytest.mark.parametrize(("preset", "count"), CASES)
def test_count(preset: str, count: int) -> None:
    result = CliRunner().invoke(main, ["train", preset, "--dry-run", "--json", "--gpus", "1", "train.micro_batch=1"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parameters"] == count


@pytest.mark.parametrize(("preset", "whole", "no_tpe", "no_lrpe"), IMAGES)
def test_image_presets(preset: str, whole: int, no_tpe: int, no_lrpe: int | None) -> None:
    """The files that are trained have the rows' sizes; that the rows' sizes have these counts is held by test_heads.py, too."""
    for changes, count in (([], whole), (["model.tpe=false"], no_tpe), (["model.lrpe=false"], no_lrpe)):
        if count is not None:
            with torch.device("meta"):
                assert count_parameters(build_model(load_config(preset, changes).model)) == count


@pytest.mark.parametrize("preset", [row[0] for row in IMAGES if row[0].startswith("diffuse")])
@pytest.mark.parametrize("patch", [4, 8])
def test_patches_of_four_and_eight(preset: str, patch: int) -> None:
    """The embedding and the head grow with a patch's area, and nothing else does."""
    whole, *_ = next(counts for name, *counts in IMAGES if name == preset)
    config = load_config(preset, [f"model.image.patch={patch}"]).model
    assert config.image is not None
    with torch.device("meta"):
        found = count_parameters(build_model(config))
    assert found - whole == (patch**2 - 2**2) * (4 * config.width + 8 * (config.width + 1))
