"""When a run is started again, on what, and when not. The launcher is a small script here."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.config import RunConfig, validate
from lightnet_llm.errors import UserError
from lightnet_llm.supervisor import Hosts, Supervisor, answering, legal_world, trim
from lightnet_llm.training import failures

RANK = """
import json, os, sys
from pathlib import Path
kind, message, step, code = json.loads(sys.argv[1])
if kind:
    from lightnet_llm.training import failures
    failures.record(kind, message, step)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def config(**train: Any) -> RunConfig:
    model = {"layers": 2, "width": 32, "heads": 2, "glu_width": 32, "vocab_size": 64}
    return validate({"model": model, "train": {"name": "run", "steps": 9, **train}}, "test")


class Launcher:
    """Plays the given ends of attempts: (kind, message, step, exit code)."""

    def __init__(self, tmp: Path, *ends: tuple[str, str, int, int]):
        self.tmp, self.ends, self.calls = tmp, list(ends), []  # type: ignore[var-annotated]

    def __call__(self, world: int, hosts: Hosts, further: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
        self.calls.append((world, hosts, further))
        if self.ends[0][0] == "none":
            raise UserError(self.ends.pop(0)[1])
        return [sys.executable, "-c", RANK, json.dumps(self.ends.pop(0))], dict(os.environ)

    def supervise(self, restarts: int, **given: Any) -> Supervisor:
        return Supervisor(given.pop("config", config()), self.tmp, lambda: None, self, restarts, 0.01, **given)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.tmp / "metrics.jsonl").read_text().splitlines()]


FINE = ("ended", "", 9, 0)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_that_nohup_had_ignored_stops_nothing(ignored: bool, tmp_path: Path) -> None:
    asked: list[bool] = []

    class HungUp(Launcher):
        def __call__(self, *arguments: Any) -> tuple[list[str], dict[str, str]]:
            os.kill(os.getpid(), signal.SIGHUP)
            return super().__call__(*arguments)

    supervisor = Supervisor(config(), tmp_path, lambda: asked.append(True), HungUp(tmp_path, FINE))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        supervisor.run(1)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert asked == ([] if ignored else [True])


