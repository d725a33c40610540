"""The model's source files for a folder that loads where this package is not installed (``trust_remote_code=True``).

Transformers copies from such a folder only files that lie flat beside each other and that a ``from .name import`` names. So
the files are training's own, renamed and with their imports rewritten; not a line of mathematics is written twice.
"""

from __future__ import annotations

import re
from pathlib import Path

import lightnet_kernels

LIBRARY = Path(__file__).resolve().parents[1]
KERNELS = Path(lightnet_kernels.__file__).resolve().parent
ROOTS = ("modeling_lightnet", "heads_lightnet")  # files whose classes an auto_map names
# By training's head: the classes of an exported folder, its own first, under the names of Transformers' Auto classes.
CLASSES = {
    "causal_lm": {"AutoModelForCausalLM": "modeling_lightnet.LightNetForCausalLM"},
    "masked_lm": {
        "AutoModelForMaskedLM": "heads_lightnet.LightNetForMaskedLM",
        "AutoModelForSequenceClassification": "heads_lightnet.LightNetForSequenceClassification",  # to fine-tune
    },
    "sequence_classifier": {"AutoModelForSequenceClassification": "heads_lightnet.LightNetForSequenceClassification"},
    "classifier": {"AutoModelForImageClassification": "heads_lightnet.LightNetForImageClassification"},
}
HEADER = "# From lightnet-llm {version}, {path}, for use without it; see README.md. Apache License 2.0.\n"
RELATIVE = re.compile(r"^\s*from \.(\w+) import", re.MULTILINE)

# What an import becomes, in every file: (expression, replacement).
RULES = [
    (r"from \.\.config\.model import ModelConfig", "from .configuration_lightnet import LightNetConfig as ModelConfig"),
    (r"from \.\.models\.(\w+) import", r"from .model_\1 import"),
    (r"from lightnet_kernels\.(\w+) import", r"from .\1 import"),
    (r"from lightnet_kernels import", "from .lightnet_kernels import"),
    # Each folder's operators have names of their own: two models, or an installed package, may be in one process.
    (r'"lightnet(?:_kernels)?::(\w+)"', r'__package__.replace(".", "_") + "::\1"'),
    # Not asked for in advance where it is missing; whatever needs it is imported only where it is there.
    (r"^( *)(import triton.*|from triton[. ].*)$", r"\1try:\n\1    \2\n\1except ImportError:\n\1    raise"),
]


def auto_map(head: str) -> dict[str, str]:
    """A folder's ``auto_map``."""
    shared = {"AutoConfig": "configuration_lightnet.LightNetConfig", "AutoModel": "modeling_lightnet.LightNetModel"}
    return {**shared, **CLASSES[head]}


def class_name(head: str) -> str:
    """Of the model's own class."""
    return next(iter(CLASSES[head].values())).rpartition(".")[2]


def sources() -> dict[str, str]:
    """Text by file name of everything that an exported folder needs."""
    files = {f"{path.stem}.py": _read(path) for path in sorted((LIBRARY / "hf").glob("*_lightnet.py"))}
    waiting = [name for text in files.values() for name in RELATIVE.findall(text) if name.startswith("model_")]
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in files:
            continue
        files[name] = _read(LIBRARY / "models" / name.removeprefix("model_"))
        waiting += [found for found in RELATIVE.findall(files[name]) if found.startswith("model_")]
    for path in sorted(KERNELS.glob("*.py")):
        name = "lightnet_kernels.py" if path.stem == "__init__" else path.name
        assert name not in files
        files[name] = _read(path)
    files["cuda_launch.py"] = _with_cuda(files["cuda_launch.py"])
    # Some files are imported by name where they are needed, which Transformers does not see; it reads, but never runs this.
    names = sorted(Path(name).stem for name in files)
    for root in ROOTS:
        listing = "".join(f"    from .{name} import __name__\n" for name in names if name != root)
        files[f"{root}.py"] += (
            f"\nif False:  # for Transformers, which copies the files that it finds named so\n{listing}"
        )
    return files


def _read(path: Path) -> str:
    """A source file with its imports as they are in a flat folder."""
    from importlib.metadata import version

    package = LIBRARY if path.is_relative_to(LIBRARY) else KERNELS
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "models":
        text = re.sub(r"^(\s*)from \.(\w+) import", r"\1from .model_\2 import", text, flags=re.MULTILINE)
    for expression, replacement in RULES:
        text = re.sub(expression, replacement, text, flags=re.MULTILINE)
    place = f"{package.name}/{path.relative_to(package).as_posix()}"
    return HEADER.format(version=version("lightnet-llm"), path=place) + text


def _with_cuda(text: str) -> str:
    """The module with the text of `cuda/` inside, as Transformers copies Python files only."""
    reads = "(FOLDER / file).read_text()"
    assert text.count(reads) == 1
    held = {path.name: path.read_text(encoding="utf-8") for path in sorted((KERNELS / "cuda").iterdir())}
    assert all("'''" not in source and not source.endswith("\\") for source in held.values())
    listing = "".join(f"SOURCES[{name!r}] = r'''{source}'''\n" for name, source in held.items())
    return text.replace(reads, "SOURCES[file]") + f"\nSOURCES = {{}}\n{listing}"


def write(folder: Path) -> list[str]:
    """Write the files into a folder; returns their names."""
    files = sources()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(files)
