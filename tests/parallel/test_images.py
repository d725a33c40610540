"""Classifier and denoiser train alike under every layout, and go on exactly where they stopped (laws 1 to 3)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.checkpoint.store import resolve
from lightnet_llm.checkpoint.weights import AVERAGE, load_weights
from tests.conftest import Ranks, read_metrics, steps_of
from tests.parallel import images

FIELDS = ("loss", "grad_norm", "samples", "batch_checksum")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "micro8": (1, ["train.micro_batch=8"]),
    "micro1": (1, ["train.micro_batch=1", "data.workers=1"]),
    "dp2_zero0": (2, ["parallel.zero_stage=0"]),
    "dp2": (2, []),
    "dp2_zero2": (2, ["parallel.zero_stage=2"]),
    "dp4_zero3": (4, ["parallel.zero_stage=3"]),
    "tp2": (2, ["parallel.tensor=2"]),
    "tp2_zero3": (4, ["parallel.tensor=2", "parallel.zero_stage=3"]),
    "sp2": (2, ["parallel.sequence=2"]),
    "sp4_zero3": (4, ["parallel.sequence=4", "parallel.zero_stage=3"]),
    "tp2_sp2_dp2": (8, ["parallel.tensor=2", "parallel.sequence=2", "parallel.sequence_exchange=prefix"]),
    "pp2_sp2": (4, ["parallel.pipeline=2", "parallel.sequence=2"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "tp2_pp2_dp2": (8, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.recompute_every=1"]),
}
QUICK = [("classifier", name) for name in ("micro8", "dp2", "sp2", "pp2")]
QUICK += [("denoiser", name) for name in ("micro8", "dp2", "dp4_zero3", "tp2")] + [("adaln", "sp2")]
HEADS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "classifier": (images.write_classifier, []),
    "denoiser": (images.write_denoiser, []),
    "adaln": (images.write_denoiser, ["model.conditioning=adaln_single"]),
    "encoded": (images.write_encoded, []),
}
ALL = [(head, name) for head in HEADS for name in LAYOUTS if head == "classifier" or "pp" not in name]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK]


class Head:
    """A head's configuration, and its run by one process."""

    def __init__(self, ranks: Ranks, folder: Path, head: str):
        write, self.overrides = HEADS[head]
        self.config, self.folder = write(folder), folder
        self.rows = ranks.train(1, self.config, self.overrides, folder, "one")


