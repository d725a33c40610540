"""What every rank runs: ``deepspeed launch/train.py --config CONFIG [key=value ...]``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings


def main(arguments: list[str] | None = None) -> int:
    """Parse, train, and turn user-facing errors into one line from rank 0. Returns the exit code."""
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
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # What the dependencies say of each other at import and at every collective helps nobody who trains.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|deepspeed|megatron")

    from lightnet_data.errors import DataError

    from ..config import load_config
    from ..errors import UserError

    try:
        config = load_config(given.config, given.overrides)
    except UserError as error:
        if os.environ["RANK"] == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    try:
        from .loop import run

        run(config, given.launched)
    except (UserError, DataError) as error:
        rank = os.environ["RANK"]
        if rank == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif not getattr(error, "shared", False):  # what one rank alone ran into, it must say itself
            print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        if "torch" in sys.modules:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