def test_a_word_that_nobody_hears_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank must then say it itself."""
    monkeypatch.delenv(failures.VARIABLE, raising=False)
    assert not failures.record("refused", "no supervisor", 1)
    monkeypatch.setenv(failures.VARIABLE, str(tmp_path / "words"))
    assert failures.record("lost", "rank 1 is gone", 3)
    assert not failures.record("refused", "after another", 3)
    assert [word.message for word in failures.read(tmp_path / "words")] == ["rank 1 is gone"]
    (tmp_path / "file").touch()
    monkeypatch.setenv(failures.VARIABLE, str(tmp_path / "file" / "words"))
    assert not failures.record("refused", "no place", 1)


def test_a_good_run_leaves_nothing(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, FINE)
    launcher.supervise(3).run(2)
    assert launcher.calls == [(2, None, ())] and not list(tmp_path.iterdir())


def test_a_failed_run_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')  # cut by the kill
    launcher = Launcher(tmp_path, ("lost", "lost rank 1", 5, 70), ("", "", 0, -9), FINE)
    launcher.supervise(2).run(2)
    assert launcher.calls == [(2, None, ()), (2, None, ("train.resume=auto",)), (2, None, ("train.resume=auto",))]
    events = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines() if x.endswith("}")]
    assert [row.get("event") for row in events] == [None, "failed", "restarted", "failed", "restarted"]
    assert events[1]["cause"] == "lost rank 1 (said by rank 0)" and events[1]["step"] == 5
    assert "killed by signal 9" in events[3]["cause"]


@pytest.mark.parametrize(
    ("ends", "restarts", "message"),
    [
        (
            [("refused", "optimizer.clip is wrong", 0, 1)],
            5,
            "the run ended: optimizer.clip is wrong; it is not started",
        ),
        ([("lost", "lost rank 1", 5, 70)], 0, "the run failed: lost rank 1"),
        ([("hung", "h", step, 75) for step in (3, 4, 5)], 2, "given up after 2 restarts: h"),
        ([("failed", "a bug", 7, 70)] * 3, 9, "given up because step 7 failed 3 times: a bug"),
        (
            [("", "", 0, 0)] * 3,
            9,
            "given up because step 0 failed 3 times: the launcher exited with code 0, and no rank",
        ),
    ],
    ids=["refused", "no restarts", "used up", "same step", "launcher killed"],
)
def test_when_it_gives_up(ends: list[Any], restarts: int, message: str, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, *ends)
    with pytest.raises(UserError) as raised:
        launcher.supervise(restarts).run(2)
    assert message in str(raised.value) and not launcher.ends


def test_fewer_hosts_keep_the_global_batch(tmp_path: Path) -> None:
    """Of three hosts with two slots one is gone, then it is back: 4 ranks fit a batch of 12, 6 do, too."""
    all_hosts = {"a": 2, "b": 2, "c": 2}
    left = [{"a": 2, "c": 2}, all_hosts]
    launcher = Launcher(tmp_path, ("lost", "x", 4, 75), ("lost", "x", 5, 75), FINE)
    made = config(global_batch=12, micro_batch=1)
    launcher.supervise(3, config=made, available=lambda hosts: left.pop(0)).run(6, all_hosts)
    assert [call[:2] for call in launcher.calls] == [(6, all_hosts), (4, {"a": 2, "c": 2}), (6, all_hosts)]


def test_a_host_whose_name_has_no_address_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host == "gone":
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    assert answering({"gone": 2, "here": 4}) == {"here": 4}


def test_a_restart_that_cannot_be_made_is_one_that_failed(tmp_path: Path) -> None:
    """A host may go between the question and the start; the first start says so at once."""
    launcher = Launcher(tmp_path, ("lost", "lost rank 1", 5, 70), ("none", "host 'a' has no address", 0, 1), FINE)
    launcher.supervise(2).run(2)
    assert [row["cause"] for row in launcher.events() if row["event"] == "failed"] == [
        "lost rank 1 (said by rank 0)",
        "host 'a' has no address",
    ]
    with pytest.raises(UserError, match=r"^host 'a' has no address$"):
        Launcher(tmp_path, ("none", "host 'a' has no address", 0, 1)).supervise(2).run(2)


def test_too_few_hosts(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, ("lost", "lost host b", 4, 75))
    made = config()
    made.parallel.tensor = 2
    with pytest.raises(UserError, match=r"1 ranks are left, and parallel needs 2 .*lost host b.*train.resume=auto"):
        launcher.supervise(3, config=made, available=lambda hosts: {"a": 1}).run(2, {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("batch", "micro", "tensor", "available", "world"),
    [
        (12, 1, 1, 5, 4),
        (12, 1, 1, 6, 6),
        (8, 2, 1, 3, 2),
        (7, 1, 1, 6, 1),
        (8, 1, 2, 7, 4),
        (8, 1, 2, 1, None),
        (8, 1, 1, 0, None),
    ],
)
def test_legal_world(batch: int, micro: int, tensor: int, available: int, world: int | None) -> None:
    made = config(global_batch=batch, micro_batch=micro)
    made.parallel.tensor = tensor
    assert legal_world(made, available) == world


def test_trim() -> None:
    assert trim({"a": 4, "b": 4, "c": 4}, 6) == {"a": 4, "b": 2}
    assert trim({"a": 4}, 4) == {"a": 4}


def test_a_stop_while_it_waits(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.unit.test_supervisor import Launcher
launcher = Launcher(Path({str(tmp_path)!r}), ("lost", "lost rank 1", 5, 70))
supervisor = launcher.supervise(3)
supervisor.back_off = 100
supervisor.run(2)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while not (tmp_path / "metrics.jsonl").exists() and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "stopped before a restart; the run had failed: lost rank 1" in errors
