"""Ends a run that makes no progress, and says who is to blame: every rank runs one, in threads of their own.

One thread exchanges short records with the other ranks through the TCP store that torch.distributed started; it may block when
the store's host is gone. The other only looks at clocks and at what the first has heard, so that it always comes to an end:
it dumps the stacks of all threads to ``hangs/`` in the run folder, names the ranks that have not arrived, and leaves the
process, even when the main thread is stuck in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist

from ..config.run import WatchdogConfig
from . import failures
from .late import Record, describe, late_ranks
from .progress import Identity, Progress, collectives_entered, device_collective, flight_recorder, waiting_in

SHORTEST, SLOWER, COMPILING = 45.0, 5.0, 3  # seconds; times the slowest recent step; steps of a start that may compile
TICK = 1.0  # seconds between records
HURRIED = 0.2  # the same while there is something to say or somebody to meet
STALL = 2.0  # seconds without a note after which a rank says in detail where it is and listens to the others
SILENT = 3.0  # seconds after which a rank counts as silent when it is asked why nothing moves
GRACE = 10.0  # seconds for a rank to end by itself after another one said that it failed
SMALL = 64  # ranks that listen to each other all the time: the store answers some ten thousand questions a second
END = "end"  # key of the first rank's word that the run is over


def step_limit(config: WatchdogConfig, recent: list[float]) -> float:
    """Longest time for a step, in seconds, after steps that took ``recent`` seconds."""
    if config.step_seconds is not None:
        return config.step_seconds if len(recent) >= COMPILING else max(config.step_seconds, config.other_seconds)
    if len(recent) < COMPILING:
        return config.other_seconds
    return max(SHORTEST, SLOWER * max(recent))


class Watchdog:
    """One rank's watchdog. Off when ``config.step_seconds`` is 0: then it never starts a thread.

    Args:
        config: time limits.
        folder: stacks are written here when the run has to be ended; made only then.
        rank, world: of the run.

    Attributes:
        progress: noted by the main thread.
    """

    def __init__(self, config: WatchdogConfig, folder: Path, rank: int, world: int):
        self.config, self.folder, self.rank, self.world = config, folder, rank, world
        self.progress, self.identity = Progress(), Identity()
        self.beats = 0
        self.peers: dict[int, Record] = {}
        self.heard: dict[int, tuple[int, float]] = {}  # beats of a peer, and when they last changed, by our clock
        self.notice: dict[str, Any] | None = None  # what ended the run, by the rank that said it first
        self.noticed = 0.0
        self.contact = time.monotonic()  # when the store last answered
        self._said: dict[str, Any] | None = None  # what this rank wants to say
        self._complained = False
        self._left = threading.Event()
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._first_missed: dict[int, float] = {}
        if config.step_seconds != 0:
            for target in (self._exchange, self._watch):
                threading.Thread(target=target, name=target.__name__, daemon=True).start()

    # The thread that talks --------------------------------------------------------------------------------------------
    def _record(self) -> Record:
        record: Record = {"beats": self.beats, "step": self.progress.step, "at": str(self.progress)}
        record |= self.identity.as_dict() | {"left": self._left.is_set()}
        if time.monotonic() - self.progress.moved > STALL:
            collective, place = waiting_in()
            record |= {"collective": collective or device_collective(), "place": place, "groups": collectives_entered()}
        return record

    def _exchange(self) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        prefix = f"lightnet/watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/"
        store: Any = None
        wait = max(TICK, self.world / 64)  # the store answers some thousand small questions a second
        while not self._closed.is_set():
            self.beats += 1
            try:
                if store is None:
                    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
                store.set(f"{prefix}{self.rank}", json.dumps(self._record()))
                if self._said is not None:
                    word = store.compare_set(prefix + END, "", json.dumps(self._said)).decode()
                    self._hear(word)
                elif store.check([prefix + END]):
                    self._hear(store.get(prefix + END).decode())
                self.contact = time.monotonic()
                if self.world <= SMALL or time.monotonic() - self.progress.moved > STALL:
                    self._listen(store, prefix)
            except Exception as error:
                store = None
                if not isinstance(error, (RuntimeError, ValueError)):  # torch's store errors, which may last
                    self._complain(error)
            if self._left.is_set():
                self._closed.set()
                return
            met = self.world > SMALL or len(self.peers) == self.world - 1  # who is never met cannot be named or ended
            (self._left if self._said is None else self._closed).wait(wait if met and self._said is None else HURRIED)

    def _listen(self, store: Any, prefix: str) -> None:
        others = [rank for rank in range(self.world) if rank != self.rank]
        keys = [f"{prefix}{rank}" for rank in others]
        if not store.check(keys):  # someone has not begun yet
            others = [rank for rank in others if store.check([f"{prefix}{rank}"])]
            keys = [f"{prefix}{rank}" for rank in others]
        now = time.monotonic()
        for rank, text in zip(others, store.multi_get(keys) if keys else [], strict=True):
            record = json.loads(text)
            self.peers[rank] = record
            if self.heard.get(rank, (-1, 0.0))[0] != record["beats"]:
                self.heard[rank] = (record["beats"], now)

    def _hear(self, word: str) -> None:
        if word and self.notice is None:
            self.noticed = time.monotonic()
            self.notice = json.loads(word)

    # The thread that judges -------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        while not self._closed.wait(TICK / 2):
            try:
                self._look()
            except RuntimeError:  # a mapping that the other thread changes just now
                continue
            except Exception as error:
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        """Say once what went wrong in the watchdog itself: it goes on watching."""
        if not self._complained:
            self._complained = True
            with contextlib.suppress(OSError):
                print(f"warning: watchdog of rank {self.rank}: {error!r}; it goes on", file=sys.stderr, flush=True)

    def _look(self) -> None:
        now, progress = time.monotonic(), self.progress
        stalled = now - progress.moved
        if self.notice is not None and self.notice["rank"] != self.rank:
            if self.notice["kind"] == "hung" or now - self.noticed > GRACE:
                self._end("hung" if self.notice["kind"] == "hung" else "lost", self.notice["message"])
            return
        gone = {rank for rank in self._dead() if now - self._first_missed.setdefault(rank, now) > GRACE / 2}
        if gone and stalled > STALL:
            self._end("lost", self._lost(gone, "killed or crashed"))
        silence = self.config.silent_seconds
        if stalled > silence and (silent := self._silent(silence)):
            self._end("lost", f"{self._lost(silent, 'gone, frozen or cut off')}; {self._story(silent)}")
        if stalled > silence and now - self.contact > silence and self.rank != 0:
            self._end("lost", "lost rank 0, which holds the store, before anything was heard of it")
        limit = (
            step_limit(self.config, list(progress.recent)) if progress.phase == "step" else self.config.other_seconds
        )
        if now - progress.since > limit:
            passed = now - progress.since
            if dead := self._dead():
                self._end("lost", self._lost(dead, "killed or crashed"))
            self._end("hung", f"{progress} has not ended after {passed:.0f} s: {self._story(self._silent(SILENT))}")

    def _silent(self, seconds: float) -> set[int]:
        """Ranks not heard for so long; when the store itself does not answer, that is rank 0, and of others nothing is known."""
        now, slack = time.monotonic(), max(0.0, self.world / SMALL - TICK)
        if now - self.contact > seconds + slack and self.rank != 0:
            return {0} if 0 in self.peers else set()
        return {r for r, (_, at) in self.heard.items() if now - at > seconds + slack and not self.peers[r]["left"]}

    def _dead(self) -> set[int]:
        """Ranks on this host whose process is gone although they never said that they leave."""
        here = {r: p for r, p in self.peers.items() if self.identity.shares(p) and not p["left"]}
        return {rank for rank, record in here.items() if self.identity.process_of(record) is None}

    def _lost(self, ranks: set[int], how: str) -> str:
        named = ", ".join(
            f"rank {r} (host {self.peers[r]['host']}, pid {self.peers[r]['pid']})" for r in sorted(ranks)[:4]
        )
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"lost {named}{more}: {how}, last seen in {self.peers[min(ranks)]['at']}"

    def _story(self, silent: set[int]) -> str:
        records = {**self.peers, self.rank: self._record()}
        for rank in silent:
            record = records[rank]
            if self.identity.shares(record) and (process := self.identity.process_of(record)) is not None:
                with contextlib.suppress(psutil.Error):
                    record["state"] = process.status()
        late = late_ranks(records, silent)
        if not late:
            return f"nothing tells the ranks apart; {describe(records, [], set())}"
        return describe(records, late, silent)

    # The end ----------------------------------------------------------------------------------------------------------
    def _end(self, kind: str, message: str) -> NoReturn:
        """Say it, dump all stacks, leave nothing behind and go, whatever fails on the way."""
        try:
            self._say(kind, message)
        finally:
            with contextlib.suppress(Exception):
                end_children()  # last: PyTorch would have the main thread fail at a loader's worker that is killed
            os._exit(failures.HUNG)

    def _say(self, kind: str, message: str) -> None:
        with self._ending:
            own = self.notice is None
            if own:
                self._said = {"kind": "hung", "rank": self.rank, "message": message}  # the others dump and go, too
                deadline = time.monotonic() + 3.0
                while self.notice is None and time.monotonic() < deadline:
                    time.sleep(0.05)
            first = self.notice is None or self.notice["rank"] == self.rank
            path = self._dump()
            failures.record(kind if first else "lost", f"{message}; stacks: {path.parent}", self.progress.step)
            if first:
                text = f"error: rank {self.rank}: {message}; stacks of every rank that could write them: {path.parent}"
                with contextlib.suppress(OSError):  # a launcher that died took the pipe with it
                    print(f"\n{text}", file=sys.stderr, flush=True)
                with contextlib.suppress(OSError):
                    (path.parent / "report.txt").write_text(text + "\n")
            self._kill_frozen()
            # The others must hear of it first; whoever holds the store goes last.
            time.sleep(3 * TICK if self.rank == 0 else 2 * TICK if first else TICK)

    def _dump(self) -> Path:
        path = self.folder / f"rank_{self.rank:05d}.txt"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write(f"rank {self.rank}, host {self.identity.host}, pid {self.identity.pid}: {self.progress}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            trace = flight_recorder(active=False)
            if trace is not None:
                path.with_suffix(".collectives.json").write_text(json.dumps(trace))
        return path

    def _kill_frozen(self) -> None:
        """A stopped process takes no signal but this one, and would stay behind."""
        for record in list(self.peers.values()):
            if self.identity.shares(record) and (process := self.identity.process_of(record)) is not None:
                with contextlib.suppress(psutil.Error):
                    if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                        process.kill()

    @property
    def ending(self) -> bool:
        """Whether this watchdog is about to leave the process, so that no other thread need say anything."""
        return self._ending.locked() or (self.notice is not None and self.notice["kind"] == "hung")

    # For the main thread ----------------------------------------------------------------------------------------------
    def announce(self, message: str) -> None:
        """This rank ends with an error; the others need not wait for it."""
        if self.config.step_seconds == 0:
            return
        self._said = {"kind": "failed", "rank": self.rank, "message": f"rank {self.rank} ended: {message}"}
        deadline = time.monotonic() + 6.0
        while self.notice is None and time.monotonic() < deadline and not self._closed.is_set():
            time.sleep(0.05)
        if self.rank == 0 and self.world > 1:
            time.sleep(2 * TICK)  # with this process goes the store that carries the word

    def cause(self, seconds: float = 5.0) -> str | None:
        """Why a collective of this rank may have failed: what another rank said, or one that is gone; waits a moment."""
        self.progress.moved = min(self.progress.moved, time.monotonic() - 2 * STALL)  # listen to the others
        deadline = time.monotonic() + (seconds if self.config.step_seconds != 0 else 0)
        dead: set[int] = set()
        asked = 0
        while time.monotonic() < deadline:
            if self.ending:
                time.sleep(60)
            if self.notice is not None and self.notice["rank"] != self.rank:
                return str(self.notice["message"])
            if not dead:
                dead, asked = self._dead(), self.beats
            elif self.beats > asked + 1:  # what it said before it went has been asked for since, and there is nothing
                break
            time.sleep(0.1)
        if self.notice is not None and self.notice["rank"] != self.rank:
            return str(self.notice["message"])
        return self._lost(dead, "killed or crashed") if dead else None

    def leave(self) -> None:
        """This rank has done its work: nobody need wait for it or miss it."""
        self._left.set()
        if self.config.step_seconds != 0:
            self._closed.wait(3.0)


def end_children() -> None:
    """Kill what this process started, such as data loaders."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


current: Watchdog | None = None  # of this process, for the entry point, which outlives the run
