"""Where weights are read from: one tensor at a time, full, without padding, under training's names."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checkpoint import store
from ..checkpoint.weights import AVERAGE, FOLDER, Part, describe_part, folder_of, read_tensor, weights_files
from ..config.load import Schema, validate, validate_as
from ..config.model import ModelConfig
from ..config.run import RunConfig
from ..errors import UserError, nearest
from ..inference.load import find_tokenizer, read_config, tokenizer_file
from ..models import build_model
from ..models.layers import PlainLayers
from ..models.parameters import ParameterSpec, shapes_alone, spec_of, unshard
from .masters import Masters
from .names import HEADS, to_training
from .tokenizer import Vocabulary, beside

TRAINING = "training"  # folder inside an exported one: what training needs and Transformers does not
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of weights, as safetensors names them


class Reader(Protocol):
    """Full tensors by training's names, and their shapes without reading them."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        """A tensor in memory of its own."""
        ...


@dataclass
class Source:
    """Weights and what belongs to them.

    Attributes:
        path: the folder.
        kind: training, hf or safetensors.
        model: the architecture.
        config: of the run that trained it, as far as known.
        weights: reads tensors as they were trained.
        vocabulary: the tokenizer, if there is one.
        facts: about the run, for the model card.
        masters: fp32 values where ``weights`` are rounded ones.
        classes: names of a classifier's classes by number, as far as known.
    """

    path: Path
    kind: str
    model: ModelConfig
    config: RunConfig
    weights: Reader
    vocabulary: Vocabulary | None
    facts: dict[str, Any] = field(default_factory=dict)
    masters: Reader | None = None
    classes: list[str] = field(default_factory=list)


def specs_of(model: ModelConfig) -> dict[str, ParameterSpec]:
    """Every parameter of an architecture, by name; allocates nothing."""
    with shapes_alone():
        built = build_model(model, PlainLayers(vocab_multiple=1))
    return {name: spec_of(parameter) for name, parameter in built.named_parameters()}


def open_source(path: Path, trust_pickle: bool = False, weights: str = "trained") -> Source:
    """Open a training checkpoint (or the newest whole one of a run), a Hugging Face folder or one of plain safetensors.

    Args:
        path: the folder.
        trust_pickle: whether pickled files are read, where there is nothing else; with weights-only loading.
        weights: ``trained``, or ``ema``: the exponential average of a run that keeps one.

    Raises:
        UserError: none of these, another architecture, half a checkpoint, or weights that do not fit the configuration.
    """
    if not path.exists():
        raise UserError(f"{path}: does not exist; name a run folder, a checkpoint or a Hugging Face folder")
    which = folder_of(weights)
    if path.is_file():
        raise UserError(f"{path}: is a file; name the folder that holds it together with its configuration")
    converted = (path / "config.json").is_file() or any(path.glob("model*.safetensors"))
    if which == AVERAGE and converted:
        raise UserError(
            f"{path}: --weights ema goes with a run; this folder holds the one set of weights it was made of"
        )
    if (path / "config.json").is_file():
        source = _open_hugging_face(path, trust_pickle)
    elif (path / "config.yaml").is_file() and any(path.glob("model*.safetensors")):
        source = _open_plain(path)
    else:
        source = _open_training(path, trust_pickle, which)
    if source.model.head not in HEADS or (source.model.head == "causal_lm" and not source.model.causal):
        held = source.model.head if source.model.head not in HEADS else "causal_lm head on a model that is not causal"
        raise UserError(f"{source.path}: holds a {held}; what is converted is {', '.join(HEADS)}")
    _check(source)
    return source


def _check(source: Source) -> None:
    """Names and shapes against the architecture, before any work."""
    wanted, found = {name: spec.shape for name, spec in specs_of(source.model).items()}, source.weights.shapes
    for name, shape in wanted.items():
        if name not in found:
            raise UserError(f"{source.path}: has no tensor '{name}'{nearest(name, list(found))}; it is another model's")
        if tuple(found[name]) != tuple(shape):
            raise UserError(
                f"{source.path}: '{name}' is {list(found[name])}, its configuration needs {list(shape)}; it is another "
                "model's, or its configuration was edited"
            )
    left = sorted(set(found) - set(wanted))
    if left:
        raise UserError(f"{source.path}: tensor '{left[0]}' has no place in its configuration; it is another model's")
    vocabulary = source.vocabulary
    if vocabulary is not None and vocabulary.tokenizer.vocab_size > source.model.vocab_size:
        raise UserError(
            f"{vocabulary.path}: has {vocabulary.tokenizer.vocab_size} ids, the model of {source.path} only "
            f"{source.model.vocab_size}; put the tokenizer that it was trained with there"
        )


