"""Functions run in forks of one process that has imported what they need: for tests that ran a Python each.

`python -m tests.forks MODULE...` imports the modules and serves, one JSON object a line. In: {"target", "arguments", "log",
"timeout", "environment"}, one at a time. Out: {"code"}. `target` is "module:function"; the function finds its arguments in
sys.argv and what it returns is the exit code. A fork that is late is killed with the processes that it started.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[1]
LATE = -9999


class Done(NamedTuple):
    """What came of a run."""

    code: int
    output: str


class Forks:
    """The process, started by the first run. It ends with this one."""

    def __init__(self, *modules: str, **environment: str) -> None:
        self.modules, self.environment = modules, environment
        self.process: subprocess.Popen[str] | None = None

    def run(self, target: str, *arguments: str, timeout: float = 240, **environment: str) -> Done:
        """Call a function, "module:name", in a fork; standard output and error come together."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with tempfile.NamedTemporaryFile("r", suffix=".log", errors="replace") as log:
            request = {"target": target, "arguments": arguments, "log": log.name, "timeout": timeout}
            try:
                process.stdin.write(json.dumps({**request, "environment": environment}) + "\n")
                process.stdin.flush()
                reply, output = process.stdout.readline(), log.read()
            except BaseException:  # a test's time limit, Ctrl-C: nobody must read this run's reply for another's
                self._end(process)
                raise
        assert reply, f"the process that forks {target} has ended"
        code = json.loads(reply)["code"]
        assert code != LATE, f"{target} took longer than {timeout} s\n{output[-3000:]}"
        return Done(code, output)

    def _end(self, process: "subprocess.Popen[str]") -> None:
        """Kill the process and what it has forked, each the first of a session."""
        self.process = None
        with contextlib.suppress(OSError):
            forked = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in map(int, forked):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        process.kill()
        process.wait()

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", *self.modules],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self.process.communicate)
        return self.process


def _call(request: dict[str, Any], replies: IO[str]) -> NoReturn:
    def run() -> Any:
        os.setsid()
        detach(replies, request["log"], os.O_APPEND)
        os.environ.update(request["environment"])
        module, _, name = request["target"].partition(":")
        sys.argv[1:] = request["arguments"]
        return getattr(importlib.import_module(module), name)()

    end_with(run)


def detach(replies: IO[str], log: str, flags: int) -> None:
    """Of a fork: what it reads is nothing, what it writes goes to the log, and it answers nobody."""
    os.close(replies.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY | flags, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def end_with(run: Callable[[], Any]) -> NoReturn:
    """Of a fork: its life, and its exit code."""
    code = 1
    try:
        code = int(run() or 0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return LATE
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(found[1])


def serve(modules: list[str]) -> None:
    """Answer requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            _call(request, replies)
        print(json.dumps({"code": _wait(pid, request["timeout"])}), file=replies, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
