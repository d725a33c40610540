"""A run saved under one layout and resumed under another, in fresh processes, is the run that never moved.

fp32: losses within 1e-5, gradient norms within 1e-4 relative, the same sample ids and tokens. bf16: the bounds between
bf16 layouts, 2e-3 nats and 2 %.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.checkpoint import store, universal
from tests.conftest import Ranks, steps_of

FIELDS = ("loss", "grad_norm", "learning_rate", "tokens", "samples", "batch_checksum")
LEAVES, ENDS = 6, 14  # steps: where a run moves, and where the comparison ends
SLOW = pytest.mark.slow
TIED, UNTIED = (), ("model.tie_embeddings=false", "model.norm=layer", "model.dropout=0.2")
BF16 = ("train.precision=bf16",)
FROZEN = ("model.lrpe_learnable=false",)  # theta is in no optimiser


def layout(text: str) -> tuple[int, list[str]]:
    """Ranks and overrides from ``tp2 pp2 sp2 dp2 z1 mb4 ts1``; what is not named is 1 (micro-batch 2; ts, token shards, 0)."""
    sizes = {"tp": 1, "pp": 1, "sp": 1, "dp": 1, "z": 1, "mb": 2, "ts": 0}
    for word in text.split():
        name = word.rstrip("0123456789")
        sizes[name] = int(word[len(name) :])
    fields = {"tensor": "tp", "pipeline": "pp", "sequence": "sp", "zero_stage": "z"}
    overrides = [f"parallel.{field}={sizes[short]}" for field, short in fields.items()]
    overrides += [f"train.micro_batch={sizes['mb']}"]
    overrides += [f"parallel.tensor_sequence_parallel={str(bool(sizes['ts'])).lower()}"]
    return sizes["tp"] * sizes["pp"] * sizes["sp"] * sizes["dp"], overrides


# The tiny model has 251 tokens (padded to 128 x TP) and a gated width of 90, which 4 does not divide.
MOVES: list[Any] = [
    (TIED, "tp2 pp2", "tp1"),
    (TIED, "dp2 z0", "dp2 z2"),
    (TIED, "z1", "tp4"),
    (UNTIED, "dp2 z3", "pp2"),
    (FROZEN, "dp2 z1", "tp2"),
    *(
        pytest.param(*move, marks=SLOW)
        for move in (
            (TIED, "dp4 z3", "dp2 z3"),
            (TIED, "pp2 sp2", "tp2 pp2"),
            (TIED, "dp2 z1", "dp2 z3"),
            (TIED, "tp4", "tp2 dp2 z3"),
            (TIED, "tp2 dp2 z3", "pp2"),
            (TIED, "sp2", "dp2 z2 mb4"),
            (TIED, "dp2 z2", "z0"),
            (TIED, "tp2", "sp2 tp2"),
            (TIED, "pp4", "pp2 dp2"),
            (UNTIED, "tp2 pp2", "tp4"),
            (UNTIED, "tp4", "z3"),
            (UNTIED, "pp2", "sp2 z3"),
            (TIED, "tp2 ts1", "dp2 z1"),
            (UNTIED, "dp2 z2", "tp2 pp2 ts1"),
            (FROZEN, "dp2 z3", "z0"),
            (FROZEN, "z0", "dp2 z3"),
            (BF16, "dp2 z1", "tp2"),
            (BF16, "dp2 z1", "dp2 z3"),
            (BF16, "dp2 z3", "pp2"),
            (BF16, "tp2 dp2 z2", "z0"),
        )
    ),
]


class Moves:
    """Runs pieces under different layouts, and one process that never moves, once per variant."""

    def __init__(self, ranks: Ranks, tiny: Path, tmp: Path):
        self.ranks, self.tiny, self.tmp = ranks, tiny, tmp
        self.known: dict[tuple[str, ...], dict[int, tuple[Any, ...]]] = {}

    def leg(self, tmp: Path, text: str, until: int, extra: tuple[str, ...], plant: str | None = None) -> list[Any]:
        """Continue the run ``tmp/run`` under a layout up to a step; the lines of its metrics."""
        world, overrides = layout(text)
        common = ["train.resume=auto", "validation.interval=0", f"train.stop_at_step={until}"]
        return self.ranks.train(world, self.tiny, [*overrides, *common, *extra], tmp, "run", plant)

    def still(self, extra: tuple[str, ...]) -> dict[int, tuple[Any, ...]]:
        """The run of one process that never moved."""
        if extra not in self.known:
            folder = self.tmp / f"still{len(self.known)}"
            folder.mkdir()
            self.known[extra] = steps_of(self.leg(folder, "tp1", ENDS, extra), *FIELDS)
            assert self.known[extra][1][0] - self.known[extra][ENDS][0] > 0.8, (
                "equality means little if nothing is learnt"
            )
        return self.known[extra]


@pytest.fixture(scope="module")
def moves(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Moves:
    return Moves(ranks, tiny, tmp_path_factory.mktemp("moves"))


def differences(run: dict[int, tuple[Any, ...]], still: dict[int, tuple[Any, ...]]) -> tuple[float, float]:
    """Largest difference of losses, and relative of gradient norms; all else must be equal."""
    assert list(run) == list(still) == list(range(1, ENDS + 1))
    assert all(run[step][2:] == still[step][2:] for step in still), "other samples were read, or at another rate"
    loss = max(abs(run[step][0] - still[step][0]) for step in still)
    return loss, max(abs(run[step][1] / still[step][1] - 1) for step in still)


def check(rows: list[Any], still: dict[int, tuple[Any, ...]], bf16: bool = False) -> None:
    """The moved run is the still one within its bounds."""
    loss, norm = differences(steps_of(rows, *FIELDS), still)
    assert loss < (2e-3 if bf16 else 1e-5) and norm < (2e-2 if bf16 else 1e-4), f"loss {loss:.1e}, norm {norm:.1e}"


@pytest.mark.parametrize(("extra", "before", "after"), MOVES)
def test_moved_run_equals_the_run_that_never_moved(
    extra: tuple[str, ...], before: str, after: str, moves: Moves, tmp_path: Path
) -> None:
    moves.leg(tmp_path, before, LEAVES, extra)
    rows = moves.leg(tmp_path, after, ENDS, extra)
    check(rows, moves.still(extra), bf16=extra == BF16)
    root = tmp_path / "run" / "checkpoints"
    store.verify(root / store.step_name(LEAVES))  # the native files are as they were
    store.verify(root / store.step_name(LEAVES) / universal.FOLDER)
    made = [path.name for path in sorted(tmp_path.glob("run.log.rank*")) if "universal form of" in path.read_text()]
    assert made == ["run.log.rank0"]  # once, with its progress


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp2 z0", "dp2 z1"),
        *(pytest.param(*move, marks=SLOW) for move in (("dp2 z1", "z0"), ("dp2 z3", "pp2"), ("pp2", "dp2 z3"))),
    ],
)
def test_a_run_moves_before_its_first_good_step(
    before: str, after: str, ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    """Both updates so far were skipped, so that the optimiser has no moments yet."""
    moves = Moves(ranks, tiny, tmp_path)
    for name in ("moved", "still"):
        (tmp_path / name).mkdir()
        moves.leg(tmp_path / name, before, 2, TIED, plant="nan_at_first")
    moved, still = (moves.leg(tmp_path / name, to, ENDS, TIED) for name, to in (("moved", after), ("still", before)))
    assert [row["step"] for row in moved if row.get("event") == "skipped"] == [1, 2]
    now, then = ({s: v for s, v in steps_of(rows, *FIELDS).items() if s > 2} for rows in (moved, still))
    assert list(now) == list(then) == list(range(3, ENDS + 1))
    assert all(now[s][2:] == then[s][2:] and abs(now[s][0] - then[s][0]) < 1e-5 for s in now)
    assert all(abs(now[s][1] / then[s][1] - 1) < 1e-4 for s in now)


@pytest.mark.slow
def test_zero3_shrinks_twice(moves: Moves, tmp_path: Path) -> None:
    """DP4 to DP2 to DP1, and back to DP4."""
    for text, until in (("dp4 z3", 4), ("dp2 z3", 7), ("z3", 10), ("dp4 z3", ENDS)):
        rows = moves.leg(tmp_path, text, until, TIED)
    check(rows, moves.still(TIED))


@pytest.mark.parametrize("fault", ["forget_moments", pytest.param("shift_tensor_parts", marks=SLOW)])
def test_planted_fault_is_seen(fault: str, moves: Moves, tmp_path: Path) -> None:
    moves.leg(tmp_path, "tp1", LEAVES, TIED)
    rows = moves.leg(tmp_path, "tp2", ENDS, TIED, plant=fault)
    loss, norm = differences(steps_of(rows, *FIELDS), moves.still(TIED))
    assert loss > 1e-5 or norm > 1e-4, f"{fault} went unnoticed"


def test_killed_and_damaged_conversions_are_made_again(moves: Moves, tmp_path: Path) -> None:
    moves.leg(tmp_path, "dp2 z2", LEAVES, TIED)
    kept = tmp_path / "kept"
    world, overrides = layout("z0")
    arguments = ["--config", str(moves.tiny), f"train.output={tmp_path}", "train.name=run", *overrides]
    arguments += ["train.resume=auto", "validation.interval=0", f"train.stop_at_step={ENDS}"]
    codes = moves.ranks.run(world, arguments, tmp_path / "log", plant="die_while_converting")
    checkpoint = tmp_path / "run" / "checkpoints" / store.step_name(LEAVES)
    assert codes == [-9] and (checkpoint / f".{universal.FOLDER}.partial").is_dir()
    assert universal.whole(checkpoint) is None
    shutil.copytree(tmp_path / "run", kept)

    check(moves.leg(tmp_path, "z0", ENDS, TIED), moves.still(TIED))
    assert universal.whole(checkpoint) and not (checkpoint / f".{universal.FOLDER}.partial").exists()

    victim = checkpoint / universal.FOLDER / "zero" / "embedding.weight" / "exp_avg.pt"
    victim.write_bytes(victim.read_bytes()[:-50])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / store.step_name(ENDS))
    check(moves.leg(tmp_path, "z0", ENDS, TIED), moves.still(TIED))
    assert "making a damaged universal form again" in (tmp_path / "run.log.rank0").read_text()


def test_each_host_that_needs_it_makes_its_own(moves: Moves, tmp_path: Path) -> None:
    moves.leg(tmp_path, "tp1", LEAVES, TIED)
    check(moves.leg(tmp_path, "dp2 z3", ENDS, TIED, plant="rank_one_on_another_host"), moves.still(TIED))
    checkpoint = tmp_path / "run" / "checkpoints" / store.step_name(LEAVES)
    for name in (universal.FOLDER, "universal_of_host_one"):
        store.verify(checkpoint / name)
    assert "universal form of" not in (tmp_path / "run.log.rank1").read_text()  # one bar on the screen


def test_a_conversion_that_cannot_be_written_is_refused(moves: Moves, tmp_path: Path) -> None:
    moves.leg(tmp_path, "dp2 z1", LEAVES, TIED)
    world, overrides = layout("tp2")
    arguments = ["--config", str(moves.tiny), f"train.output={tmp_path}", "train.name=run", *overrides]
    codes = moves.ranks.run(world, [*arguments, "train.resume=auto"], tmp_path / "log", plant="limit_files")
    assert codes == [1, 1]
    log = (tmp_path / "log.rank0").read_text()
    assert "error: " in log and "universal form could not be made" in log and "MiB free" in log
    checkpoint = tmp_path / "run" / "checkpoints" / store.step_name(LEAVES)
    store.verify(checkpoint)
    assert sorted(path.name for path in checkpoint.iterdir() if universal.FOLDER in path.name) == []


def test_random_state_goes_on_or_follows_the_rule(moves: Moves, tmp_path: Path) -> None:
    """The same layout continues every generator; another is seeded by (seed, step, rank), alike each time."""
    plant = "draw_from_global_generators"

    def losses(folder: str, *legs: tuple[str, int]) -> dict[int, tuple[Any, ...]]:
        (tmp_path / folder).mkdir()
        for text, until in legs:
            rows = moves.leg(tmp_path / folder, text, until, TIED, plant=plant)
        return steps_of(rows, "loss")

    whole = losses("whole", ("dp2", 8))
    assert losses("pieces", ("dp2", 3), ("dp2", 8)) == whole
    moved = [losses(name, ("dp2", 3), ("tp2", 8)) for name in ("once", "twice")]
    assert moved[0] == moved[1] != whole
