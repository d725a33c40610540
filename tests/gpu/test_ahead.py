"""Kernels of a step compiled before it, on a card with empty caches: the step then compiles none, and its bits are the same."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def main(ahead: str, packed: str) -> None:
    """In a process of its own: a step of a small model; a line of JSON."""
    from lightnet_kernels import compile_ahead, cuda_launch
    from triton.runtime import JITFunction

    from lightnet_llm.config.model import ModelConfig
    from lightnet_llm.models.context import ForwardContext
    from tests.gpu.model import bf16_model

    compiled: list[str] = []
    by_triton, by_nvrtc = JITFunction._do_compile, cuda_launch._compile

    def noted(self: Any, *arguments: Any) -> Any:
        compiled.append(self.fn.__name__)
        return by_triton(self, *arguments)

    def noted_too(name: str, *arguments: Any) -> Any:
        compiled.append(name)
        return by_nvrtc(name, *arguments)

    JITFunction._do_compile, cuda_launch._compile = noted, noted_too  # type: ignore[method-assign, assignment]
    model = bf16_model(ModelConfig(layers=3, width=1024, heads=8, glu_width=2688, vocab_size=3072))
    ids = torch.randint(0, 3000, (2, 2048), generator=torch.Generator().manual_seed(0)).cuda()
    context = ForwardContext(cu_seqlens=torch.tensor([0, 7, 2048, 4096] if packed == "packed" else [0, 2048, 4096]))

    def run() -> torch.Tensor:
        loss = model(ids, context, ids).loss
        assert loss is not None
        return loss

    began = time.perf_counter()
    if ahead == "ahead":
        assert compile_ahead(run, list(model.parameters()))
    between, before = time.perf_counter(), len(compiled)
    assert all(x.grad is None for x in model.parameters())
    loss = run()
    loss.backward()
    torch.cuda.synchronize()
    norms = [float(x.grad.double().norm()) for x in model.parameters() if x.grad is not None]
    names = {"ahead": compiled[:before], "step": compiled[before:]}
    seconds = {"ahead": between - began, "step": time.perf_counter() - between}
    print(json.dumps({"found": [float(loss), *norms], "compiled": names, "seconds": seconds}))


@pytest.mark.parametrize("packed", ["rows", "packed"])
def test_the_step_compiles_none(packed: str, tmp_path: Path) -> None:
    rows = {}
    for ahead in ("ahead", "alone"):
        environment = {"TRITON_CACHE_DIR": str(tmp_path / ahead)}
        done = subprocess.run(
            [sys.executable, "-c", f"from tests.gpu.test_ahead import main; main({ahead!r}, {packed!r})"],
            cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        rows[ahead] = json.loads(done.stdout.splitlines()[-1])
        print(packed, ahead, rows[ahead]["seconds"], {k: len(v) for k, v in rows[ahead]["compiled"].items()})
    assert rows["ahead"]["found"] == rows["alone"]["found"]
    assert rows["ahead"]["compiled"]["step"] == [] and len(rows["ahead"]["compiled"]["ahead"]) >= 30
    assert {*rows["alone"]["compiled"]["step"]} <= {*rows["ahead"]["compiled"]["ahead"]}