class Parts:
    """Weights of a training checkpoint: parts of stages and tensor-parallel ranks, joined when they are read.

    Args:
        which: ``weights``, or ``ema`` for the exponential average.

    Attributes:
        as_trained: the weights whose dtype was trained in.
    """

    def __init__(self, checkpoint: Path, which: str = FOLDER):
        self.parts: dict[str, dict[int, tuple[Path, Part]]] = {}
        self.as_trained: Parts = self if which == FOLDER else Parts(checkpoint)
        for path in weights_files(checkpoint, which):
            try:
                with safe_open(path, framework="pt") as reader:
                    rank, self.size = int(reader.metadata()["tensor_rank"]), int(reader.metadata()["tensor_size"])
                for name, part in describe_part(path).items():
                    self.parts.setdefault(name, {})[rank] = path, part
            except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
                raise UserError(f"{path}: not a readable weights file ({error}); copy the checkpoint again") from None
        for name, ranks in self.parts.items():
            missing = sorted(set(range(self.size)) - set(ranks))
            if missing:
                raise UserError(
                    f"{checkpoint / which}: the part of tensor-parallel rank {missing[0]} of '{name}' is missing; copy the "
                    "checkpoint again"
                )
        self.shapes = {name: ranks[0][1].shape for name, ranks in self.parts.items()}

    def read(self, name: str) -> Tensor:
        """A full tensor, joined, without padding."""
        ranks = self.parts[name]
        first = ranks[0][1]
        count = self.size if first.dim is not None else 1
        return unshard([read_tensor(ranks[rank][0], name) for rank in range(count)], first.shape, first.dim)


class Files:
    """Weights of safetensors files, whole tensors each, under other names perhaps.

    Args:
        where: file and name in it, by training's name.
    """

    def __init__(self, where: dict[str, tuple[Path, str]]):
        self.where = where
        self.shapes = {}
        opened: dict[Path, dict[str, tuple[int, ...]]] = {}
        for name, (path, key) in where.items():
            if path not in opened:
                opened[path] = _shapes_in(path)
            if key not in opened[path]:
                raise UserError(f"{path}: has no tensor '{key}', which its index places there; copy the folder again")
            self.shapes[name] = opened[path][key]

    def read(self, name: str) -> Tensor:
        """A full tensor."""
        return read_tensor(*self.where[name])


