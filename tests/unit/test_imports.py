"""What a rank imports, and how."""

import gc
import os
import subprocess
import sys

import pytest

from lightnet_llm.imports import uncollected
from tests.conftest import ROOT

NEEDLESS = [
    "transformers",
    "torch._inductor.compile_fx",
    "datatrove",
    "lm_eval",
    "IPython",
    "pandas",
]


def test_garbage_is_collected_again() -> None:
    assert gc.isenabled()
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one has not ended"
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()


RUNS = {
    "rank": ("import lightnet_llm.training.loop", NEEDLESS),
    "start": (
        "from lightnet_llm.cli import main; main(['train', 'pile_150m', '--dry-run'], standalone_mode=False)",
        [*NEEDLESS, "torch._dynamo", "deepspeed", "megatron"],
    ),
    "plan": (
        "from lightnet_llm.cli import main; main(['plan', 'pile_150m', '--gpus', '2'], standalone_mode=False)",
        [*NEEDLESS, "torch._dynamo", "megatron"],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_imported_that_is_not_needed(name: str) -> None:
    """On a CPU; each of these takes seconds."""
    run, needless = RUNS[name]
    code = (
        f"import sys; from lightnet_llm.imports import without_compiler; without_compiler(); {run};"
        f"print([name for name in {needless} if name in sys.modules])"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1:] == ["[]"], found.stdout + found.stderr[-2000:]
