"""Other people's kernels tune themselves, some minutes a shape: Triton compiles one candidate after the other. Here all
candidates of a tuner are compiled in threads before it times them; what it chooses is its own choice, from its own timings."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 16


def compile_candidates_together() -> None:
    """For this process, of tuners that are met from now on. A candidate that does not compile is left to the tuner."""
    from triton import knobs
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.runtime.autotuner import Autotuner

    plain = Autotuner.prune_configs
    if getattr(plain, "compiles", False):
        return

    def prune_configs(self: Any, given: dict[str, Any]) -> list[Any]:
        """What is left to try; called once a tuning. ``nargs`` are the call's positional arguments, ``given`` those by name."""
        chosen: list[Any] = plain(self, given)
        if len(chosen) > 1 and self.nargs is not None and not given.get("warmup") and not knobs.runtime.interpret:
            options = {**given, "warmup": True}
            with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
                try:
                    with AsyncCompileMode(pool, ignore_errors=True):
                        for config in chosen:
                            self.fn.run(*self.nargs.values(), **options, **config.all_kwargs())
                finally:
                    active_mode.set(None)
        return chosen

    prune_configs.compiles = True  # type: ignore[attr-defined]
    Autotuner.prune_configs = prune_configs
