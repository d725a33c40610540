"""What a run folder says about its run."""

from pathlib import Path

from lightnet_llm.config import load_config
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
