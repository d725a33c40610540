"""Decoding measured: tokens/s at early and late positions, beside Hugging Face's Llama of equal size with SDPA and its caches.

    python benchmarks/decoding.py                          # one GPU: pile_379m, batch 1 and 64 at positions 1,024 and 131,072
    python benchmarks/decoding.py --preset pile_1b --batches 1,16
    python benchmarks/decoding.py --device cpu --quick     # a smoke run at tiny sizes; its figures mean nothing

Weights are initial ones: what a token costs does not depend on them. A position is reached by setting the state: ours to
that of a short text with its count of tokens put forward, the peer's cache filled with random keys and values. Greedy
tokens are fed back; what counts is the median of --repeat spans of --tokens tokens each, after a warm-up. Ours is measured at
every position once more, in the other order, and the median is of all spans: where the allocator puts a state of gigabytes
moves a step by some per cent. The peer has our
layers, width and vocabulary, heads of 64, and a gated width that makes its parameters equal ours within 1 %. A cache
that does not fit the memory is not measured, and its size is said.
Exit 1: our tokens/s differ by more than 5 % between the positions at some batch.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from lightnet_llm.config.load import load_config
from lightnet_llm.config.run import RunConfig
from lightnet_llm.inference import read
from lightnet_llm.inference.decoder import Decoder
from lightnet_llm.inference.load import allocate
from lightnet_llm.models import CausalLM, count_parameters, initialize

HERE = Path(__file__).resolve().parent
FLAT = 0.05
QUICK = ["model.layers=2", "model.width=128", "model.heads=2", "model.glu_width=256", "model.vocab_size=512"]
Step = Callable[[Tensor], Tensor]  # tokens int64 [B] to logits [B, V]


def clock(step: Step, batch: int, tokens: int, repeat: int, device: torch.device) -> list[float]:
    """Seconds of ``repeat`` spans of ``tokens`` greedy tokens, after one that warms up."""
    token = torch.ones(batch, dtype=torch.int64, device=device)
    seconds = []
    for _ in range(repeat + 1):
        wait(device)
        start = time.perf_counter()
        for _ in range(tokens):
            token = step(token).argmax(-1)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(config: RunConfig, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The model with its initial weights."""
    model = allocate(config, device, dtype)
    initialize(model, 0)
    return model.eval().requires_grad_(False)


def our_step(model: CausalLM, batch: int, position: int) -> Step:
    """Decodes from a state that stands at ``position``."""
    ids = torch.randint(1, 255, (batch, 64), generator=torch.Generator().manual_seed(0))
    state = read(model, ids).state
    layers = tuple(layer._replace(length=torch.full_like(layer.length, position)) for layer in state.layers)
    tpe = state.tpe
    tpe = None if tpe is None else tpe._replace(length=torch.full_like(tpe.length, position))
    return Decoder(model, state._replace(tpe=tpe, layers=layers))


