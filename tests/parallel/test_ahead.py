"""What compiles a step's kernels before it leaves no trace in the run."""

from pathlib import Path

import pytest

from tests.conftest import Ranks, steps_of

FIELDS = ("loss", "grad_norm", "samples", "batch_checksum")
RUN = ["train.steps=4", "train.micro_batch=2", "model.dropout=0.1", "validation.interval=0"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.zero_stage=1", "train.precision=bf16", "parallel.recompute_every=1"],
        ["parallel.zero_stage=2", "train.precision=bf16"],
        pytest.param(["parallel.zero_stage=0"], marks=pytest.mark.slow),
        pytest.param(["model.head=masked_lm", "model.causal=false", "model.vocab_size=252"], marks=pytest.mark.slow),
    ],
    ids=lambda x: x[0].rpartition(".")[2],
)
def test_a_run_is_the_same_with_it(overrides: list[str], ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    plain, ahead = (
        steps_of(ranks.train(2, tiny, [*RUN, *overrides], tmp_path, name, plant), *FIELDS)
        for name, plant in (("plain", None), ("ahead", "pass_ahead"))
    )
    assert ahead == plain and len(plain) == 4
