"""What a preparation makes of interruptions: it goes on from finished parts and ends as if nothing had been."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import Result
from datatrove.pipeline.base import PipelineStep
from lightnet_data import manifest, pipeline
from lightnet_data import workers as processes
from lightnet_data.documents import DocumentReader
from lightnet_data.errors import DataError
from lightnet_data.executors import LocalExecutor
from lightnet_data.storage import TokenStore
from lightnet_data.tokenizer import Tokenizer
from lightnet_data.verify import verify

Run = Callable[..., Result]
PART_BYTES = 7000
# The command line in a process of its own, over small parts, each document slowed by argv[1] seconds.
PREP = f"""
import sys, time
from lightnet_data import parts
from lightnet_data.tokenizer import Tokenizer
from lightnet_llm.cli import main
parts.PART_BYTES = {PART_BYTES}
wait, original = float(sys.argv[1]), Tokenizer.encode_array
def slowly(self, text):
    time.sleep(wait)
    return original(self, text)
Tokenizer.encode_array = slowly
main(sys.argv[2:])
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightnet_data.parts.PART_BYTES", PART_BYTES)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts that were tokenised in this process."""
    ranks: list[int] = []
    original = pipeline.TokenWriter.run

    def run(self: pipeline.TokenWriter, data: Iterator[object], rank: int = 0, world_size: int = 1) -> None:
        original(self, data, rank, world_size)  # type: ignore[arg-type]
        ranks.append(rank)

    monkeypatch.setattr(pipeline.TokenWriter, "run", run)
    return ranks


def killed(arguments: list[object], partial: Path, parts: int, kill: Callable[[int], None]) -> int:
    """Start a slow preparation and end it once so many parts are done; its exit status."""
    command = [sys.executable, "-c", PREP, "0.05", "prep", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 200
    while len(list(partial.glob("parts/*.json"))) < parts:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.01)
    kill(process.pid)
    return process.wait(120)


def wait_for_lock(partial: Path) -> None:
    """Until the workers of a killed process are gone, too."""
    deadline = time.time() + 30
    with (partial / ".lightnet-prep.lock").open("r+") as lock:
        while time.time() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.05)
    raise AssertionError("workers outlive their killed parent")


@pytest.mark.parametrize(
    ("workers", "end"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGINT), (2, signal.SIGTERM)]
)
def test_killed_and_run_again_equals_uninterrupted(
    tmp_path: Path,
    corpus: Path,
    run_prep: Run,
    tokenizer_file: Path,
    small_parts: None,
    tokenized: list[int],
    workers: int,
    end: signal.Signals,
) -> None:
    options: list[object] = ["--tokenizer", tokenizer_file, "--shard-tokens", 3000]
    assert run_prep(corpus, "--output", tmp_path / "whole", *options).exit_code == 0
    parts = list(tokenized)
    assert len(parts) >= 8
    partial = tmp_path / "out.partial"
    given = [corpus, "--output", tmp_path / "out", *options]
    code = killed([*given, "--workers", workers], partial, 2, lambda pid: os.kill(pid, end))
    assert code in (-end, 1) and not (tmp_path / "out").exists()
    wait_for_lock(partial)
    done = {int(path.stem) for path in partial.glob("parts/*.json")}
    tokenized.clear()
    result = run_prep(*given)
    assert result.exit_code == 0 and "left behind by a run that was stopped" in result.stderr
    assert 2 <= len(done) < len(parts)
    assert sorted(tokenized) == sorted(set(parts) - done)  # finished parts are not redone
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out", "whole"}


