"""Saving: what goes wrong is said by its cause, once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightnet_llm.errors import UserError
from lightnet_llm.training.saving import Saver
from lightnet_llm.training.state import RunState


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
    config: Any = SimpleNamespace(checkpoint=SimpleNamespace(asynchronous=False))
    ranks: Any = SimpleNamespace(rank=0, any=bool, on_rank_zero=lambda action: action())
    nothing: Any = None
    folder: Any = SimpleNamespace(checkpoints=tmp_path)
    saver = Saver(config, folder, nothing, ranks, nothing, {}, lambda step, figures: None)
    with pytest.raises(
        UserError, match=r"step 3 could not be written \(OSError: files of ranks \[1\] cannot be seen; .* intact$"
    ):
        saver.save(RunState(step=3))
    saver.wait()
    assert tried == [3]
