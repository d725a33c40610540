"""Worker processes that end with the process that started them, however that ends."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from lightnet_data.errors import DataError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def pool(workers: int) -> ProcessPoolExecutor:
    """A pool of so many processes, forked where that can be."""
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    made = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(os.getpid(),))
    with _later() as interrupted:  # one in the middle of a fork would leave a process that nobody knows of
        made.submit(os.getpid)  # starts them all
    if interrupted:
        made.shutdown(cancel_futures=True)
        raise KeyboardInterrupt
    return made


@contextlib.contextmanager
def _later() -> Iterator[list[int]]:
    """Keeps Ctrl-C back, and gives the list of those that came."""
    met: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # never met there
        yield met
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: met.append(number))
    try:
        yield met
    finally:
        signal.signal(signal.SIGINT, before)


def died(workers: int) -> DataError:
    """What to tell of a ``BrokenProcessPool``."""
    return DataError(f"a worker process died, most likely for want of memory; use fewer than --workers {workers}")


def _start(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":  # workers of a killed parent would wait for ever, and hold its lock
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