def interrupted(run_prep: Run, given: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that finishes its parts and then fails."""
    with monkeypatch.context() as patch:
        patch.setattr("lightnet_data.merging.write", lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space")))
        assert run_prep(*given).exit_code == 1


def test_only_changed_inputs_are_redone(
    tmp_path: Path,
    corpus: Path,
    run_prep: Run,
    tokenizer_file: Path,
    tokenized: list[int],
    monkeypatch: pytest.MonkeyPatch,
    small_parts: None,
) -> None:
    (tmp_path / "in").mkdir()
    lines = corpus.read_text().splitlines(keepends=True)
    for number in range(4):
        (tmp_path / "in" / f"{number}.jsonl").write_text("".join(lines[number * 6 : number * 6 + 6]))
    given: list[object] = [tmp_path / "in", "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
    interrupted(run_prep, given, monkeypatch)
    assert tokenized == [0, 1, 2, 3]
    (tmp_path / "in" / "2.jsonl").write_text("".join(lines[40:47]))
    tokenized.clear()
    result = run_prep(*given)
    assert result.exit_code == 0 and "1 finished parts are of other inputs" in result.stderr
    assert tokenized == [2]
    whole = run_prep(*given[:2], tmp_path / "whole", *given[3:])
    assert whole.exit_code == 0 and contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("dedup", [[], ["--dedup", "minhash"]])
def test_finished_work_before_the_first_part_is_kept(
    tmp_path: Path, corpus: Path, run_prep: Run, monkeypatch: pytest.MonkeyPatch, small_parts: None, dedup: list[str]
) -> None:
    """Ctrl-C after the corpus was read once: the next run does not read it for the same purpose again."""
    given = [corpus, "--output", tmp_path / "out", "--vocab-size", 600, *dedup]
    stopped = "lightnet_data.pipeline.SampleWriter.run" if dedup else "lightnet_data.prepare._fit"
    with monkeypatch.context() as patch:
        patch.setattr(stopped, lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run_prep(*given).exit_code == 1
    done = sorted((tmp_path / "out.partial" / "logs").glob("*/completions/*"))
    assert len(done) >= 8
    before = [path.stat().st_mtime_ns for path in done]
    interrupted(run_prep, given, monkeypatch)
    assert [path.stat().st_mtime_ns for path in done] == before
    assert run_prep(*given).exit_code == 0
    whole = [corpus, "--output", tmp_path / "whole", *given[3:]]
    assert run_prep(*whole).exit_code == 0 and contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_refused_merge_keeps_the_parts(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path, tokenized: list[int], small_parts: None
) -> None:
    """A length that the train split has no sample of; with a smaller one, only the merge is done again."""
    given = [corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--format", "webdataset"]
    refused = run_prep(*given, "--sequence-length", 10**6)
    assert refused.exit_code == 1 and "the train split has" in refused.stderr
    assert tokenized
    tokenized.clear()
    assert run_prep(*given, "--sequence-length", 32).exit_code == 0 and tokenized == []


def test_a_held_out_split_shorter_than_a_sample_is_left_out(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path
) -> None:
    given = [corpus, "--tokenizer", tokenizer_file, "--holdout", 1e-9, "--format", "webdataset"]
    result = run_prep(*given, "--output", tmp_path / "out", "--sequence-length", 1500)
    assert result.exit_code == 0, result.stderr
    assert "the validation split has" in result.stderr and "it is left out" in result.stderr
    assert "tokens, left out" in result.stdout
    split = manifest.load(tmp_path / "out")["splits"]["validation"]
    assert split["documents"] == 1 and "webdataset" not in split and not list((tmp_path / "out").glob("validation*"))
    found = verify(tmp_path / "out")
    assert not found.problems and not found.notes


def test_another_tokenizer_redoes_all_and_another_shard_size_nothing(
    tmp_path: Path,
    corpus: Path,
    run_prep: Run,
    tokenizer_file: Path,
    python_texts: list[str],
    tokenized: list[int],
    monkeypatch: pytest.MonkeyPatch,
    small_parts: None,
) -> None:
    other = Tokenizer.train(python_texts, 500).save(tmp_path)
    given: list[object] = [corpus, "--output", tmp_path / "out", "--tokenizer"]
    interrupted(run_prep, [*given, tokenizer_file], monkeypatch)
    parts = list(tokenized)
    tokenized.clear()
    interrupted(run_prep, [*given, tokenizer_file, "--shard-tokens", 500, "--holdout", 0.2], monkeypatch)
    assert tokenized == []
    assert run_prep(*given, other).exit_code == 0
    assert tokenized == parts
    assert max(max(document.tokens) for document in DocumentReader(tmp_path / "out" / "train")) < 500


def test_a_changed_file_of_a_finished_set_is_refused(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path, python_texts: list[str]
) -> None:
    given = [corpus, "--output", tmp_path / "out", "--tokenizer"]
    assert run_prep(*given, tokenizer_file).exit_code == 0
    before = contents(tmp_path / "out")
    refused = run_prep(*given, Tokenizer.train(python_texts, 500).save(tmp_path))
    assert refused.exit_code == 1 and "made with another tokenizer" in refused.stderr
    corpus.write_text(corpus.read_text().replace("def", "fed", 1))  # the same size
    refused = run_prep(*given, tokenizer_file)
    assert refused.exit_code == 1 and "made from other files" in refused.stderr
    assert contents(tmp_path / "out") == before


def limited(limits: dict[int, int], *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line under resource limits."""

    def limit() -> None:
        for what, value in limits.items():
            resource.setrlimit(what, (value, value))

    command = [sys.executable, "-c", PREP, "0", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=300, check=False)


def test_a_disk_that_takes_no_more(tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path) -> None:
    """A limit on the size of a file stands for the full disk: write() fails in the middle of a part."""
    options = ["--tokenizer", tokenizer_file]
    for workers in (1, 2):
        given = [corpus, "--output", tmp_path / "out", *options, "--workers", workers]
        failed = limited({resource.RLIMIT_FSIZE: 3000}, "prep", *given)
        assert failed.returncode == 1 and failed.stdout == ""
        assert (
            failed.stderr.startswith("error: ") and failed.stderr.count("\n") == 1 and "File too large" in failed.stderr
        )
        assert not (tmp_path / "out").exists()
    assert run_prep(corpus, "--output", tmp_path / "out", *options).exit_code == 0
    assert run_prep(corpus, "--output", tmp_path / "whole", *options).exit_code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk(tmp_path: Path, python_texts: list[str], tokenizer_file: Path) -> None:
    corpus, disk = tmp_path / "corpus.jsonl", tmp_path / "disk"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in python_texts) * 20)
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        failed = limited({}, "prep", corpus, "--output", disk / "out", "--tokenizer", tokenizer_file)
        assert failed.returncode == 1 and failed.stderr.count("\n") == 1
        assert failed.stderr.startswith("error: ") and "No space left" in failed.stderr
        assert not (disk / "out").exists()
    finally:
        subprocess.run(["umount", disk], check=False)


