"""The output folder under a kill between any two of its steps: the old data set or the new one, whole, after one more run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightnet_data import output

Contents = dict[str, str]
OLD = {"manifest.json": '{"format": "lightnet-data", "format_version": 1}', "train.bin": "old"}
NEW = {**OLD, "train.bin": "new"}


def contents(folder: Path) -> Contents:
    return {path.name: path.read_text() for path in folder.iterdir()}


def write(target: Path, resume: bool) -> None:
    """What a preparation does with its folder."""
    folder = output.OutputFolder(target, lambda line: None, resume)
    with folder as place:
        if resume:
            (place / "parts").mkdir(exist_ok=True)
            output.replace(place / "parts" / "00000.json", b"{}")
        for name, text in NEW.items():
            (place / "out" / name if resume else place / name).write_text(text)
        folder.finish()


def killed_at(step: int, work: Callable[[], None], how: Callable[[], None]) -> bool:
    """Whether a process that ends (``how``) before its step ``step`` on the disk did so, rather than finish."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    left = [step]

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                how()
            return original(*arguments, **options)

        return call

    for name in ("rename", "replace", "unlink", "mkdir", "open"):
        setattr(Path, name, counted(getattr(Path, name)))
    shutil.rmtree = counted(shutil.rmtree)
    os.fsync = counted(os.fsync)
    try:
        work()
    finally:
        os._exit(int(left[0] <= 0))
    return False


def end() -> None:
    os._exit(9)


def fail() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("how", [end, fail])
def test_any_step_may_be_the_last(how: Callable[[], None], there: bool, resume: bool, tmp_path: Path) -> None:
    reached, found = 0, []
    for step in range(1, 100):
        place = tmp_path / str(step)
        place.mkdir()
        target = place / "out"
        if there:
            target.mkdir()
            for name, text in OLD.items():
                (target / name).write_text(text)
        if not killed_at(step, lambda target=target: write(target, resume), how):  # type: ignore[misc]
            assert contents(target) == NEW
            break
        reached = step
        if target.exists():
            assert contents(target) in (OLD, NEW)
        free = output.check_free(target, overwrite=True)  # as the next run begins
        assert free
        found.append(contents(target) if target.exists() else None)
        assert found[-1] is not None or not there
        write(target, resume)
        assert contents(target) == NEW
        assert [path.name for path in place.iterdir()] == ["out"]
    else:
        raise AssertionError("the work does not end")
    assert reached > 8
    before = OLD if there else None
    assert [before in found, NEW in found] == [True, True]
    assert found == sorted(found, key=lambda item: item == NEW)  # never back again


def test_another_at_work_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with output.OutputFolder(target, lambda line: None, resume=True) as folder:
        (folder / "out").rename(folder / "replaced")  # as in the middle of its last step
        output.settle(target)
        assert (folder / "replaced").is_dir() and not target.exists()
