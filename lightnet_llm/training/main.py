"""What every rank runs: ``deepspeed launch/train.py --config CONFIG [key=value ...]``."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import sys
import threading
import warnings
from typing import NoReturn

from ..imports import uncollected, without_compiler
from ..launch import times


def main(arguments: list[str] | None = None) -> int:
    """Parse, train, and turn what goes wrong into one line. Returns the exit code, see :mod:`.failures`."""
    times.begin()
    parser = argparse.ArgumentParser(prog="launch/train.py", description="One rank of a LightNet training run.")
    parser.add_argument("--config", required=True, help="YAML file or preset name")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    parser.add_argument("--launched", action="store_true", help="set by `lightnet train`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    given = parser.parse_args(arguments)
    os.environ.setdefault("LOCAL_RANK", str(given.local_rank))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)  # a single process may be started without a launcher
    if os.environ["RANK"] != "0":
        logging.disable(logging.WARNING)
    without_compiler()
    # What the dependencies say of each other at import and at every collective helps nobody who trains.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|deepspeed|megatron")

    # NCCL's flight recorder: the watchdog dumps it, to say which collective a device is in.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")

    with uncollected():
        from lightnet_data.errors import DataError

        from ..config import load_config
        from ..errors import UserError
        from . import failures

    rank = os.environ["RANK"]
    try:
        config = load_config(given.config, given.overrides)
    except UserError as error:
        if not failures.record("refused", str(error), 0) and rank == "0":  # else the supervisor says it
            print(f"error: {error}", file=sys.stderr, flush=True)
        return failures.REFUSED
    try:
        with uncollected():
            from .loop import run

            gc.freeze()  # nor to look through them later, at DeepSpeed's start or at this process's end
        times.current.mark("imports")

        step = run(config, given.launched)
    except (UserError, DataError) as error:
        heard = _last_word("refused", str(error))
        alone = not getattr(error, "shared", False)  # what one rank ran into, it must say itself
        if not heard and (rank == "0" or alone):
            where = "" if rank == "0" else f"rank {rank}: "
            print(f"error: {where}{error}", file=sys.stderr, flush=True)
        return failures.REFUSED
    except Exception as error:
        return _broken(error)
    failures.record(failures.ENDED, "", step)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _last_word(kind: str, message: str) -> bool:
    """Tell the supervisor, and the ranks that would wait for this one; returns whether there is a supervisor that hears."""
    from . import failures, watchdog

    heard = failures.record(kind, message, watchdog.current.progress.step if watchdog.current else 0)
    if watchdog.current is not None:
        watchdog.current.announce(message)
    return heard


def _broken(error: Exception) -> int:
    """An error that is no user's: its traceback, then one line that names the cause, which may lie on another rank."""
    import traceback

    from . import failures, watchdog

    watch = watchdog.current
    lines = traceback.format_exception(error)
    own = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    # A collective fails on every rank when one is gone; a bug is this rank's own.
    collective = any(part in line for part in ("distributed_c10d", "loss.backward", "run_backward") for line in lines)
    cause = watch.cause() if watch is not None and collective else None
    print("".join(lines), file=sys.stderr, flush=True)
    if cause is not None:
        failures.record("lost", cause, watch.progress.step if watch else 0)
    else:
        _last_word("failed", own)
    print(f"error: rank {os.environ['RANK']}: {cause or own}", file=sys.stderr, flush=True)
    return failures.FAILED


def start() -> None:
    """What a rank does. After an error its process ends here, and does not wait for what may never come, such as a device or a
    peer."""
    code = main()
    if code:
        from .watchdog import end_children

        end_children()
        _end(code)


def process() -> None:
    """The process of a rank. Python is never taken down: a thread that is in torch.distributed's store then, as the watchdog's
    may be, would abort the process."""
    start()
    # As Python does first: idle threads of pools end, others that are no daemons are waited for.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _end(0)


def _end(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    process()