def test_a_hundred_shards_with_few_open_files(tmp_path: Path, python_texts: list[str], tokenizer_file: Path) -> None:
    """``ulimit -n 64``, 100 input files, four workers, and more than 100 output shards."""
    (tmp_path / "in").mkdir()
    for number in range(100):
        text = python_texts[number % 9][number * 20 :][:1500]
        (tmp_path / "in" / f"{number:03d}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    given = [tmp_path / "in", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--holdout", 0, "--json"]
    few = {resource.RLIMIT_NOFILE: 64}
    done = limited(few, "prep", *given, "--workers", 4, "--shard-tokens", 1)
    assert done.returncode == 0, done.stderr
    split = json.loads(done.stdout)["splits"]["train"]
    assert split["documents"] == 100 and len(split["shards"]) == 100
    for command in (["verify", tmp_path / "out"], ["inspect", tmp_path / "out", "--random", 3, "--json"]):
        done = limited(few, "data", *command)
        assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["shown"]) == 5


class Waits(PipelineStep):
    """The second task fails, unless Ctrl-C is to come first; others take a minute."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        if rank == 1 and self.fails:
            raise DataError("the second")
        time.sleep(0.5 if rank == 0 and self.fails else 60)


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_end_waits_for_no_later_part(interrupted: bool, tmp_path: Path) -> None:
    """After a failure what comes before it in the corpus is waited for; after Ctrl-C nothing is."""
    executor = LocalExecutor([Waits(not interrupted)], 6, workers=3, logging_dir=str(tmp_path), skip_completed=True)
    begun, others = time.monotonic(), psutil.Process().children()
    if interrupted:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
    with pytest.raises(KeyboardInterrupt if interrupted else DataError, match=None if interrupted else "the second"):
        executor.run()
    assert time.monotonic() - begun < 30
    completed = sorted(path.name for path in tmp_path.glob("completions/*"))
    assert completed == [] if interrupted else completed == ["00000"]
    assert not [child for child in psutil.Process().children() if child not in others]


def test_two_preparations_into_one_folder(tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path) -> None:
    given = [corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
    command = [sys.executable, "-c", PREP, "0.05", "prep", *map(str, given)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.time() + 60
    while not (tmp_path / "out.partial" / "plan.pickle").exists():
        assert first.poll() is None and time.time() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # however slow the second one is, the first has not ended before it
    second = run_prep(*given)
    first.send_signal(signal.SIGCONT)
    assert second.exit_code == 1 and "another lightnet prep is writing it" in second.stderr
    assert first.wait(60) == 0
    assert manifest.load(tmp_path / "out")["documents"] == 60


def test_a_killed_worker_is_an_error_and_the_rest_is_kept(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path, small_parts: None
) -> None:
    given = [corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file]

    def kill_a_worker(parent: int) -> None:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

    assert killed([*given, "--workers", 2], tmp_path / "out.partial", 2, kill_a_worker) == 1
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    assert run_prep(*given).exit_code == 0
    assert run_prep(corpus, "--output", tmp_path / "whole", "--tokenizer", tokenizer_file).exit_code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_ends_of_documents_and_parts_add_up(
    tmp_path: Path,
    corpus: Path,
    run_prep: Run,
    tokenizer_file: Path,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many end-of-document tokens as documents, and parts merged are the whole tokenised at once, last one included."""
    options = ["--tokenizer", tokenizer_file, "--holdout", 0]
    assert run_prep(corpus, "--output", tmp_path / "parts", *options, "--workers", 3).exit_code == 0
    monkeypatch.undo()
    assert run_prep(corpus, "--output", tmp_path / "whole", *options).exit_code == 0
    for name in ("train.bin", "train.idx", "train.bytes.npy"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    tokenizer = Tokenizer.load(tokenizer_file)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    expected = np.concatenate([[*tokenizer.encode(text), tokenizer.eod_id] for text in texts])
    store = TokenStore(tmp_path / "parts" / "train")
    tokens = np.fromfile(tmp_path / "parts" / "train.bin", dtype=np.uint16)
    assert tokens.tolist() == expected.tolist()
    assert (tokens == store.eod_id).sum() == len(store) == len(texts) == manifest.load(tmp_path / "parts")["documents"]


def test_ctrl_c_while_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a fork it would leave a process behind that is in no list, and that the exit waits for."""
    others, fork = psutil.Process().children(), os.fork

    def interrupted() -> int:
        child = fork()
        if child:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return child

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", interrupted)
        with pytest.raises(KeyboardInterrupt):
            processes.pool(2)
    assert not [child for child in psutil.Process().children() if child not in others]
    with processes.pool(2) as pool:
        assert pool.submit(max, 1, 2).result() == 2
