"""What a run reports: JSON lines, TensorBoard and a progress bar, all from rank 0."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ..config.model import ModelConfig
from ..errors import UserError
from ..launch import times
from ..models.parameters import spec_of

# Peak dense bf16 rates in FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "4090": 165e12}
SCAN_CHUNK = 64


def flops_per_token(config: ModelConfig, parameters: int) -> float:
    """Model FLOPs of training on one token: forward and backward, 6 per weight in a product, plus scan and TPE.

    The embedding look-up does no product, but a tied embedding is also the head's weight, so it counts once.
    """
    elementwise = config.axes * config.width * 2 * config.tpe_rank if config.tpe else 0
    products = parameters - elementwise - (0 if config.tie_embeddings else config.vocab_size * config.width)
    doubled = 2 if config.lrpe else 1
    # Per head and token, in a chunk of C: scores C*D, weighted values C*D, state read and update 2*D*D (x2 FLOPs each).
    width = config.head_width
    scan = config.heads * 2 * (SCAN_CHUNK * width * (doubled + 1) / 2 + 2 * doubled * width * width)
    return 6.0 * products + 3.0 * config.layers * scan + 3.0 * 2 * elementwise


def parameters_here(module: torch.nn.Module) -> int:
    """Parameters that this rank holds, counted as the whole model's tensors without padding."""
    here = (p for p in module.parameters() if not getattr(p, "ds_pipe_replicated", False))
    return sum(torch.Size(spec_of(p).shape).numel() for p in here)


def peak_flops() -> float | None:
    """Peak bf16 rate of this rank's device, where it is known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((rate for key, rate in PEAK_FLOPS.items() if key in name), None)


def memory_bytes() -> int:
    """Peak memory: of the device where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _hush_board() -> None:
    """TensorBoard's thread hands its error to whoever writes next; its traceback need not be shown as well."""
    shown = threading.excepthook

    def show(found: threading.ExceptHookArgs) -> None:
        if not (isinstance(found.exc_value, OSError) and type(found.thread).__module__.startswith("tensorboard.")):
            shown(found)

    threading.excepthook = show


class MetricsWriter:
    """Writes ``metrics.jsonl`` and TensorBoard events, and drives the progress bar.

    On resume, lines of steps that will be run again are dropped, so that a file holds each step once. What cannot be written
    is told by ``problem``, and nothing is written after it: the run saves and ends, see :mod:`.loop`.

    Args:
        folder: the run folder.
        start_step: steps already done.
        total_steps: steps of the whole run, for the bar.

    Raises:
        OSError: it cannot be begun.
    """

    def __init__(self, folder: Path, start_step: int, total_steps: int):
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self.path = folder / "metrics.jsonl"
        self._drop_after(start_step)
        self.problem: str | None = None
        self.file = self.path.open("ab", buffering=0)  # no buffer that would write the rest of a line when it is closed
        _hush_board()
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else None)
        self.bar = tqdm(
            total=total_steps, initial=start_step, unit="step", file=sys.stderr, dynamic_ncols=True, mininterval=1.0
        )

    def _drop_after(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line cut by a kill
            if row.get("step", 0) <= step or "event" in row:
                kept.append(line)
        partial = self.path.with_name(".metrics.jsonl.partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(self.path)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line; numbers also go to TensorBoard under the same names. The first one also says what the launch took."""
        values = {**values, **times.current.taken()}
        self._line({"step": step, "time": round(time.time(), 3), **values})
        try:
            for name, value in _numbers(values):
                if self.problem is None:
                    self.board.add_scalar(name, value, step)
        except OSError as error:  # of its thread, which writes
            self._failed(Path(self.board.log_dir), error)

    def event(self, step: int, name: str, **facts: Any) -> None:
        """Something that happened: a resume, a save, a stop."""
        self._line({"step": step, "time": round(time.time(), 3), "event": name, **facts})

    def _line(self, row: dict[str, Any]) -> None:
        if self.problem is not None:
            return
        line, end = (json.dumps(_finite(row), allow_nan=False) + "\n").encode(), self.file.seek(0, os.SEEK_END)
        try:
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.truncate(end)  # no half lines
            self._failed(self.path, error)

    def _failed(self, path: Path, error: OSError) -> None:
        free = shutil.disk_usage(self.path.parent).free / 2**20
        self.problem = self.problem or f"{path} could not be written ({error.strerror or error}; {free:.0f} MiB free)"

    def advance(self, loss: float | None = None, rate: float | None = None) -> None:
        """One step done."""
        self.bar.update(1)
        if loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}" + (f", {rate:,.0f} tokens/s" if rate else ""), refresh=False)

    def end(self, step: int, event: str) -> None:
        """The last event of a run whose checkpoints are written.

        Raises:
            UserError: it, or something before it, could not be written.
        """
        self.event(step, event)
        self.close()
        if self.problem is not None:
            raise UserError(
                f"{self.problem}; the run ended at step {step}, which is saved: make room and go on with "
                "train.resume=auto"
            )

    def close(self) -> None:
        """Flush everything."""
        self.bar.close()
        self.file.close()
        try:
            self.board.close()
        except OSError as error:
            self._failed(Path(self.board.log_dir), error)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found.append((prefix + name, float(value)))
    return found
