"""Measures what this machine's card and links do, for plans that are made elsewhere: `lightnet plan --calibrate`.

Products at the sizes of a training step, a copy, the scan and its companions forward and backward, the loss; blocks under load
for seconds, the host's time for one (:mod:`.in_situ`), and collectives over the cards of this host. Under a minute on a card. On
a CPU everything runs at tiny sizes: its figures mean nothing but that the plumbing holds.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.store import write_text
from ..config.model import ModelConfig
from ..errors import UserError
from ..parallel.layout import prepare_backend
from ..parallel.segments import all_gather
from ..training.metrics import PEAK_FLOPS
from .hardware import FORMAT, Hardware, cards
from .in_situ import BLOCKS, NARROW, host_among_ranks, host_block, sustained, wait


@dataclass(frozen=True)
class Scale:
    """How large the calls are. ``products``: (tokens, in, out)."""

    rows: int
    length: int
    heads: int
    width: int
    glu: int
    vocabulary: int
    rank: int
    products: tuple[tuple[int, int, int], ...]
    sent: int
    repeats: int

    @property
    def hidden(self) -> int:
        """Width of the stream."""
        return self.heads * self.width

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.length


GPU = Scale(
    8, 2048, 16, 128, 5376, 50304, 64,
    ((2048, 1024, 64), (16384, 1024, 64), (4096, 1024, 1024), (16384, 768, 2304), (16384, 1024, 2688),
     (16384, 2048, 2048), (16384, 2048, 5376), (16384, 2560, 7680), (8192, 8192, 8192)),
    2**28, 20,
)  # fmt: skip
TINY = Scale(1, 64, 2, 16, 40, 128, 8, ((64, 32, 8), (64, 64, 64), (128, 128, 128)), 2**16, 2)
MOST_CONTEXT = 2**32  # bytes that a context and its libraries take at most


def calibrate(output: Path, ranks: int | None = None) -> Iterator[str]:
    """Measure, write the file, and tell of each figure when it is there.

    Args:
        ranks: cards (CPU: processes) that communicate; None for all cards of this host, or 2 processes.

    Raises:
        UserError: the file cannot be written, or there are fewer cards (CPU: cores).
    """
    cuda = torch.cuda.is_available()
    have = torch.cuda.device_count() if cuda else 2
    most = have if cuda else max(have, os.cpu_count() or 1)
    if ranks is not None and ranks > most:
        here = f"{have}; --calibrate measures the cards that are here" if cuda else f"no card and {most} cores"
        raise UserError(f"--gpus {ranks}: this host has {here}; give at most {most}, or leave --gpus out")
    device, scale = (torch.device("cuda", 0), GPU) if cuda else (torch.device("cpu"), TINY)
    name = torch.cuda.get_device_name(0) if cuda else "cpu"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    figures: dict[str, dict[str, Any]] = {}
    entry: dict[str, Any] = {"card": name, "versions": {"torch": torch.__version__}, "figures": figures}
    found = chain(_measured(device, scale), _together(device, scale, figures), _between(ranks or have, scale))
    for key, value, unit in found:
        what = f"lightnet plan --calibrate, torch {torch.__version__}"
        figures[key] = {"value": value, "unit": unit, "source": what, "card": name, "date": date, "assumed": False}
        yield f"{key}: {_shown(value)} {unit}"
    peak = next((rate for part, rate in PEAK_FLOPS.items() if part in name), None)
    entry["peak_flop_s"] = peak or max(rate for _, rate in figures["gemm_flop_s"]["value"])
    entry["like"] = _like(name)  # for what cannot be measured here
    key = entry["like"] if cuda else "cpu"
    try:
        write_text(output, json.dumps({"format": FORMAT, "cards": {key: entry}}, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from None
    yield f"{output}: card '{key}'; use it with lightnet plan CONFIG --figures {output}"


def _like(card: str) -> str:
    """The shipped card of this name, h100 for others."""
    names = cards()
    words = card.lower()
    if "a100" in words:
        return "a100-40" if "40gb" in words else "a100-80"
    return next((name for name in names if name in words), "h100")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{flop:.3g}: {rate:.3g}" for flop, rate in value)
    return f"{value:.4g}"


def _measured(device: torch.device, scale: Scale) -> Iterator[tuple[str, Any, str]]:
    """(name, value, unit) of every part alone."""
    from lightnet_kernels import add_norm, additive_scan, gated_norm, linear_cross_entropy, swiglu, toeplitz_scan
    from lightnet_kernels.bench.measure import Clock, ceilings

    clock = Clock(device, scale.repeats)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()

    def seconds(call: Callable[[], Any]) -> float:
        found = clock.time(call)
        return 1e-3 * float(found["device_ms"] or found["ms"])

    def both(function: Callable[..., Tensor | tuple[Tensor, ...]], *tensors: Tensor, **options: Any) -> float:
        """Seconds forward and backward."""

        def outputs() -> list[Tensor]:
            result = function(*tensors, **options)
            return [*result] if isinstance(result, tuple) else [result]

        leaves, upstream = [x for x in tensors if x.requires_grad], [torch.ones_like(x) for x in outputs()]
        return seconds(lambda: torch.autograd.grad(outputs(), leaves, upstream))

    tops = ceilings(clock)
    yield "copy_bytes_s", tops["copy_tb_s"] * 1e12, "bytes read and written per second"
    rates: dict[float, list[float]] = {}
    for tokens, width, out in scale.products:
        one, two = draw(tokens, width).detach(), draw(width, out).detach()
        flop = 2.0 * tokens * width * out
        rates.setdefault(flop, []).append(flop / seconds(lambda one=one, two=two: torch.mm(one, two)))  # type: ignore[misc]
    yield "gemm_flop_s", [[flop, max(found)] for flop, found in sorted(rates.items())], "[FLOP of a product, FLOP/s]"

    size, wide = scale.tokens * scale.hidden, (scale.rows, scale.length, scale.heads, scale.width)
    theta = torch.rand(scale.heads, scale.width, generator=generator, device=device, requires_grad=True)
    unit = "s a token and feature, forward and backward"
    yield "scan_lrpe_s", both(_with_theta(additive_scan), draw(*wide), draw(*wide), draw(*wide), theta) / size, unit
    yield "scan_s", both(additive_scan, draw(*wide), draw(*wide), draw(*wide)) / size, unit
    yield (
        "scan_torch_s",
        both(additive_scan, draw(*wide), draw(*wide), draw(*wide), causal=False, backend="torch") / size,
        unit,
    )
    flat, norm = (scale.rows, scale.length, scale.hidden), {"kind": "srms", "eps": 1e-5}
    yield "norm_s", both(add_norm, draw(*flat), draw(*flat), **norm) / size, unit
    yield "gated_norm_s", both(gated_norm, draw(*wide), draw(*wide), **norm) / size, unit
    inner = (scale.tokens, scale.glu)
    yield "swiglu_s", both(swiglu, draw(*inner), draw(*inner)) / (scale.tokens * scale.glu), unit
    decay = torch.rand(scale.hidden, scale.rank, generator=generator, device=device).requires_grad_()
    gain = torch.rand(scale.hidden, scale.rank, generator=generator, device=device).requires_grad_()
    share = 64 / scale.rank
    yield "toeplitz_s", share * both(toeplitz_scan, draw(*flat), decay, gain) / size, "s a token and channel at rank 64"
    labels = torch.zeros(scale.tokens, dtype=torch.int64, device=device)
    hidden, weight = draw(scale.tokens, scale.hidden), draw(scale.vocabulary, scale.hidden)
    loss = both(linear_cross_entropy, hidden, weight, labels=labels, reduction="sum")
    yield "loss_flop_s", 6.0 * size * scale.vocabulary / loss, "FLOP/s of the head's three products with the loss"
    if device.type == "cuda":
        del hidden, weight, labels, theta, decay, gain
        free, total = torch.cuda.mem_get_info(device)
        yield "memory_bytes", total, "bytes"
        beside = max(0, total - free - torch.cuda.memory_reserved(device))
        if beside < MOST_CONTEXT:  # else other processes hold memory there
            yield "context_bytes", beside, "bytes beside tensors"


def _together(device: torch.device, scale: Scale, figures: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Any, str]]:
    """Of blocks; ``figures`` has those of their parts, and these as they come."""
    heads, glu = 3 * scale.heads // 4, 3 * scale.glu // 4
    config = ModelConfig(
        layers=BLOCKS, width=heads * scale.width, heads=heads, glu_width=glu, vocab_size=1, gate_rank=scale.rank
    )
    yield (
        "host_block_s",
        host_block(config, device, scale.repeats),
        "s of the host for a block's forward and backward pass",
    )
    factor = sustained(config, device, scale.rows, scale.length, Hardware("", "", 0.0, figures, ""))
    yield "sustained", factor, "times as long as their parts alone, blocks under load for seconds"


def _between(ranks: int, scale: Scale) -> Iterator[tuple[str, Any, str]]:
    if ranks > 1:
        rate, latency, hosts = _links(ranks, scale)
        yield "nvlink_bytes_s", rate, f"bytes a rank of {ranks} sends per second, all-reduce or all-gather"
        yield "nvlink_latency_s", latency, "s a step of a collective"
        yield "host_stage_3_s", hosts["zero_stage"], "s of the host for a block's passes and update with ZeRO-3"
        if "tensor" in hosts:
            yield "host_tensor_s", hosts["tensor"], "s of the host for a block's passes with tensor parallelism"
            yield (
                "host_shared_s",
                hosts["shared"],
                "s of the host for a block's passes where its ranks share tokens, too",
            )
        yield "host_sequence_s", hosts["sequence"], "s of the host for a block's passes with sequence parallelism"


def _with_theta(scan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda query, key, value, theta: scan(query, key, value, theta=theta)


def _links(ranks: int, scale: Scale) -> tuple[float, float, dict[str, float]]:
    """(bytes that a rank sends per second in a large all-reduce or all-gather, the slower of them; seconds of a step of a
    small all-reduce; seconds of the host for a block by what is parallel)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    torch.multiprocessing.spawn(_link_rank, (ranks, port, scale, answers), nprocs=ranks)
    summed, gathered, small, hosts = answers.get()
    sent = (ranks - 1) / ranks * scale.sent
    return min(2 * sent / summed, sent / gathered), small / (2 * max(1, (ranks - 1).bit_length())), hosts