@pytest.fixture(scope="module")
def heads(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[str, Head] = {}

    def head(name: str) -> Head:
        if name not in found:
            found[name] = Head(ranks, tmp_path_factory.mktemp(name), name)
        return found[name]

    return head


def check(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Losses to 1e-5, gradient norms to 1e-4 of themselves, samples and their contents, validation."""
    found, expected = steps_of(rows, *FIELDS), steps_of(wanted, *FIELDS)
    assert list(found) == list(expected)
    for step, (loss, norm, *read) in expected.items():
        assert found[step][2:] == tuple(read)
        assert abs(found[step][0] - loss) < 1e-5 and abs(found[step][1] / norm - 1) < 1e-4, step
    held, known = ([row["validation"]["heldout"] for row in given if "validation" in row] for given in (rows, wanted))
    assert len(held) == len(known) and all(abs(a[k] - b[k]) < 1e-5 for a, b in zip(held, known, strict=True) for k in b)


@pytest.mark.parametrize(("head", "name"), [*QUICK, *SLOW])
def test_layout_equals_one_process(head: str, name: str, ranks: Ranks, tmp_path: Path, heads: Any) -> None:
    one, (world, overrides) = heads(head), LAYOUTS[name]
    check(ranks.train(world, one.config, [*one.overrides, *overrides], tmp_path, name), one.rows)


@pytest.mark.parametrize("head", ["classifier", "denoiser"])
def test_it_learns_and_validates(head: str, heads: Any) -> None:
    rows = heads(head).rows
    held = [row["validation"]["heldout"] for row in rows if "validation" in row]
    assert set(held[-1]) == ({"loss", "top1", "top5"} if head == "classifier" else {"loss"})
    if head == "denoiser":
        losses = [row["loss"] for row in rows if "loss" in row]
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    else:  # of mixed and erased images the training loss hardly falls
        assert held[-1]["loss"] < 0.9 < math.log(images.CLASSES)
        assert held[-1]["top5"] == pytest.approx(1.0) and held[-1]["top1"] * 5 == pytest.approx(
            round(held[-1]["top1"] * 5)
        )


@pytest.mark.parametrize(
    ("head", "moved"),
    [
        ("classifier", ["parallel.pipeline=2"]),
        ("denoiser", ["parallel.tensor=2"]),
        pytest.param("adaln", ["parallel.sequence=2"], marks=pytest.mark.slow),
        pytest.param("encoded", ["parallel.tensor=2"], marks=pytest.mark.slow),
    ],
)
def test_resumed_and_moved(head: str, moved: list[str], ranks: Ranks, tmp_path: Path, heads: Any) -> None:
    one = heads(head)
    go_on = [*one.overrides, "train.resume=auto"]
    ranks.train(1, one.config, [*go_on, "train.stop_at_step=4"], tmp_path, "run")
    ranks.train(1, one.config, [*go_on, "train.stop_at_step=8"], tmp_path, "run")
    rows, wanted = read_metrics(tmp_path / "run"), steps_of(one.rows, *FIELDS)
    assert all(values == wanted[step] for step, values in steps_of(rows, *FIELDS).items()), "resumed bit by bit"
    ranks.train(1, one.config, [*one.overrides, "train.stop_at_step=8"], tmp_path, "whole")
    mine, theirs = (load_weights(resolve(tmp_path / run, print), AVERAGE) for run in ("run", "whole"))
    assert mine.keys() == theirs.keys() and all(mine[name].equal(x) for name, x in theirs.items()), "the average, too"
    ranks.train(2, one.config, [*go_on, *moved], tmp_path, "run")
    rows = [row for row in read_metrics(tmp_path / "run") if "validation" not in row or row["step"] in (10, 20)]
    check(rows, one.rows)
    mine, theirs = (load_weights(resolve(run, print), AVERAGE) for run in (tmp_path / "run", one.folder / "one"))
    assert all((mine[name] - x).abs().max() < 1e-5 for name, x in theirs.items()), "the average goes along"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "world", "overrides"),
    [
        ("classifier", 1, []),
        ("classifier", 2, ["parallel.zero_stage=3"]),
        ("classifier", 2, ["parallel.pipeline=2"]),
        ("denoiser", 2, ["parallel.tensor=2"]),
        ("denoiser", 2, ["parallel.sequence=2", "parallel.zero_stage=2"]),
        ("adaln", 2, ["parallel.zero_stage=3"]),
    ],
)
def test_bf16_stays_beside_fp32(
    head: str, world: int, overrides: list[str], ranks: Ranks, tmp_path: Path, heads: Any
) -> None:
    one = heads(head)
    rows = ranks.train(world, one.config, [*one.overrides, "train.precision=bf16", *overrides], tmp_path, "run")
    found, wanted = steps_of(rows, *FIELDS), steps_of(one.rows, *FIELDS)
    for step in range(1, 11):
        assert abs(found[step][0] / wanted[step][0] - 1) < 5e-3 and found[step][2:] == wanted[step][2:], step


@pytest.mark.slow
@pytest.mark.parametrize("head", ["classifier", "denoiser"])
def test_a_peer_with_softmax(head: str, ranks: Ranks, tmp_path: Path, heads: Any) -> None:
    peer = ["model.mixer=softmax", "model.lrpe=false", "train.steps=6"]
    one = ranks.train(1, heads(head).config, peer, tmp_path, "one")
    check(ranks.train(4, heads(head).config, [*peer, "parallel.tensor=2"], tmp_path, "run"), one)
    assert steps_of(one, "loss")[6] != steps_of(heads(head).rows, "loss")[6]
