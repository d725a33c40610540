"""Checkpoint folders: whole or absent, the newest last, the right ones kept."""

import errno
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightnet_llm.checkpoint import store


def save(root: Path, step: int, text: str = "content", due: tuple[int, ...] = ()) -> Path:
    folder = store.begin(root, step)
    (folder / "engine").mkdir()
    (folder / "engine" / "part").write_text(text)
    return store.commit(root, step, {"state": {"step": step}, "due": [*due]})


def test_the_same_step_saved_again_replaces_it_whole(tmp_path: Path) -> None:
    save(tmp_path, 3, "before")
    folder = save(tmp_path, 3, "after")
    assert (folder / "engine" / "part").read_text() == "after"
    store.verify(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]


def test_a_small_file_on_a_full_disk_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    store.write_text(path, "before")

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "sync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        store.write_text(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("able", [True, False])
def test_a_kill_while_a_step_is_saved_again(able: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two renames the step is there, where the file system can exchange names; else one of both is on disk."""
    save(tmp_path, 3, "before")
    seen: list[bool] = []
    rename, exchange = Path.rename, store._exchange

    def watched(self: Path, target: Path) -> Path:
        found = rename(self, target)
        seen.append((tmp_path / "step_00000003" / "manifest.json").is_file())
        return found

    monkeypatch.setattr(Path, "rename", watched)
    monkeypatch.setattr(store, "_exchange", exchange if able else lambda one, other: False)
    assert (save(tmp_path, 3, "after") / "engine" / "part").read_text() == "after"
    assert seen == ([True] if able else [False, True])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003"]


def test_damaged_checkpoints_go_when_their_step_is_there_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_00000003" / "engine" / "part").write_text("cut")
    found = store.newest_whole(tmp_path, lambda _: None)
    assert found is not None and found[0].name == "step_00000002"
    (aside,) = store.set_aside_newer(tmp_path, found[0])
    store.prune(tmp_path, 2, 0)
    assert aside.is_dir(), "it may yet be looked at"
    save(tmp_path, 3)
    store.prune(tmp_path, 2, 0)
    assert not aside.exists()


def test_copies_under_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    for name in ("step_best", "step_00000002.keep", "step_"):
        shutil.copytree(tmp_path / "step_00000002", tmp_path / name)
    assert [folder.name for folder in store.listed(tmp_path)] == [f"step_0000000{step}" for step in (2, 4, 6)]
    found = store.newest_whole(tmp_path, lambda _: None)
    assert found is not None and found[0].name == "step_00000006"
    assert [folder.name for folder in store.prune(tmp_path, 1, 0)] == ["step_00000002", "step_00000004"]
    assert (tmp_path / "step_best").is_dir() and (tmp_path / "step_00000002.keep").is_dir()


def test_one_that_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    checksum = store._checksum

    def broken(path: Path) -> str:
        if "step_00000002" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return checksum(path)

    monkeypatch.setattr(store, "_checksum", broken)
    said: list[str] = []
    found = store.newest_whole(tmp_path, said.append)
    assert found is not None and found[0].name == "step_00000001"
    assert len(said) == 1 and said[0].endswith("cannot be read (Input/output error)")


@pytest.mark.parametrize("killed", ["partial", "removed"])
def test_what_a_kill_left_is_cleared_by_the_next_save(killed: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    left = tmp_path / f".step_00000002.{killed}"
    left.mkdir()
    (left / "part").write_text("half")
    found = store.newest_whole(tmp_path, print)
    assert found is not None and found[0].name == "step_00000001"
    save(tmp_path, 2)
    assert not left.exists()


def test_every_file_is_listed_wherever_it_lies(tmp_path: Path) -> None:
    folder = store.begin(tmp_path, 1)
    for name in ("engine/a.pt", "weights/b.safetensors", "random/rank00000.pt", "config.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    final = store.commit(tmp_path, 1, {})
    for name in store.read_manifest(final)["files"]:
        content = (final / name).read_bytes()
        (final / name).write_bytes(content[:-1] + b"x")
        with pytest.raises(ValueError, match="content does not match"):
            store.verify(final)
        (final / name).unlink()
        with pytest.raises(ValueError, match="missing"):
            store.verify(final)
        (final / name).write_bytes(content)
    assert len(store.read_manifest(final)["files"]) == 4


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True).map(sorted),
    keep_last=st.integers(1, 4),
    keep_every=st.sampled_from([0, 4, 7]),
)
def test_rotation(tmp_path_factory: pytest.TempPathFactory, steps: list[int], keep_last: int, keep_every: int) -> None:
    root = tmp_path_factory.mktemp("root")
    for step in steps:
        save(root, step)
        store.prune(root, keep_last, keep_every)
        assert (root / "latest").read_text().strip() == store.step_name(step)
    kept = [step for step in steps if step in steps[-keep_last:] or (keep_every and step % keep_every == 0)]
    assert [folder.name for folder in store.listed(root)] == [store.step_name(step) for step in kept]
    for folder in store.listed(root):
        store.verify(folder)


def test_a_save_that_was_put_off_is_kept_as_the_one_that_was_due(tmp_path: Path) -> None:
    for step, due in ((7, (6,)), (9, ()), (14, (10, 12)), (17, (16,)), (20, (20,))):
        save(tmp_path, step, due=due)
    (tmp_path / "step_00000009" / "manifest.json").write_text("cut")
    store.prune(tmp_path, 1, 6)
    assert [folder.name for folder in store.listed(tmp_path)] == [store.step_name(step) for step in (7, 14, 20)]
