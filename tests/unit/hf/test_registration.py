"""An exported folder loads by Transformers' Auto classes, without its own code, wherever this package is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..convert.toy import exported

ORDERS = {  # of the first imports, and whether PyTorch calls the entry points of installed packages
    "torch": ("import torch", "1"),
    "transformers": ("from transformers import AutoModelForCausalLM", "1"),  # which imports PyTorch on its way
    "package": ("import lightnet_llm", "0"),
    "late": ("import transformers.models.auto.modeling_auto, lightnet_llm", "0"),
}
USE = """
from transformers import AutoModelForCausalLM
assert "lightnet_llm.hf" in sys.modules  # not before
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "lightnet_llm.hf.modeling_lightnet", type(model)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("exported") / "hf")


QUICK = ("transformers", "torch")  # the others take as long and differ less


@pytest.mark.parametrize("order", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in ORDERS])
def test_registered_where_it_is_installed(order: str, folder: Path) -> None:
    first, autoload = ORDERS[order]
    light = "" if order in ("transformers", "late") else "assert 'transformers' not in sys.modules\n"
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys\n{first}\n{light}{USE}", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