def _link_rank(rank: int, ranks: int, port: int, scale: Scale, answers: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")  # what DeepSpeed and megatron-core have to say of torch and of themselves
    device = prepare_backend()
    size = scale.sent // ranks * ranks
    large, small = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (size, 1024))
    part = large[: size // ranks].clone()

    def seconds(call: Callable[[], Any]) -> float:
        for _ in range(3):
            call()
        wait(device)
        began = time.perf_counter()
        for _ in range(scale.repeats):
            call()
        wait(device)
        return (time.perf_counter() - began) / scale.repeats

    found = [
        seconds(lambda: dist.all_reduce(large)),
        seconds(lambda: all_gather(large, part)),
        seconds(lambda: dist.all_reduce(small)),
    ]
    layouts: dict[str, dict[str, int]] = {"zero_stage": {"zero_stage": 3}, "sequence": {"sequence": ranks}}
    if (tensor := math.gcd(ranks, NARROW["heads"])) > 1:
        layouts["tensor"] = {"tensor": tensor}
        layouts["shared"] = {"tensor": tensor, "tensor_sequence_parallel": True}
    hosts = {name: host_among_ranks(device, scale.repeats, **parallel) for name, parallel in layouts.items()}
    if rank == 0:
        answers.put((*found, hosts))
    dist.destroy_process_group()
