"""A trained model from a checkpoint on disk, on one device, whatever layout wrote it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import yaml
from lightnet_data import manifest
from lightnet_data.errors import DataError
from lightnet_data.tokenizer import FILE_NAMES, Tokenizer
from torch import nn

from ..checkpoint.store import read_manifest, resolve
from ..checkpoint.weights import folder_of, load_into, load_weights
from ..config import RunConfig, validate
from ..errors import UserError
from ..models import CausalLM, Denoiser, ImageClassifier, SequenceClassifier, initialize
from ..models.parameters import declare, shapes_alone, spec_of

Image = TypeVar("Image", ImageClassifier, Denoiser, SequenceClassifier)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Loaded(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        model: in eval mode, without gradients.
        config: of the run that trained it.
        tokenizer: the one the run's data was cut with, or None when it is nowhere to be found.
        folder: the folder the weights came from.
        facts: what is known of the training that gave them, such as "step" and "tokens".
    """

    model: CausalLM
    config: RunConfig
    tokenizer: Tokenizer | None
    folder: Path
    facts: dict[str, Any] = {}


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    weights: str = "trained",
) -> Loaded:
    """Load a model for inference.

    Args:
        path: a run folder (its newest whole checkpoint is taken), a checkpoint of any layout such as
            ``.../step_00000100``, or what ``lightnet convert`` wrote: a Hugging Face folder or plain safetensors.
        device: default: the first CUDA device, else the CPU.
        dtype: "fp32", "bf16" or a torch dtype. Default: the precision of the run; on the CPU fp32, which is faster
            there. Parameters that training keeps in fp32 (theta, TPE) stay fp32 in any case.
        weights: "trained", or "ema": the exponential average of a run that keeps one.

    Raises:
        UserError: no whole checkpoint there, no configuration, another model's weights, or no such device.
    """
    given, which = Path(path), folder_of(weights)
    if not given.exists():
        raise UserError(f"{given}: no such checkpoint; name a run folder or a folder such as .../step_00000100")
    if (given / "config.json").is_file() or any(given.glob("model*.safetensors")):
        return _load_converted(given, device, dtype, weights)
    folder = resolve(given, warn=lambda line: print(f"warning: {line}", file=sys.stderr))
    config = read_config(folder)
    model = _empty_model(folder, config, device, dtype)
    load_into(model, load_weights(folder, which), str(folder))
    facts = read_manifest(folder).get("state", {})
    return Loaded(model.eval().requires_grad_(False), config, find_tokenizer(folder, config), folder, facts)


def _load_converted(
    folder: Path, device: str | torch.device | None, dtype: str | torch.dtype | None, weights: str
) -> Loaded:
    """What is no checkpoint of training: its readers belong to conversion."""
    from ..convert.source import open_source

    source = open_source(folder, weights=weights)
    model = _empty_model(folder, source.config, device, dtype)
    load_into(model, {name: source.weights.read(name) for name in source.weights.shapes}, str(folder))
    tokenizer = None if source.vocabulary is None else source.vocabulary.tokenizer
    return Loaded(model.eval().requires_grad_(False), source.config, tokenizer, folder, source.facts)


def _empty_model(
    folder: Path, config: RunConfig, device: str | torch.device | None, dtype: str | torch.dtype | None
) -> CausalLM:
    if config.model.head != "causal_lm" or not config.model.causal:
        raise UserError(
            f"{folder}: holds a {'bidirectional' if config.model.head == 'causal_lm' else config.model.head} model, which cannot "
            "continue a text; name a language model"
        )
    place = choose_device(device)
    return allocate(config, place, choose_dtype(dtype, config, place))


def load_model_of_head(
    path: str | Path, kind: type[Image], head: str, device: str | None, dtype: str | None, weights: str | None
) -> tuple[Image, RunConfig, dict[str, Any]]:
    """A model of one head that is no language model's, its run's configuration and the checkpoint's manifest.

    Args:
        path: a run folder or a checkpoint of any layout.
        kind, head: class of the model, and ``model.head`` of the runs that train it.
        device, dtype: as of ``load_model``.
        weights: "trained" or "ema"; None: the average of a run that keeps one.

    Raises:
        UserError: no whole checkpoint there, or of another head.
    """
    if not Path(path).exists():
        raise UserError(f"{path}: no such checkpoint; name a run folder or a folder such as .../step_00000100")
    folder = resolve(Path(path), warn=lambda line: print(f"warning: {line}", file=sys.stderr))
    config = read_config(folder)
    if config.model.head != head:
        raise UserError(f"{folder}: holds a {config.model.head}; name a run of head: {head}")
    which = weights or ("trained" if config.train.ema is None else "ema")
    place = choose_device(device)
    precision = choose_dtype(dtype, config, place)
    model = kind(config.model)
    initialize(model, 0)
    load_into(model, load_weights(folder, folder_of(which)), str(folder))
    model.to(place)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if spec_of(parameter).keep_fp32 else precision)
    return model.eval().requires_grad_(False), config, read_manifest(folder)


