"""Who is late, and how long a step may take."""

import threading
from typing import Any

import pytest

from lightnet_llm.config.run import WatchdogConfig
from lightnet_llm.training.late import describe, late_ranks
from lightnet_llm.training.progress import Identity, Progress, waiting_in
from lightnet_llm.training.watchdog import Watchdog, step_limit


def rank(number: int, collective: str | None, step: int = 5, **groups: tuple[int, list[int]]) -> dict[str, Any]:
    record = {"host": "h", "pid": 100 + number, "step": step, "at": f"step {step}", "place": "a.py:1 (f)"}
    return record | {"collective": collective, "groups": {name: list(value) for name, value in groups.items()}}


# Tensor groups (0, 1) and (2, 3), data groups (0, 2) and (1, 3): rank 1 hangs in its forward pass, 0 waits for it, and the
# other two wait in the reduction of gradients, 2 for 0 and 3 for 1.
CHAIN = {
    0: rank(0, "all_reduce", tp=(10, [0, 1]), dp=(3, [0, 2])),
    1: rank(1, None, tp=(9, [0, 1]), dq=(3, [1, 3])),
    2: rank(2, "all_reduce", tq=(20, [2, 3]), dp=(4, [0, 2])),
    3: rank(3, "all_reduce", tq=(20, [2, 3]), dq=(4, [1, 3])),
}
CASES: dict[str, tuple[dict[int, dict[str, Any]], set[int], list[int]]] = {
    "chain": (CHAIN, set(), [1]),
    "on the device": ({r: {**record, "collective": None} for r, record in CHAIN.items()}, set(), [1]),
    "silent": (CHAIN, {2}, [2]),
    # A pipeline's receive has no number: rank 0 of stage 0 hangs, 2 waits for its activations, 1 and 3 for the reduction.
    "receive": (
        {
            0: rank(0, None, dp=(3, [0, 1])),
            1: rank(1, "all_reduce", dp=(4, [0, 1])),
            2: rank(2, "recv", dq=(3, [2, 3])),
            3: rank(3, "all_reduce", dq=(4, [2, 3])),
        },
        set(),
        [0],
    ),
    "receive alone": ({0: rank(0, None, dp=(3, [0, 1])), 1: rank(1, "recv", dp=(3, [0, 1]))}, set(), [0]),
    "no numbers, an older step": ({0: rank(0, None, 5), 1: rank(1, None, 4)}, set(), [1]),
    "nothing to tell": ({0: rank(0, "all_reduce"), 1: rank(1, "all_reduce")}, set(), []),
}


@pytest.mark.parametrize("name", CASES)
def test_late_ranks(name: str) -> None:
    records, silent, late = CASES[name]
    assert late_ranks(records, silent) == late
    text = describe(records, late, silent)
    assert all(f"rank {number} (host h, pid {100 + number})" in text for number in late)
    assert "\n" not in text


def test_many_ranks_stay_one_short_line() -> None:
    records = {number: rank(number, "all_reduce") for number in range(512)}
    text = describe(records, list(range(100)), set(range(100)))
    assert len(text) < 1000 and "and 96 more" in text and "..." in text


@pytest.mark.parametrize(
    ("given", "recent", "limit"),
    [
        (None, [], 1800),  # compiling
        (None, [200.0, 1.0], 1800),
        (None, [1.0, 1.0, 1.0], 45),
        (None, [1.0, 30.0, 1.0], 150),
        (7.0, [1.0] * 3, 7),
        (7.0, [1.0], 1800),
        (4000.0, [1.0], 4000),
    ],
)
def test_step_limit(given: float | None, recent: list[float], limit: float) -> None:
    assert step_limit(WatchdogConfig(step_seconds=given), recent) == limit


def test_progress_counts_steps_alone() -> None:
    progress = Progress()
    for phase in ("step", "bookkeeping", "save", "step", "validation"):
        progress.begin(phase, 3)
    progress.note("micro-batch 2")
    assert len(progress.recent) == 2 and str(progress) == "validation after step 3, micro-batch 2"


def test_steps_of_a_smaller_batch_say_nothing_about_larger_ones() -> None:
    progress = Progress()
    counts = []
    for step, samples in enumerate((2, 2, 2, 16, 16, 4), 1):
        progress.begin("step", step, samples)
        counts.append(len(progress.recent))
        progress.begin("bookkeeping")
    assert counts == [0, 1, 2, 0, 1, 2]


def test_where_the_main_thread_is() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(waiting_in()))
    thread.start()
    thread.join()
    ((collective, place),) = found
    assert collective is None and place.startswith("tests/unit/training/test_watchdog.py:")


def test_a_rank_is_looked_up_only_where_its_process_id_means_something():
    own = Identity()
    record = own.as_dict()
    assert own.shares(record) and own.process_of(record) is not None
    assert not own.shares(record | {"namespace": record["namespace"] + "another container"})
    assert own.process_of(record | {"born": record["born"] + 1}) is None  # the id was given to another process
    assert own.process_of(record | {"pid": 2**22 + 1}) is None


def test_the_watch_goes_on_after_an_error_of_its_own(tmp_path, capfd):
    watch = Watchdog(WatchdogConfig(step_seconds=0), tmp_path, 0, 1)
    calls = []

    def look():
        calls.append(0)
        if len(calls) == 3:
            watch._closed.set()
        raise KeyError("host")

    watch._look = look
    watch._watch()
    assert len(calls) == 3
    assert capfd.readouterr().err == "warning: watchdog of rank 0: KeyError('host'); it goes on\n"


@pytest.mark.parametrize("spoke", [True, False])
def test_a_rank_that_is_gone_had_time_to_say_why(spoke: bool, tmp_path) -> None:
    """Its process may be seen to be gone before its last word, which lies in the store, is read."""
    watch = Watchdog(WatchdogConfig(step_seconds=0), tmp_path, 0, 2)
    watch.config = WatchdogConfig()
    watch.peers[1] = {**watch.identity.as_dict(), "pid": 2**22 + 1, "left": False, "at": "step 8", "beats": 1}
    rounds = threading.Event()

    def exchange() -> None:
        for beat in range(1, 5):
            rounds.wait(0.3)
            if beat == 2 and spoke:
                watch.notice = {"kind": "failed", "rank": 1, "message": "rank 1 ended: a bug"}
            watch.beats = beat

    thread = threading.Thread(target=exchange)
    thread.start()
    cause = watch.cause(seconds=30)
    thread.join()
    lost = f"lost rank 1 (host {watch.identity.host}, pid {2**22 + 1}): killed or crashed, last seen in step 8"
    assert cause == ("rank 1 ended: a bug" if spoke else lost)
