"""An exported folder loads where nothing of this project is installed: only torch and transformers."""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

from lightnet_llm.hf import bundle

from .toy import HEADS, exported

# What a fresh environment with torch and transformers does not hold.
HIDDEN = "lightnet_llm lightnet_kernels lightnet_data lightnet_eval deepspeed megatron pydantic omegaconf sentencepiece"
HIDE = f"""
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {HIDDEN.split()} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
OTHERS = """
import sys
import torch
import transformers
from transformers import AutoModel

for pair in sys.argv[1:]:
    auto, folder = pair.split("=", 1)
    for place in (folder, folder + "-again"):  # saved with its code
        model = getattr(transformers, auto).from_pretrained(place, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        model.save_pretrained(folder + "-again")
    inputs = torch.load(folder + ".inputs")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder, trust_remote_code=True)(**inputs).last_hidden_state
        torch.save((model(**inputs).logits, hidden), folder + ".logits")
    assert model.train()(**inputs).logits.requires_grad
assert not [name for name in sys.modules if name.split(".")[0] in ("lightnet_llm", "lightnet_kernels", "deepspeed")]
"""
USE = """
import sys
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

folders, text = sys.argv[1:], "the ship sails under a bright moon"
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    inputs = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(inputs.input_ids[0], skip_special_tokens=True) == text
    with torch.inference_mode():
        torch.save((inputs.input_ids, model(**inputs).logits), folder + ".logits")
    batch = tokenizer([text, "a"], return_tensors="pt", padding=True)
    assert model.generate(**batch, max_new_tokens=3, num_beams=2).shape[0] == 2
    model.train()(**inputs, labels=inputs.input_ids).loss.backward()
    assert AutoModel.from_pretrained(folder, trust_remote_code=True)(**inputs).last_hidden_state.shape[0] == 1
    model.save_pretrained(folder + "-again")  # with its code
    AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True)
assert not [name for name in sys.modules if name.split(".")[0] in ("lightnet_llm", "lightnet_kernels", "deepspeed")]
"""


def check(python: Path, program: str, tmp_path: Path) -> None:
    """Two folders in one process, whose operators must not clash."""
    from lightnet_llm import LightNetForCausalLM

    folders = [exported(tmp_path / name, seed=seed) for seed, name in ((1, "one-1.5"), (2, "two"))]
    run_hidden(python, program, tmp_path, list(map(str, folders)))
    for folder in folders:
        ids, logits = torch.load(f"{folder}.logits")
        with torch.inference_mode():
            assert torch.equal(logits, LightNetForCausalLM.from_pretrained(folder).eval()(ids).logits)


def run_hidden(python: Path, program: str, tmp_path: Path, arguments: list[str]) -> None:
    """A program in an environment of its own."""
    environment = {
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # entry points of packages that are hidden, not absent
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_other_heads_without_this_package(tmp_path: Path) -> None:
    import lightnet_llm

    inputs, arguments = {}, []
    for name in ("masked_lm", "sequence_classifier", "classifier"):
        folder, (auto, path) = exported(tmp_path / name, **HEADS[name]), next(iter(bundle.CLASSES[name].items()))
        images = {"pixel_values": torch.randn(2, 3, 12, 16)}
        texts = {"input_ids": torch.arange(20).view(2, 10), "attention_mask": torch.ones(2, 10)}
        inputs[folder] = path.rpartition(".")[2], images if name == "classifier" else texts
        torch.save(inputs[folder][1], f"{folder}.inputs")
        arguments.append(f"{auto}={folder}")
    run_hidden(Path(sys.executable), HIDE + OTHERS, tmp_path, arguments)
    for folder, (name, given) in inputs.items():
        logits, hidden = torch.load(f"{folder}.logits")
        with torch.inference_mode():
            assert torch.equal(logits, getattr(lightnet_llm, name).from_pretrained(folder).eval()(**given).logits)
            bare = lightnet_llm.LightNetModel.from_pretrained(folder).eval()(**given).last_hidden_state
            assert torch.equal(hidden, bare) and hidden.shape == (2, 12 if "pixel_values" in given else 10, 32)


def test_without_this_package(tmp_path: Path) -> None:
    check(Path(sys.executable), HIDE + USE, tmp_path)


@pytest.mark.slow
def test_in_a_fresh_environment(tmp_path: Path) -> None:
    """A virtual environment whose packages are links to those that transformers needs, and no others."""
    from importlib.metadata import distribution, requires

    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    target = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    waiting, seen = ["torch", "transformers"], set()
    while waiting:
        name = waiting.pop()
        try:
            found = distribution(name)
        except ModuleNotFoundError:
            continue  # of another platform
        if found.metadata["Name"] in seen:
            continue
        seen.add(found.metadata["Name"])
        for need in requires(name) or []:
            if "extra ==" not in need:
                waiting.append("".join(c if c.isalnum() or c in "-_." else " " for c in need).split()[0])
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            place = target / top
            if not place.exists():
                place.symlink_to(found.locate_file(top))
    assert not (target / "deepspeed").exists() and not (target / "triton").exists()
    check(tmp_path / "venv" / "bin" / "python", USE, tmp_path)


def test_every_file_is_one_that_transformers_copies(tmp_path: Path) -> None:
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    files = bundle.sources()
    listed: set[str] = set()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        compile(text, name, "exec")
        relative = {f"{found}.py" for found in get_relative_imports(tmp_path / name)}
        listed |= relative
        assert relative <= files.keys(), name
        foreign = set(get_imports(tmp_path / name)) - set(sys.stdlib_module_names) - {"torch", "transformers", "numpy"}
        assert not foreign, (name, foreign)
    held: dict[str, Any] = {}  # CUDA sources travel inside
    exec(files["cuda_launch.py"][files["cuda_launch.py"].index("\nSOURCES = ") :], held)
    assert held["SOURCES"] == {path.name: path.read_text() for path in (bundle.KERNELS / "cuda").iterdir()} != {}
    assert not [name for name, text in files.items() if ".read_text(" in text]
    assert files.keys() == listed  # by one or other of the two that an auto_map names
    for root in bundle.ROOTS:
        assert {f"{found}.py" for found in get_relative_imports(tmp_path / f"{root}.py")} == files.keys() - {
            f"{root}.py"
        }
