"""Training steps of the classifier B and the denoiser XL/2 measured, beside a ViT and a DiT with PyTorch's attention.

    python benchmarks/vision.py --output benchmarks/vision-CARD-DATE.json       one GPU, a few minutes
    python benchmarks/vision.py --tiny                                           the same path on a CPU, in seconds

Ours: the models of the presets classify/base and diffuse/xlarge. Peers: timm's DeiT-B and Hugging Face's ViT of its
architecture (12 layers of 768), diffusers' DiT (DiT-XL/2: 28 layers of 1152), all with SDPA, and ours with ``mixer:
softmax`` (the same block). A peer whose library is not installed is left out, which is said. The
denoiser is measured with its conditions as tokens, as the preset has it, and with ``conditioning: adaln_single``. One step
is forward, loss, backward and fused AdamW, in bf16, on random images that stay on the device; what counts is the median of
--repeat timings of --steps steps, all models in turn. Batches are those of the first pass that fits, halved until it does.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jobs import facts  # benchmarks/jobs.py, beside this file
from steps import breakdown
from torch import Tensor, nn

from lightnet_llm.config import ModelConfig, load_config
from lightnet_llm.models import build_model, diffusion, initialize
from lightnet_llm.models.parameters import spec_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Loss = Callable[[Tensor], Tensor]
# Name: preset, side of the images at 196 or 256 and at 4096 tokens, batch at each.
CASES = {
    "classifier": ("classify/base", ((224, 256), (1024, 16))),
    "denoiser": ("diffuse/xlarge", ((32, 64), (128, 4))),
}
TINY = {"layers": 2, "width": 32, "heads": 2, "glu_width": 48, "gate_rank": 8, "tpe_rank": 4}


def ours(config: ModelConfig) -> nn.Module:
    """In bf16, but for what training keeps in fp32."""
    model = build_model(config)
    initialize(model, 0)
    for parameter in model.parameters():
        if not spec_of(parameter).keep_fp32:
            parameter.data = parameter.data.bfloat16()
    return model.to(DEVICE).train()


def vit(side: int, tiny: bool) -> nn.Module:
    """DeiT-B's architecture."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64} if tiny else {}
    )
    config = ViTConfig(image_size=side, num_labels=1000, attn_implementation="sdpa", **sizes)
    return ViTForImageClassification(config).to(DEVICE, torch.bfloat16).train()


def deit(side: int, tiny: bool) -> nn.Module:
    """timm's DeiT-B."""
    import timm

    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2} if tiny else {}
    model = timm.create_model("deit_base_patch16_224", img_size=side, num_classes=1000, **sizes)
    assert model.blocks[0].attn.fused_attn, "timm did not take PyTorch's attention"
    return model.to(DEVICE, torch.bfloat16).train()


def dit(side: int, tiny: bool) -> nn.Module:
    """DiT-XL/2."""
    from diffusers import DiTTransformer2DModel

    heads, width, layers = (2, 16, 2) if tiny else (16, 72, 28)
    model = DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=width, in_channels=4, out_channels=8, num_layers=layers,
        sample_size=side, patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip
    return model.to(DEVICE, torch.bfloat16).train()