def llama(
    config: RunConfig, parameters: int, longest: int, device: torch.device, dtype: torch.dtype
) -> LlamaForCausalLM:
    """Hugging Face's Llama of as many parameters."""
    model = config.model
    embeddings = model.vocab_size * model.width * (1 if model.tie_embeddings else 2)
    attention = 4 * model.width**2
    gated = (parameters - embeddings) / model.layers - attention
    settings = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.width,
        intermediate_size=max(64, 8 * round(gated / (3 * model.width) / 8)),
        num_hidden_layers=model.layers,
        num_attention_heads=max(1, model.width // 64),
        num_key_value_heads=max(1, model.width // 64),
        max_position_embeddings=longest,
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="sdpa",
    )
    with device:
        return LlamaForCausalLM(settings).to(dtype).eval().requires_grad_(False)


def llama_step(model: LlamaForCausalLM, kind: str, batch: int, position: int, room: int) -> Step:
    """Decodes behind ``position`` random keys and values.

    Args:
        kind: dynamic (grows by concatenation) or static (``room`` places more, allocated before).
    """
    settings, like = model.config, next(model.parameters())
    width = settings.hidden_size // settings.num_attention_heads
    shape = batch, settings.num_key_value_heads, position, width
    if kind == "static":
        cache: Any = StaticCache(config=settings, max_cache_len=position + room)
    else:
        cache = DynamicCache(config=settings)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    older = "cache_kwargs" in inspect.signature(cache.update).parameters  # Transformers 4
    extra = {"cache_kwargs": {"cache_position": torch.arange(position, device=like.device)}} if older else {}
    for layer in range(settings.num_hidden_layers):
        keys = torch.randn(shape, dtype=like.dtype, device=like.device)
        cache.update(keys, keys.clone(), layer, **extra)
    place = torch.full((batch, 1), position, dtype=torch.int64, device=like.device)

    def step(token: Tensor) -> Tensor:
        options = {name: cache, "position_ids": place, "use_cache": True}
        logits: Tensor = model(input_ids=token[:, None], **options).logits[:, -1]
        place.add_(1)
        return logits

    return step


def cache_bytes(model: LlamaForCausalLM, batch: int, position: int) -> int:
    """Of the peer's keys and values; its states of ours do not grow."""
    size = next(model.parameters()).element_size()
    return 2 * model.config.num_hidden_layers * batch * position * model.config.hidden_size * size


def free_bytes(device: torch.device) -> int:
    """Of the device's memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return 1 << 32


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = load_config(arguments.preset, QUICK if arguments.quick else [])
    model = ours(config, device, dtype)
    parameters = count_parameters(model)
    room = (arguments.repeat + 1) * arguments.tokens
    longest = max(arguments.positions) + room + 1
    peer = llama(config, parameters, longest, torch.device("meta"), dtype)
    theirs = sum(p.numel() for p in peer.parameters())
    rows: list[dict[str, Any]] = []
    # Ours first: after the peers, whose caches take most of the memory, the same step took 6 % longer.
    models = ("lightnet",) if arguments.alone else ("lightnet", "llama dynamic", "llama static")
    cases = itertools.product(models, arguments.batches, arguments.positions)
    for who, batch, position in cases:
        row: dict[str, Any] = {"model": who, "batch": batch, "position": position, "tokens_per_second": None}
        rows.append(row)
        kind = who.partition(" ")[2]
        if kind and next(peer.parameters()).is_meta:  # not before its turn
            peer = llama(config, parameters, longest, device, dtype)
        need = cache_bytes(peer, batch, position + room) if kind else 0
        copies = 2 if kind == "dynamic" else 1.2  # concatenation holds a layer twice at most; some head room
        if need * (1 + copies / config.model.layers) > free_bytes(device):
            row["problem"] = f"a cache of {need / 2**30:.0f} GiB does not fit"
            print(f"{who:14} batch {batch:3} at {position:7}: {row['problem']}", flush=True)
            continue
        step = llama_step(peer, kind, batch, position, room) if kind else our_step(model, batch, position)
        row["seconds"] = clock(step, batch, arguments.tokens, arguments.repeat, device)
        del step
        if not kind and position == arguments.positions[-1]:  # all of this batch, the other way round
            for again in [one for one in rows[::-1] if (one["model"], one["batch"]) == (who, batch)]:
                free_bytes(device)
                step = our_step(model, batch, again["position"])
                again["seconds"] += clock(step, batch, arguments.tokens, arguments.repeat, device)
                del step
                tell(again, arguments.tokens)
        elif kind:
            tell(row, arguments.tokens)
    flatness = {str(batch): flat(rows, batch) for batch in arguments.batches}
    return {
        "preset": arguments.preset + (" (tiny)" if arguments.quick else ""),
        "parameters": parameters,
        "peer_parameters": theirs,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": arguments.tokens,
        "versions": {name.__name__: name.__version__ for name in (torch, transformers)}
        | {"python": platform.python_version()},
        "command": " ".join(["python", "benchmarks/decoding.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
        "flatness": flatness,
    }


def tell(row: dict[str, Any], tokens: int) -> None:
    """A row's figure, from its spans."""
    row["tokens_per_second"] = row["batch"] * tokens / statistics.median(row["seconds"])
    print(
        f"{row['model']:14} batch {row['batch']:3} at {row['position']:7}: {row['tokens_per_second']:10,.1f} tokens/s",
        flush=True,
    )


def flat(rows: list[dict[str, Any]], batch: int) -> float:
    """Our slowest position's tokens/s below the fastest's, as a share."""
    speeds = [row["tokens_per_second"] for row in rows if row["model"] == "lightnet" and row["batch"] == batch]
    return 1 - min(speeds) / max(speeds)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="pile_379m")
    parser.add_argument("--batches", type=numbers, default=[1, 64])
    parser.add_argument("--positions", type=numbers, default=[1024, 131072])
    parser.add_argument("--tokens", type=int, default=128, help="of a span; a multiple of 64 holds whole blocks")
    parser.add_argument("--repeat", type=int, default=3, help="spans, of which the median counts")
    parser.add_argument("--device")
    parser.add_argument("--alone", action="store_true", help="without the peer")
    parser.add_argument("--quick", action="store_true", help="tiny model")
    parser.add_argument("--output", help="JSON file [default: decoding-DEVICE-DATE.json beside this script]")
    arguments = parser.parse_args()
    found = measure(arguments)
    name = "-".join(found["device"].lower().split())
    target = Path(arguments.output or HERE / f"decoding-{name}-{found['date']}.json")
    target.write_text(json.dumps(found, indent=1) + "\n")
    worst = max(found["flatness"].values())
    print(f"{found['parameters']:,} parameters, the peer {found['peer_parameters']:,}; {target}")
    for batch, share in found["flatness"].items():
        print(f"batch {batch}: slowest position {100 * share:.1f} % below the fastest (at most {100 * FLAT:.0f} %)")
    return 0 if worst <= FLAT or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
