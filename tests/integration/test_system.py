"""What needs root: a disk that is really full, a file that may really not be read."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, Ranks, steps_of

pytestmark = pytest.mark.system


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("later", ["false", "true"])
def test_disk_full_during_a_save_leaves_the_previous_checkpoint(
    later: str, ranks: Ranks, tiny: Path, small_disk: Path, tmp_path: Path
) -> None:
    overrides = ["train.steps=12", "checkpoint.interval=3", "train.resume=auto", f"train.output={small_disk}"]
    arguments = ["--config", str(tiny), "train.name=run", f"checkpoint.async={later}", *overrides]
    codes = ranks.run(1, arguments, tmp_path / "full.log")
    assert codes == [1], (tmp_path / "full.log.rank0").read_text()[-2000:]
    errors = [x for x in (tmp_path / "full.log.rank0").read_text().splitlines() if x.startswith("error: ")]
    assert (
        len(errors) == 1
        and "could not be written" in errors[0]
        and "MiB free" in errors[0]
        and "older ones are intact" in errors[0]
    )
    from lightnet_llm.checkpoint.store import newest_whole

    found = newest_whole(small_disk / "run" / "checkpoints", print)
    assert found is not None and found[0].name in ("step_00000003", "step_00000006")
    whole = steps_of(ranks.train(1, tiny, ["train.steps=12"], tmp_path, "whole"), "loss", "samples")
    subprocess.run(["mount", "-o", "remount,size=60m", str(small_disk)], check=True)
    codes = ranks.run(1, arguments, tmp_path / "again.log")
    assert codes == [0]
    from tests.conftest import read_metrics

    assert steps_of(read_metrics(small_disk / "run"), "loss", "samples") == whole


def test_disk_full_during_training_ends_in_one_line(ranks: Ranks, tiny: Path, small_disk: Path, tmp_path: Path) -> None:
    metrics = small_disk / "run" / "metrics.jsonl"

    def fill() -> None:
        while not (metrics.exists() and metrics.read_text().count("\n") > 5):
            time.sleep(0.02)
        disk = os.statvfs(small_disk)
        (small_disk / "other").write_bytes(bytes(disk.f_bavail * disk.f_frsize))

    overrides = ["train.steps=5000", "checkpoint.interval=5000", "logging.interval=1", f"train.output={small_disk}"]
    thread = threading.Thread(target=fill)
    thread.start()
    codes = ranks.run(1, ["--config", str(tiny), "train.name=run", *overrides], tmp_path / "full.log")
    thread.join()
    text = (tmp_path / "full.log.rank0").read_text()
    assert codes == [1] and text.count("error: ") == 1 and "Traceback" not in text, text
    assert "MiB free" in text and metrics.read_text().endswith("}\n")


def test_prep_on_a_full_disk_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"line {i} of a text that fills the disk\n" for i in range(400_000)))
    command = [sys.executable, "-c", "from lightnet_llm.cli import main; main()", "prep", str(corpus), str(corpus)]
    second = tmp_path / "more.txt"
    second.write_text(corpus.read_text()[:-10])
    result = subprocess.run(
        [*command[:-1], str(second), "--output", str(small_disk / "data"), "--vocab-size", "300"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: "), result.stderr
    assert not (small_disk / "data").exists()


def test_unreadable_file_as_an_ordinary_user(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "open.txt").write_text("readable\n" * 50)
    (corpus / "closed.txt").write_text("secret\n")
    (corpus / "closed.txt").chmod(0o000)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o755)
    code = "import os, tqdm, lightnet_data.prepare, lightnet_llm.cli.prep; os.setgid(65534); os.setuid(65534)\n"
    code += "from lightnet_llm.cli import main; main()"
    command = [sys.executable, "-c", code, "prep", str(corpus), "--output", "/tmp/lightnet-nobody"]
    environment = {**os.environ, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 1
    assert "closed.txt" in result.stderr and result.stderr.splitlines()[-1].startswith("error: "), result.stderr
    assert not Path("/tmp/lightnet-nobody").exists()
