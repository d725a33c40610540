"""What a training step compiles after `compile_ahead`: counted where there is no card, nothing compiled.

python -m tests.unit.kernels.ahead      two lines of JSON for each case: names of kernels of the pass ahead, and of the step
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from .compiled import no_card_needed, only_counted

SMALL = ["model.layers=2", "model.width=256", "model.heads=2", "model.glu_width=384", "model.vocab_size=512"]
CASES: dict[str, tuple[list[str], list[int]]] = {
    "rows": ([], [0, 330, 660]),
    "packed": ([], [0, 17, 170, 660]),
    "computed again": (["parallel.recompute_every=1"], [0, 330, 660]),
    "by Triton": (["model.heads=4"], [0, 330, 660]),
}


def main() -> int:
    no_card_needed()
    from lightnet_kernels import ahead, checks, compile_ahead, cuda_chains, triton_launch

    from lightnet_llm.config import load_config
    from lightnet_llm.models import CausalLM, ForwardContext, initialize
    from lightnet_llm.models.block import Block

    made, _ = only_counted()

    def started(kernel: Any, grid: Any, arguments: Any, constants: Any) -> Any:
        kernel.warmup(*arguments, grid=grid, **constants)
        return lambda *_: None, grid, arguments, None

    original = checks.check_backend

    def chosen(name: str, backend: str, known: tuple[str, ...]) -> str:
        found = original(name, backend, known)
        return "triton" if found == "auto" and "triton" in known else found

    triton_launch._start = started  # type: ignore[assignment]
    ahead.GPU = "cpu"
    for name, module in list(sys.modules.items()):
        if name.startswith("lightnet_kernels") and getattr(module, "check_backend", None) is original:
            module.check_backend = chosen  # type: ignore[attr-defined]
    together = triton_launch._local.together
    for case, (overrides, bounds) in CASES.items():
        config = load_config("wikitext103", [*SMALL, *overrides])
        cuda_chains.runs = lambda *_, heads=config.model.heads: heads == 2  # type: ignore[misc,assignment]
        model = CausalLM(config.model).train()
        initialize(model, 3)
        for block in model.modules():
            if isinstance(block, Block):
                block.recompute = config.parallel.recompute_every > 0
        ids = torch.randint(0, 512, (2, 331), generator=torch.Generator().manual_seed(0))
        context = ForwardContext(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))

        def run(model: Any = model, ids: Any = ids, context: Any = context) -> Any:
            return model(ids[:, :-1], context, ids[:, 1:]).loss

        triton_launch._local.together = together
        compile_ahead(run, list(model.parameters()))
        print(json.dumps([case, "ahead", sorted(made)]), flush=True)
        assert all(x.grad is None for x in model.parameters())
        triton_launch._local.together = None
        made.clear()
        run().backward()
        print(json.dumps([case, "step", sorted(made)]), flush=True)
        made.clear()
    return 0


if __name__ == "__main__":
    os._exit(main())
