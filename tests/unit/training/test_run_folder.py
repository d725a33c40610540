"""What a run folder says about its run."""

import os
from pathlib import Path

import pytest

from lightnet_llm.config import load_config
from lightnet_llm.errors import UserError
from lightnet_llm.training.run_folder import FINISHED, RunFolder


def test_a_run_that_goes_on_is_not_finished(tmp_path: Path) -> None:
    config = load_config("pile_150m", [f"train.output={tmp_path}", "train.name=run"])
    folder = RunFolder(config)
    folder.path.mkdir()
    assert folder.finished_step() is None and not folder.has_checkpoint
    folder.mark_finished(3)
    assert folder.finished_step() == 3 and [path.name for path in folder.path.iterdir()] == [FINISHED]
    folder.clear_finished()
    assert folder.finished_step() is None
    (folder.path / FINISHED).write_text("")  # as a full disk may have left it
    assert folder.finished_step() is None
    folder.clear_finished()
    folder.clear_finished()


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    def folder(output: Path) -> RunFolder:
        return RunFolder(load_config("pile_150m", [f"train.output={output}", "train.name=run"]))

    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=rf"^train\.output {output}: {tmp_path}/file is a file; choose"):
            folder(output).check()
    folder(tmp_path / "new" / "below").check()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # root may write everywhere
        with pytest.raises(UserError, match=rf"{tmp_path} may not be written to"):
            folder(tmp_path / "new").check()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"new/run: Permission denied; choose another"):
        folder(tmp_path / "new").lock()


def test_a_damaged_configuration_is_told(tmp_path: Path) -> None:
    folder = RunFolder(load_config("pile_150m", [f"train.output={tmp_path}", "train.name=run", "train.resume=auto"]))
    (folder.checkpoints / "step_00000001").mkdir(parents=True)
    for text in (b"model: [", b"\xff\xfe\x00"):
        (folder.path / "config.yaml").write_bytes(text)
        with pytest.raises(
            UserError, match=r"config\.yaml cannot be read \(.*\); copy config\.yaml of its newest"
        ) as caught:
            folder.check()
        assert "\n" not in str(caught.value)