class Pickled:
    """Weights of a pickled file that was read weights-only; memory-mapped."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]):
        self.tensors = tensors
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES.values():
                raise _numbers(path, name, str(tensor.dtype).removeprefix("torch."))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        """A full tensor."""
        return self.tensors[name].clone()


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            for name, held in slices.items():
                if held.get_dtype() not in DTYPES:
                    raise _numbers(path, name, held.get_dtype())
            return {name: tuple(held.get_shape()) for name, held in slices.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so this is half a checkpoint; copy the folder again as a whole") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); copy it again") from None


def _numbers(path: Path, name: str, dtype: str) -> UserError:
    """What an integer, a quantised or an fp64 tensor gets."""
    return UserError(
        f"{path}: '{name}' holds {dtype} numbers; weights are {', '.join(DTYPES)}: convert it where it is from"
    )


def _open_training(path: Path, trust_pickle: bool, which: str) -> Source:
    folder = store.resolve(path, warn=lambda line: print(f"warning: {line}", file=sys.stderr))
    config = read_config(folder)
    try:
        manifest = store.read_manifest(folder)
    except ValueError as error:
        raise UserError(str(error)) from None
    weights = Parts(folder, which)
    masters: Reader | None = None
    if which == AVERAGE:
        masters = weights  # it is of the masters, in fp32
    elif (folder / "engine").is_dir():
        masters = Masters(folder, manifest, trust_pickle, weights)
    if config.train.precision == "fp32":
        masters = None  # the weights are the masters
    tokenizer, file = find_tokenizer(folder, config), tokenizer_file(folder, config)
    vocabulary = None if tokenizer is None or file is None else Vocabulary(tokenizer, file)
    state = manifest.get("state", {})
    facts = {**manifest.get("facts", {}), **{name: state[name] for name in ("step", "tokens") if name in state}}
    if which == AVERAGE:
        facts["ema_decay"] = manifest.get("ema")
    classes = [str(name) for name in manifest.get("data", {}).get("classes") or []]
    return Source(folder, "training", config.model, config, weights, vocabulary, facts, masters, classes)


def _open_hugging_face(path: Path, trust_pickle: bool) -> Source:
    tree = _json(path / "config.json")
    if tree.get("model_type") != "lightnet":
        found = tree.get("model_type") or tree.get("architectures") or "no model type"
        found = ", ".join(map(str, found)) if isinstance(found, list) else found
        raise UserError(f"{path / 'config.json'}: names another architecture ({found}); only lightnet is converted")
    kept = {name: value for name, value in tree.items() if name in ModelConfig.model_fields}
    labels = tree.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # Transformers leaves its default out
    if not isinstance(labels, dict) or sorted(labels) != sorted(map(str, range(len(labels)))):
        raise UserError(
            f"{path / 'config.json'}: 'id2label' does not name its classes from 0 on; copy the folder again"
        )
    if kept.get("head") == "sequence_classifier":
        kept["classes"] = len(labels)
    elif tree.get("image_size") is not None:
        fields = {"size": "image_size", "patch": "patch_size", "channels": "num_channels"}
        kept["image"] = {name: tree.get(other) for name, other in fields.items()} | {"classes": len(labels)}
    names = [str(labels[str(number)]) for number in range(len(labels))]
    model = _fitting(ModelConfig, kept, path / "config.json")
    weights = _hugging_face_weights(path, trust_pickle)
    written, facts = path / TRAINING / "config.yaml", {}
    if written.is_file():
        try:
            run = yaml.safe_load(written.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{written}: not readable ({_line(error)}); copy the folder again") from None
        if not isinstance(run, dict):
            raise UserError(f"{written}: holds no configuration; copy the folder again")
        facts = _json(path / TRAINING / "facts.json") if (path / TRAINING / "facts.json").is_file() else {}
        config = _fitting(RunConfig, {**run, "model": kept}, written)
    else:
        precision = "bf16" if "16" in str(tree.get("dtype") or tree.get("torch_dtype")) else "fp32"
        config = validate({"model": kept, "train": {"steps": 1, "precision": precision}}, str(path / "config.json"))
    found = beside(path, path / TRAINING) if model.image is None else None
    return Source(path, "hf", model, config, weights, found, facts, classes=_named_classes(names))


def _fitting(schema: type[Schema], tree: dict[str, Any], path: Path) -> Schema:
    """What a file of the folder holds, checked."""
    try:
        return validate_as(schema, tree, str(path))
    except UserError as error:
        raise UserError(f"{error}; copy the folder again") from None


def _named_classes(names: list[str]) -> list[str]:
    """None of them where they are those that Transformers makes up."""
    return [] if names == [f"LABEL_{number}" for number in range(len(names))] else names


def _hugging_face_weights(path: Path, trust_pickle: bool) -> Reader:
    if (path / INDEX).is_file():
        return Files(dict(_named(path, {key: (path / file, key) for key, file in _index(path).items()})))
    single = path / "model.safetensors"
    if single.is_file():
        return Files(dict(_named(path, {key: (single, key) for key in _shapes_in(single)})))
    if any(path.glob("model-*.safetensors")):
        raise UserError(f"{path}: {INDEX} is missing, so this is half a checkpoint; copy the folder again as a whole")
    pickled = path / "pytorch_model.bin"
    if not pickled.is_file() and any(path.glob("pytorch_model-*.bin")):
        raise UserError(f"{path}: holds pickled shards, which are not read; ask for safetensors")
    if not pickled.is_file():
        raise UserError(f"{path}: holds no model.safetensors; copy the folder again as a whole")
    if not trust_pickle:
        raise UserError(
            f"{pickled}: is a pickle, which can run code when it is loaded; ask for safetensors, or make "
            "them with lightnet convert --trust-pickle"
        )
    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # whose own words are how to run it all the same
        raise UserError(
            f"{pickled}: not loaded, it is damaged or holds more than weights; ask for safetensors"
        ) from None
    except (RuntimeError, OSError, EOFError) as error:
        raise UserError(f"{pickled}: not loaded, it is damaged ({_line(error)}); copy it again") from None
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError(f"{pickled}: holds something else than tensors by name; save the model's state_dict alone")
    return Pickled(pickled, dict(_named(path, tensors)))


def _named(path: Path, found: dict[str, Any]) -> list[tuple[str, Any]]:
    """Entries under training's names."""
    entries = []
    for key, value in found.items():
        name = to_training(key)
        if name is None:
            raise UserError(f"{path}: tensor '{key}' has no place in a LightNet model; it is another model's")
        entries.append((name, value))
    return entries


def _open_plain(path: Path) -> Source:
    config = read_config(path)
    if (path / INDEX).is_file():
        where = {name: (path / file, name) for name, file in _index(path).items()}
    else:
        where = {name: (path / "model.safetensors", name) for name in _shapes_in(path / "model.safetensors")}
    facts = _json(path / "facts.json") if (path / "facts.json").is_file() else {}
    classes = facts.pop("classes", [])
    return Source(path, "safetensors", config.model, config, Files(where), beside(path), facts, classes=classes)


def _index(path: Path) -> dict[str, str]:
    """File by tensor, all of them in the folder itself."""
    index = _json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(x, str) and Path(x).name == x for x in index.values()):
        raise UserError(
            f"{path / INDEX}: its weight_map does not name a file of this folder for every tensor; copy it again"
        )
    return index


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable ({_line(error)}); copy the folder again") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: is no JSON object; copy the folder again")
    return tree


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
