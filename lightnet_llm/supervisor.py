"""Starts a run and starts it again: from the newest whole checkpoint, on the hosts that are left, and not for ever.

It starts nothing again that only the user can mend: a refused configuration, too many bad steps, a full disk; nor a run
that ended because it was asked to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config.run import RunConfig
from .errors import UserError
from .training.failures import ENDED, VARIABLE, Failure, read

Hosts = dict[str, int] | None  # slots by host name; None: this machine alone
SAME_STEP = 3  # failures at one step, without any progress between, after which another start is no use
LONGEST_BACK_OFF = 300.0


def legal_world(config: RunConfig, available: int) -> int | None:
    """The largest number of ranks up to ``available`` on which the run is legal with its global batch as it is.

    Tensor, pipeline and sequence sizes stay; the data-parallel size shrinks, and gradient accumulation grows for it.
    """
    from .training.schedule import budget_of

    model = config.parallel.tensor * config.parallel.pipeline * config.parallel.sequence
    for data in range(available // model, 0, -1):
        with contextlib.suppress(UserError):
            budget_of(config, data)
            return data * model
    return None


def trim(hosts: dict[str, int], world: int) -> dict[str, int]:
    """The first ``world`` slots of ``hosts``."""
    kept: dict[str, int] = {}
    for host, slots in hosts.items():
        if world > 0:
            kept[host] = min(slots, world)
            world -= kept[host]
    return kept


def answering(hosts: dict[str, int]) -> dict[str, int]:
    """The hosts that let ssh in, asked all at once; one whose name has no address any more is gone as well."""
    from .launch.command import ssh_arguments
    from .launch.hosts import is_here

    command = ["ssh", *ssh_arguments().split()]
    asked: dict[str, subprocess.Popen[bytes] | None] = {}
    for host in hosts:
        with contextlib.suppress(UserError):
            here = is_here(host)
            words = [*command, host, "true"]
            asked[host] = None if here else subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    alive = {}
    for host, process in asked.items():
        try:
            if process is None or process.wait(timeout=30) == 0:
                alive[host] = hosts[host]
        except subprocess.TimeoutExpired:
            assert process is not None
            process.kill()
    return alive


@dataclass
class Attempt:
    """What one start of the run came to."""

    code: int
    words: list[Failure]
    step: int
    problem: str | None = None  # why it was not even started

    @property
    def ended(self) -> bool:
        """Finished, or stopped as asked. A launcher that is killed exits 0 too, so its ranks must have said so."""
        return self.code == 0 and any(word.kind == ENDED for word in self.words)

    @property
    def refused(self) -> bool:
        """Whether only the user can mend it."""
        return bool(self.words) and self.words[0].kind == "refused"

    @property
    def cause(self) -> str:
        """One line."""
        if self.problem is not None:
            return self.problem
        if self.words and self.words[0].kind != ENDED:
            word = self.words[0]
            for_all = self.refused and word.rank == 0
            return word.message if for_all else f"{word.message} (said by rank {word.rank})"
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"exited with code {self.code}"
        return f"the launcher {how}, and no rank could say why"


class Supervisor:
    """Runs the launcher; the first signal asks the ranks to save and stop, a second one kills them.

    Args:
        config: the run.
        folder: its run folder.
        request_stop: asks the ranks to save and stop.
        command: command line and environment for a number of ranks, the hosts to use, and further overrides.
        restarts: how often it starts the run again.
        back_off: seconds before the first restart; doubled for each that follows without progress.
        available: which of the hosts are left.
        devices: ranks that this machine can run when there are no hosts.
        output: where the launcher's standard output goes.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        request_stop: Callable[[], None],
        command: Callable[[int, Hosts, tuple[str, ...]], tuple[list[str], dict[str, str]]],
        restarts: int = 0,
        back_off: float = 5.0,
        available: Callable[[dict[str, int]], dict[str, int]] = answering,
        devices: Callable[[], int] | None = None,
        output: Any = None,
    ):
        self.config, self.folder, self.request_stop, self.command = config, folder, request_stop, command
        self.restarts, self.back_off, self.available, self.devices = restarts, back_off, available, devices
        self.output = output
        self.process: subprocess.Popen[bytes] | None = None
        self.asked: float | None = None
        self.words = folder / "failures" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    # Signals ---------------------------------------------------------------------------------------------------------
    def _handle(self, _number: int, _frame: object) -> None:
        if self.asked is not None and time.monotonic() - self.asked < 2.0:
            return  # the same request, delivered to the process and to its group
        if self.asked is not None:
            _say("second signal: killing the ranks")
            self._kill()
            return
        self.asked = time.monotonic()
        _say("stop requested: the ranks save after the step they are in (again to kill them)")
        self.request_stop()

    def _kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    # Runs ------------------------------------------------------------------------------------------------------------
    def run(self, world: int, hosts: Hosts = None) -> None:
        """Until the run has ended well.

        Raises:
            UserError: it has not, and is not started again; says why.
        """
        heard = [x for x in self.SIGNALS if x != signal.SIGHUP or signal.getsignal(x) != signal.SIG_IGN]  # nohup's
        previous = {number: signal.signal(number, self._handle) for number in heard}
        try:
            self._run(world, hosts)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self, world: int, hosts: Hosts) -> None:
        full, given, same, last, count = world, hosts, 0, -1, 0
        while True:
            attempt = self._attempt(count, world, hosts)
            if attempt.ended:
                return
            if attempt.refused or self.asked is not None:
                again = "" if self.restarts == 0 else "; it is not started again"
                why = "" if attempt.refused else ", after a stop was requested"
                raise UserError(f"the run ended{why}: {attempt.cause}{again}")
            same = same + 1 if attempt.step == last else 1
            last = attempt.step
            facts = {"attempt": count + 1, "cause": attempt.cause, "at_step": attempt.step, "world": world}
            if count >= self.restarts:
                self._give_up(attempt, facts, f"after {count} restarts" if self.restarts else "")
            if same >= SAME_STEP:
                self._give_up(attempt, facts, f"because step {attempt.step} failed {same} times")
            pause = min(LONGEST_BACK_OFF, self.back_off * 2 ** (same - 1))
            self._event("failed", **facts)
            _say(f"failed at step {attempt.step}: {attempt.cause}")
            _say(f"restart {count + 1} of {self.restarts} in {pause:.0f} s")
            self._wait(pause, attempt)
            world, hosts = self._remaining(full, given, attempt)
            count += 1
            self._event("restarted", attempt=count + 1, world=world, hosts=hosts)
            if world != full:
                _say(f"going on with {world} of {full} ranks; the global batch stays")

    def _attempt(self, count: int, world: int, hosts: Hosts) -> Attempt:
        words = self.words / str(count)
        os.environ[VARIABLE] = str(
            words.resolve()
        )  # before the command is made: it may carry the environment elsewhere
        try:
            command, environment = self.command(world, hosts, ("train.resume=auto",) if count else ())
        except UserError as error:
            os.environ.pop(VARIABLE, None)
            if count == 0:
                raise
            return Attempt(1, [], self._last_logged(), str(error))  # such as a host that went in between
        try:
            self.process = subprocess.Popen(command, env=environment, stdout=self.output, start_new_session=True)
            code = self.process.wait()
        finally:
            self._kill()  # nothing it started stays behind
            os.environ.pop(VARIABLE, None)
        said = read(words)
        step = max((word.step for word in said), default=0) or self._last_logged()
        attempt = Attempt(code, said, step)
        if attempt.ended:
            shutil.rmtree(self.words, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.words.parent.rmdir()
        return attempt

    def _remaining(self, full: int, given: Hosts, attempt: Attempt) -> tuple[int, Hosts]:
        """Ranks and hosts to go on with."""
        if given is None:
            count = full if self.devices is None else min(full, self.devices() or full)
            world, hosts = legal_world(self.config, count), None
        else:
            alive = self.available(given)
            gone = sorted(set(given) - set(alive))
            if gone:
                _say(f"hosts gone: {', '.join(gone)}")
            count = min(full, sum(alive.values()))
            world = legal_world(self.config, count)
            hosts = trim(alive, world) if world else None
        if world is None:
            parallel = self.config.parallel
            model = parallel.tensor * parallel.pipeline * parallel.sequence
            raise UserError(
                f"{count} ranks are left, and parallel needs {model} (tensor x pipeline x sequence); the run ended with: "
                f"{attempt.cause}; start it again with train.resume=auto when hosts are back"
            )
        return world, hosts

    def _give_up(self, attempt: Attempt, facts: dict[str, Any], why: str) -> None:
        self._event("gave_up", **facts)
        how = f"given up {why}: " if why else "the run failed: "
        raise UserError(f"{how}{attempt.cause}, at step {attempt.step}; continue it with train.resume=auto")

    def _wait(self, seconds: float, attempt: Attempt) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.asked is not None:
                raise UserError(f"stopped before a restart; the run had failed: {attempt.cause}")
            time.sleep(0.1)

    # What it leaves in the run folder ----------------------------------------------------------------------------------
    def _last_logged(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            return max(int(json.loads(line)["step"]) for line in lines[-3:] if line.endswith("}"))
        return 0

    def _event(self, name: str, **facts: Any) -> None:
        """A line of metrics.jsonl, where the run's own events are; no rank writes while this does."""
        row = {"step": facts.pop("at_step", self._last_logged()), "time": round(time.time(), 3), "event": name, **facts}
        with contextlib.suppress(OSError), (self.folder / "metrics.jsonl").open("a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")  # a line cut by a kill
            file.write(json.dumps(row).encode() + b"\n")


def _say(message: str) -> None:
    print(f"supervisor: {message}", file=sys.stderr, flush=True)
