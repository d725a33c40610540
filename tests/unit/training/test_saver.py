"""Saving: what goes wrong is said by its cause, once."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightnet_llm.checkpoint import randomness, store
from lightnet_llm.errors import UserError
from lightnet_llm.training.saving import Saver
from lightnet_llm.training.state import RunState


def saver_of(root: Path, asynchronous: bool, told: list[dict[str, Any]]) -> Saver:
    """A saver of one rank whose run has the folder ``root``."""
    keep = SimpleNamespace(asynchronous=asynchronous, keep_last=1, keep_every=0)
    config: Any = SimpleNamespace(checkpoint=keep)
    ranks: Any = SimpleNamespace(rank=0, any=bool, on_rank_zero=lambda action: action())
    nothing: Any = None
    folder: Any = SimpleNamespace(checkpoints=root / "checkpoints", path=root)
    (root / "config.yaml").touch()
    return Saver(config, folder, nothing, ranks, nothing, {}, lambda step, figures: told.append(figures))


def test_the_pause_holds_the_wait_for_the_save_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saver, "_collect", lambda self, job, state: job.writes.append(lambda: time.sleep(0.5)))
    monkeypatch.setattr(Saver, "_facts", lambda *_: {})
    monkeypatch.setattr(Saver, "_commit", lambda *_: None)
    told: list[dict[str, Any]] = []
    saver = saver_of(tmp_path, True, told)
    for step in (1, 2):
        saver.save(RunState(step=step))
    saver.wait()
    assert told[0]["pause_seconds"] < 0.4 < told[1]["pause_seconds"]


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def collect(self: Saver, job: Any, state: RunState) -> None:
        path = randomness.rank_file(job.folder, 0)
        path.parent.mkdir()
        path.touch()

    def refuse(root: Path, keep_last: int, keep_every: int) -> None:
        raise PermissionError(1, "Operation not permitted", "step_00000001")

    monkeypatch.setattr(Saver, "_collect", collect)
    monkeypatch.setattr(Saver, "_facts", lambda *_: {})
    monkeypatch.setattr(store, "prune", refuse)
    told: list[dict[str, Any]] = []
    saver = saver_of(tmp_path, False, told)
    saver.groups = SimpleNamespace(layout=SimpleNamespace(world=1))  # type: ignore[assignment]
    saver.save(RunState(step=2))
    assert [figures["step"] for figures in told] == [2]
    assert [folder.name for folder in store.listed(tmp_path / "checkpoints")] == ["step_00000002"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: checkpoint of step 2 is saved, but an older one could not be removed ([Errno 1]")


def test_a_commit_that_fails_is_said_by_its_cause_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def commit(self: Saver, job: Any) -> None:
        tried.append(job.step)
        raise OSError("files of ranks [1] cannot be seen")

    monkeypatch.setattr(Saver, "_commit", commit)
    monkeypatch.setattr(Saver, "_collect", lambda *_: None)
    monkeypatch.setattr(Saver, "_facts", lambda *_: {})
    saver = saver_of(tmp_path, False, [])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(
        UserError, match=r"step 3 could not be written \(OSError: files of ranks \[1\] cannot be seen; .* intact$"
    ):
        saver.save(RunState(step=3))
    saver.wait()
    assert tried == [3]
