"""The demo from corpus to report on a tiny corpus, its ways of refusing, and that it leaves no process behind."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "demo.py"
SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.glu_width=64", "train.steps=60"]
SMALL += ["logging.interval=2", "validation.interval=30", "validation.samples=8"]


def demo_command(folder: Path, corpus: Path, *overrides: str) -> list[str]:
    command = [sys.executable, str(SCRIPT), "--corpus", str(corpus)]
    command += ["--output", str(folder / "runs" / "demo"), "--data", str(folder / "data" / "demo")]
    return [*command, *(part for item in overrides for part in ("--set", item))]


def processes_about(folder: Path) -> list[list[str]]:
    """Command lines, other than this process's, that name ``folder``."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["pid"] != os.getpid() and any(str(folder) in word for word in words):
            found.append(words)
    return found


@pytest.fixture(scope="module")
def module():
    specification = importlib.util.spec_from_file_location("demo", SCRIPT)
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "some text.py"  # a name with a space
    path.write_text(Path(os.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


def test_standard_library_is_code_and_prose_without_tests(module):
    files = module.standard_library()
    assert any(path.parts[-2:] == ("pydoc_data", "topics.py") for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in files)
    assert sum(path.stat().st_size for path in files) > 5_000_000


@pytest.mark.parametrize(
    "text",
    [
        "line\n" * 5000,
        "x" * 20_000,
        "é\r\n" * 9000,
        "\n" * 9000,
        "short",
        "a\n" + "b" * 8_000 + "\n" + "c" * 7_999 + "\n",
    ],
)
def test_one_file_is_cut_into_documents_that_join_to_it(module, tmp_path, text):
    source = tmp_path / "text.txt"
    source.write_bytes(text.encode())
    target = module.cut(source, tmp_path / "new" / "corpus.jsonl")
    documents = [json.loads(line)["text"] for line in target.read_text(encoding="utf-8").splitlines()]
    assert "".join(documents).encode() == text.encode()
    assert all(0 < len(document) <= module.DOCUMENT for document in documents)
    if max(map(len, text.splitlines())) < module.DOCUMENT // 2:
        assert all(document.endswith("\n") for document in documents[:-1])


def test_a_folder_of_somebody_else_is_left_alone(tmp_path, corpus):
    mine = tmp_path / "runs" / "demo" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    result = subprocess.run(demo_command(tmp_path, corpus), capture_output=True, text=True)
    assert result.returncode == 1
    assert "was not made by the demo" in result.stderr and len(result.stderr.splitlines()) == 1
    assert mine.read_text() == "years of work"


def test_unknown_corpus_is_one_line(tmp_path):
    result = subprocess.run(demo_command(tmp_path, tmp_path / "nowhere"), capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == f"demo: corpus {tmp_path / 'nowhere'}: no such file or folder\n"


@pytest.mark.slow
def test_too_little_text_is_one_line(tmp_path):
    corpus = tmp_path / "haiku.txt"
    corpus.write_text("An old silent pond.\nA frog jumps into the pond.\nSplash! Silence again.\n" * 4)
    result = subprocess.run(demo_command(tmp_path, corpus), capture_output=True, text=True)
    assert result.returncode == 1
    assert "single document" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_whole_demo(tmp_path, corpus):
    run = tmp_path / "runs" / "demo"
    command = demo_command(tmp_path, corpus, *SMALL)
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not processes_about(tmp_path)

    events = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "event" in row]
    assert [row["event"] for row in events] == ["saved", "stopped", "resumed", "saved", "finished"]
    stopped, finished = events[1]["step"], events[-1]["step"]
    assert 30 <= stopped < 60 and events[2]["step"] == stopped and finished == 60

    held = json.loads((run / "heldout.json").read_text())
    page = (run / "report.html").read_text(encoding="utf-8")
    assert len(re.findall(r"<svg|<img[^>]+src=.data:", page)) >= 3  # loss, learning rate, throughput
    assert not re.findall(r"(?:src|href)=.(?!data:|#)[^\s>]*\.(?:png|svg|js|css)", page)  # nothing outside the file
    numbers = [held["bits_per_byte"], *(entry["bits_per_byte"] for entry in held["baselines"].values())]
    assert len(numbers) == 3
    for number in numbers:
        assert f"{number:.4f}" in page and f"{number:.3f}" in result.stdout
    assert "learning_rate" in page and (run / "sample.txt").stat().st_size > 100

    # A bad override is found before anything of the earlier run is removed.
    again = subprocess.run([*command, "--set", "train.steps=nonsense"], capture_output=True, text=True)
    assert again.returncode == 1 and "train.steps" in again.stderr.splitlines()[-1]
    assert (run / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_the_next_demo_starts_afresh(module, capsys, tmp_path, corpus, number):
    command = demo_command(tmp_path, corpus, *SMALL, "train.steps=100000")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "demo" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "demo: stopped; nothing is left running"
    assert not processes_about(tmp_path)

    module.claim(metrics.parent)
    assert "fresh run" in capsys.readouterr().out and not metrics.exists()