def models(case: str, side: int, tiny: bool) -> dict[str, Callable[[], tuple[nn.Module, Loss]]]:
    """Each model with its loss on images [B, C, side, side]; built when it is its turn."""
    config = load_config(CASES[case][0]).model
    image = config.image.model_copy(update={"size": (side, side)}) if config.image else None
    config = ModelConfig.model_validate(
        {**config.model_dump(), "image": image, "drop_path": 0.0, **(TINY if tiny else {})}
    )
    softmax = config.model_copy(update={"mixer": "softmax", "lrpe": False})
    process = diffusion.linear(device=DEVICE)

    def classified(model: nn.Module, peer: bool) -> Loss:
        def loss(images: Tensor) -> Tensor:
            labels = torch.arange(len(images), device=DEVICE) % 1000
            out = model(images)
            logits = out if isinstance(out, Tensor) else out.logits
            return nn.functional.cross_entropy(logits.float(), labels)

        return loss

    def denoised(model: nn.Module, peer: bool) -> Loss:
        def loss(images: Tensor) -> Tensor:
            count, noise = len(images), torch.randn_like(images)
            times, labels = torch.randint(0, 1000, (count,), device=DEVICE), torch.arange(count, device=DEVICE) % 1000
            noisy = process.add_noise(images, noise, times)
            out = model(noisy, times, labels).sample if peer else model(noisy, times, labels)
            return process.loss(out, images, noise, times).mean()

        return loss

    wrapped = classified if case == "classifier" else denoised
    others = {"timm deit, sdpa": deit, "vit, sdpa": vit} if case == "classifier" else {"dit, sdpa": dit}

    def built(make: Callable[[], nn.Module], peer: bool) -> Callable[[], tuple[nn.Module, Loss]]:
        def build() -> tuple[nn.Module, Loss]:
            model = make()
            return model, wrapped(model, peer)

        return build

    modulated = config.model_copy(update={"conditioning": "adaln_single"})
    more = {} if case == "classifier" else {"lightnet, adaln_single": built(lambda: ours(modulated), False)}
    return {
        "lightnet": built(lambda: ours(config), False),
        **more,
        "softmax in our block": built(lambda: ours(softmax), False),
        **{name: built(functools.partial(make, side, tiny), True) for name, make in others.items()},
    }


def seconds(loss: Loss, images: Tensor, optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
    """Of one step, a mean over ``steps``; and how much of it the host takes to start all of the step's work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loss(images).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    host = time.perf_counter() - began
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps, host / steps


def measure(
    name: str, build: Callable[[], tuple[nn.Module, Loss]], shape: tuple[int, ...], given: argparse.Namespace
) -> dict[str, Any]:
    """Images per second and memory of one model; its batch is halved while it does not fit."""
    model, loss = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = shape[0]
    while True:
        images = torch.randn(batch, *shape[1:], device=DEVICE).bfloat16()
        try:
            seconds(loss, images, optimizer, 2)  # compiles
            break
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = [seconds(loss, images, optimizer, given.steps) for _ in range(given.repeat)]
    times, hosts = zip(*taken, strict=True)
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None
    found = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": batch,
        "memory_bytes": peak,
    }
    found |= {
        "images_per_second": round(batch / statistics.median(times), 2),
        "milliseconds": [round(1e3 * t, 2) for t in times],
        "host_milliseconds": round(1e3 * statistics.median(hosts), 2),
    }
    if given.profile and DEVICE.type == "cuda":
        one = functools.partial(seconds, loss, images, optimizer)
        alone = statistics.median(times)
        found |= breakdown(lambda number, one=one: one(1), torch.cuda.synchronize, alone)
        del one
    del model, loss, optimizer, images
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--model", action="append", help="only models whose names hold this")
    parser.add_argument("--tokens", type=int, action="append", help="only these of 196 or 256 and 4096")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="keep what a step consists of, too")
    parser.add_argument("--tiny", action="store_true", help="Small models on small images, to try the path.")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.tiny:
        given.steps, given.repeat = 1, 2
    found: dict[str, Any] = {**facts(), "steps": given.steps, "rows": []}
    for case in given.case or CASES:
        for side, batch in (
            (((32, 2), (64, 2)) if case == "classifier" else ((8, 2), (16, 2))) if given.tiny else CASES[case][1]
        ):
            channels, patch = (3, 16) if case == "classifier" else (4, 2)
            if given.tokens and (side // patch) ** 2 not in given.tokens:
                continue
            first: dict[str, Any] | None = None
            for name, build in models(case, side, given.tiny).items():
                if given.model and not any(part in name for part in given.model):
                    continue
                try:
                    row = measure(name, build, (batch, channels, side, side), given)
                except ImportError as error:
                    print(f"{case} {name}: left out, {error}", file=sys.stderr)
                    continue
                first = first or row
                row |= {"ours_over_it": round(first["images_per_second"] / row["images_per_second"], 3)}
                found["rows"].append({"case": case, "tokens": (side // patch) ** 2, **row})
                print(
                    f"{case}, {(side // patch) ** 2} tokens, {name}: {row['images_per_second']} images/s, batch {row['batch']}",
                    flush=True,
                )
                if given.output:  # a run that is cut off leaves what it has
                    given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not given.output:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
