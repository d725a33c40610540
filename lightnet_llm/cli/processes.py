"""A verb in several processes of this host; one that fails says so in one line, as the verb does alone."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path


def in_processes(processes: int) -> int:
    """Run the command that this process was started with in ``processes`` of them, under torchrun's agent.

    The first one speaks; of the others only the words of one that failed while the first had not are shown.

    Args:
        processes: 2 or more.

    Returns:
        Exit status.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from ..launch.host import has_gpus, threads

    os.environ.setdefault("OMP_NUM_THREADS", str(threads(processes, has_gpus())))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        quiet = ",".join(f"{rank}:2" for rank in range(1, processes))  # 2: standard error
        agent = ["--standalone", "--nproc-per-node", str(processes), "--log-dir", folder, "--redirects", quiet]
        try:
            run(parse_args([*agent, "-m", "lightnet_llm.cli", *sys.argv[1:]]))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if 0 not in error.failures:
                said = next(Path(folder).glob(f"**/{rank}/stderr.log"), None)
                print(said.read_text(errors="replace").strip() if said else failure.message, file=sys.stderr)
            return 1
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0