def run_folder_of(folder: Path) -> Path:
    """The run folder that a checkpoint folder belongs to (itself, when it was copied out of one)."""
    place = folder.resolve()
    return place.parent.parent if place.parent.name == "checkpoints" else place


def read_config(folder: Path) -> RunConfig:
    """The configuration in a checkpoint folder.

    Raises:
        UserError: it is missing or does not fit the schema.
    """
    path = folder / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); copy the checkpoint folder as a whole") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({str(error).splitlines()[0]}); copy the checkpoint again") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds no configuration; copy the checkpoint again")
    return validate(tree, str(path))


def choose_device(device: str | torch.device | None) -> torch.device:
    """The named device, or the first CUDA device, or the CPU.

    Raises:
        UserError: there is no such device on this machine.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise UserError(f"device '{device}' is not supported; use cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UserError(
            f"device '{device}' is not here: PyTorch sees {count} CUDA devices; use --device cpu or another"
        )
    return found


def choose_dtype(dtype: str | torch.dtype | None, config: RunConfig, device: torch.device) -> torch.dtype:
    """The dtype that is asked for, or that of the run; on the CPU fp32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype or (config.train.precision if device.type != "cpu" else "fp32")
    if name not in DTYPES:
        raise UserError(f"dtype '{name}' is not available; use {' or '.join(DTYPES)}")
    return DTYPES[name]


def allocate(config: RunConfig, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """The model with uninitialised weights: drawing initial values would take longer than reading trained ones."""
    with shapes_alone():
        model = CausalLM(config.model)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            spec = spec_of(parameter)
            kind = torch.float32 if spec.keep_fp32 else dtype
            module.register_parameter(
                name, declare(nn.Parameter(torch.empty(parameter.shape, device=device, dtype=kind)), spec)
            )
    return model


def find_tokenizer(folder: Path, config: RunConfig) -> Tokenizer | None:
    """The tokenizer of a checkpoint: kept in its run folder, else beside the data that the run read.

    Raises:
        UserError: it is damaged, or has more ids than the model, so it belongs to another one.
    """
    path = tokenizer_file(folder, config)
    if path is None:
        return None
    tokenizer = _read_tokenizer(path, Path(config.data.path) if config.data.path else None)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"{path}: has {tokenizer.vocab_size} ids, the model of {folder} only {config.model.vocab_size}; "
            "put the tokenizer of its training data into the run folder"
        )
    return tokenizer


def tokenizer_file(folder: Path, config: RunConfig) -> Path | None:
    """Where ``find_tokenizer`` finds it."""
    places = [folder, run_folder_of(folder), *([Path(config.data.path)] if config.data.path else [])]
    files = (place / name for place in places for name in FILE_NAMES.values())
    return next((file for file in files if file.is_file()), None)


def _read_tokenizer(path: Path, data: Path | None) -> Tokenizer:
    """The run folder's copy is a bare file: which token ends a document stands in the manifest of the data."""
    if data is not None and path.parent != data and (data / manifest.FILE_NAME).is_file():
        try:
            facts = manifest.load(data)["tokenizer"]
            read = Tokenizer(path.read_bytes(), int(facts["eod_id"]), str(path))
            if facts.get("fingerprint") == read.fingerprint:
                return read
        except (DataError, KeyError, TypeError, ValueError, OSError):
            pass  # moved or rewritten since: the file alone decides
    try:
        return Tokenizer.load(path)
    except DataError as error:
        raise UserError(f"{error}; put the tokenizer of its training data there") from None


def require_tokenizer(loaded: Loaded) -> Tokenizer:
    """The tokenizer of a loaded checkpoint.

    Raises:
        UserError: it has none.
    """
    if loaded.tokenizer is None:
        run = run_folder_of(loaded.folder)
        raise UserError(
            f"{run}: no {' or '.join(FILE_NAMES.values())} there or in data.path ({loaded.config.data.path}); "
            "copy it from the folder of `lightnet prep` into the run folder"
        )
    return loaded.tokenizer
