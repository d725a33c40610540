"""Exported folders on a card, by the package and as remote code: the kernels run, and give what the CPU gives in fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.unit.convert.test_remote_code import HIDE  # noqa: E402
from tests.unit.convert.toy import exported  # noqa: E402

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = {"width": 256, "heads": 4, "glu_width": 320}  # heads of 64: the CUDA kernels of many short sequences take them
MODELS: dict[str, dict[str, Any]] = {
    "AutoModelForCausalLM": WIDE,
    "AutoModelForImageClassification": {
        **WIDE,
        "head": "classifier",
        "causal": False,
        "axes": 2,
        "norm": "layer",
        "vocab_size": 0,
        "image": {"size": [32, 32], "patch": 4, "channels": 3, "classes": 5},
    },
}
USE = """
import sys
import torch
import transformers

auto, folder, device, remote = sys.argv[1:]
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16).to(device)
assert type(model).__module__.startswith("transformers_modules." if remote == "remote" else "lightnet_llm.")
inputs = {name: value.to(device) for name, value in torch.load(folder + ".inputs").items()}
if "pixel_values" in inputs:
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
with torch.inference_mode():
    logits = model(**inputs).logits
loss = model.train()(**inputs, labels=inputs.get("input_ids", torch.zeros(len(logits), dtype=torch.int64, device=device))).loss
loss.backward()
gradient = torch.stack([x.grad.float().norm() for x in model.parameters() if x.grad is not None]).norm()
ids = None
if "input_ids" in inputs:
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = model.eval().generate(inputs["input_ids"][:2, :40], **options).cpu()
kernels = sorted({name.rpartition(".")[2] for name in sys.modules if ".triton_" in name or ".cuda_" in name})
found = {"logits": logits.float().cpu(), "gradient": gradient.cpu(), "ids": ids, "kernels": kernels}
torch.save(found, folder + "." + remote)
"""


def inputs_of(auto: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    if "Image" in auto:
        return {"pixel_values": torch.randn(128, 3, 32, 32)}
    return {"input_ids": torch.randint(1, 300, (4, 200))}


@pytest.mark.parametrize("auto", MODELS)
def test_kernels_by_the_package_and_as_remote_code(auto: str, tmp_path: Path) -> None:
    import lightnet_llm.hf  # noqa: F401

    folder = exported(tmp_path / "hf", **MODELS[auto])
    inputs = inputs_of(auto)
    torch.save(inputs, f"{folder}.inputs")
    found = {}
    for kind in ("remote", "package"):
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        program = HIDE + USE if kind == "remote" else f"import lightnet_llm\n{USE}"
        command = [sys.executable, "-W", "ignore", "-c", program, auto, str(folder), DEVICE, kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr[-3000:]
        found[kind] = torch.load(f"{folder}.{kind}")
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(**inputs).logits
    one, other = found["remote"], found["package"]
    assert torch.equal(one["logits"], other["logits"])
    torch.testing.assert_close(
        one["gradient"], other["gradient"], rtol=1e-3, atol=0
    )  # an embedding's is summed in any order
    assert float((one["logits"] - wanted).norm() / wanted.norm()) < 3e-2 and one["gradient"].isfinite()
    if one["ids"] is not None:
        assert torch.equal(one["ids"], other["ids"]) and one["ids"].shape == (2, 60)
    if DEVICE == "cuda":
        needed = (
            {"triton_scan", "triton_decode"} if one["ids"] is not None else {"triton_bidirectional_scan", "cuda_launch"}
        )
        assert needed <= set(one["kernels"]) and needed <= set(other["kernels"]), one["kernels"]


def test_generation_is_the_full_rerun(tmp_path: Path) -> None:
    """In fp32, 100 greedy tokens from the state against one pass over all of them."""
    from lightnet_llm import LightNetForCausalLM

    model = (
        LightNetForCausalLM.from_pretrained(exported(tmp_path / "hf", **WIDE), dtype=torch.float32).to(DEVICE).eval()
    )
    ids = inputs_of("")["input_ids"][:, :30].to(DEVICE)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    made = model.generate(ids, max_new_tokens=100, return_dict_in_generate=True, output_logits=True, **options)
    with torch.inference_mode():
        logits = model(made.sequences[:, :-1], use_cache=False).logits[:, -100:]
    torch.testing.assert_close(torch.stack(made.logits, 1), logits, atol=2e-3, rtol=1e-3)


def test_tasks_over_two_cards(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("lm_eval")
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    from tests.unit.eval import rows
    from tests.unit.inference import toy

    run, folder = toy.build(tmp_path_factory), rows.write(tmp_path / "data")
    found = []
    for processes in ("1", "2"):
        target = tmp_path / f"{processes}.json"
        options = ["--tasks", "piqa,sciq,boolq", "--offline", str(folder), "--dtype", "fp32", "--processes", processes]
        command = [sys.executable, "-m", "lightnet_llm.cli", "eval", str(run), *options]
        done = subprocess.run([*command, "--log-samples", "--output", str(target)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(target.read_text()))
    for task, samples in found[0]["samples"].items():
        for one, two in zip(samples, found[1]["samples"][task], strict=True):
            for a, b in zip(one["filtered_resps"], two["filtered_resps"], strict=True):
                assert a[0] == pytest.approx(b[0], abs=1e-4) and a[1] == b[1]
        assert found[0]["results"][task] == found[1]["results"][task]
