"""One conversion: read, write beside, compare logits, rename."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import store
from ..checkpoint.averaging import Average, chosen
from ..config import dump_config, validate
from ..config.run import RunConfig
from ..errors import UserError, nearest
from ..inference.load import run_folder_of
from ..models.parameters import ParameterSpec
from . import parity, tokenizer
from .card import card, run_facts
from .names import to_hugging_face
from .source import TRAINING, Files, Parts, Source, open_source, specs_of
from .target import plan, write_safetensors, write_training

TARGETS = ("hf", "training", "safetensors")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WHOLE_MODEL_BYTES = 2_000_000_000  # fp32 models up to this size are loaded by Transformers itself for the comparison


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        source, target: folders; sources of an average are all named.
        to: kind of the target.
        parameters: exact number, padding not counted.
        tensors, files, bytes: what was written of weights.
        dtype: of the weights; theta and TPE are always float32.
        masters: whether they come from fp32 master weights.
        tokenizer: the file it came from.
        warnings: what could not be done.
        tokens: that were compared, of real text or of images.
        difference: largest difference of logits between source (in the target's dtype) and result, in units of the
            largest logit.
        rounding: the same between the weights as trained and the result; 0 where the dtype is kept.
        loaded_with: what computed the result's logits.
        compared: what the logits were compared on, in words.
    """

    source: list[str]
    target: str
    to: str
    parameters: int
    tensors: int
    files: int
    bytes: int
    dtype: str
    masters: bool
    tokenizer: str | None
    warnings: list[str]
    tokens: int
    difference: float
    rounding: float
    loaded_with: str
    compared: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    dtype: str | None = None,
    average: str | None = None,
    weights: str = "trained",
    trust_pickle: bool = False,
) -> Report:
    """Convert weights and what belongs to them; the target appears whole or not at all.

    Args:
        source: a run folder (its newest whole checkpoint), a checkpoint of any layout, a folder of an earlier conversion.
        target: a folder that does not exist yet.
        to: hf, training (what ``train.init_from`` takes) or safetensors (training's names).
        dtype: float32, bfloat16 or float16; None: as trained. float32 of a bf16 run takes its fp32 master weights.
        average: last:K or all: the mean of a run's checkpoints in place of one.
        weights: trained, or ema: the exponential average of a run that keeps one.
        trust_pickle: whether pickled files are read where there is nothing else.

    Raises:
        UserError: in one line; no target is left behind. So, too, when logits differ.
    """
    place, final = Path(source), Path(target)
    if to not in TARGETS:
        raise UserError(f"--to {to}: must be one of {', '.join(TARGETS)}{nearest(to, list(TARGETS))}")
    wanted = None if dtype is None else ALIASES.get(dtype, dtype)
    if wanted is not None and wanted not in DTYPES:
        raise UserError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}{nearest(dtype or '', list(DTYPES))}")
    if final.exists() or final.is_symlink():
        raise UserError(f"{final}: exists and is never overwritten; name a new folder, or remove it")
    if not final.absolute().parent.is_dir():
        raise UserError(f"{final}: its folder {final.absolute().parent} does not exist; make it first")
    if to == "hf":
        _require_transformers()
    opened, parts = _open(place, average, trust_pickle, weights)
    partial = final.absolute().with_name(f".{final.absolute().name}.partial")
    with _alone(final):
        shutil.rmtree(partial, ignore_errors=True)  # what a killed conversion left
        try:
            partial.mkdir()
            report = _Conversion(opened, parts, partial, final, to, wanted).run()
        except OSError as error:
            raise UserError(f"{partial}: cannot be written ({error}); nothing is left there") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return report


@contextmanager
def _alone(final: Path) -> Iterator[None]:
    """One conversion to a target at a time.

    Raises:
        UserError: another is going on, or has just made it, or nothing can be written there.
    """
    path = final.absolute().with_name(f".{final.absolute().name}.lock")
    try:
        opened = path.open("a")
    except OSError as error:
        raise UserError(f"{final}: cannot be written ({error.strerror}); name a folder elsewhere") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{final}: another conversion writes it; wait for that one, or name another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            if final.exists():
                raise UserError(f"{final}: another conversion has just made it; name a new folder, or remove it")
            yield
        finally:
            path.unlink(missing_ok=True)


def _open(place: Path, average: str | None, trust_pickle: bool, weights: str) -> tuple[Source, list[str]]:
    if average is None:
        opened = open_source(place, trust_pickle, weights)
        return opened, [str(opened.path)]
    if weights != "trained":
        raise UserError(f"--average {average} and --weights {weights} both average; choose one")
    sources = [open_source(folder, trust_pickle) for folder in chosen(place, average)]
    newest = sources[-1]
    for other in sources:
        if other.weights.shapes != newest.weights.shapes:
            raise UserError(f"{other.path}: holds another model than {newest.path}; they cannot be averaged")
    masters = [source.masters for source in sources if source.masters is not None]
    facts = {**newest.facts, "average_of_steps": [source.facts.get("step") for source in sources]}
    shapes = newest.weights.shapes
    averaged = replace(
        newest,
        weights=Average([source.weights for source in sources], shapes),
        masters=Average(masters, shapes) if len(masters) == len(sources) else None,
        facts=facts,
    )
    return averaged, [str(source.path) for source in sources]


class _Conversion:
    def __init__(self, source: Source, parts: list[str], folder: Path, final: Path, to: str, dtype: str | None):
        self.source, self.parts, self.folder, self.final, self.to = source, parts, folder, final, to
        self.specs = specs_of(source.model)
        self.trained = self._trained_dtype()
        self.dtype = DTYPES[dtype] if dtype else self.trained
        self.from_masters = self.dtype != self.trained and dtype == "float32" and source.masters is not None
        self.warnings: list[str] = []
        masked = source.model.head == "masked_lm" and source.vocabulary is not None
        self.mask = None
        if masked and source.vocabulary is not None:
            self.mask = tokenizer.mask_of(source.vocabulary, source.config.masking.token)

    def run(self) -> Report:
        """Write, compare, rename."""
        facts = self._facts()
        shards = plan(self.specs, {name: self._kind(name) for name in self.specs})
        write = {"hf": self._write_hf, "training": self._write_training, "safetensors": self._write_plain}[self.to]
        size = write(shards, facts)
        inputs, difference, rounding, loaded_with = self._compare()
        if self.to == "training":
            manifest = {"format": 1, "state": {"step": facts.get("step") or 0}, "converted": True, "facts": facts}
            if self.source.classes:
                manifest["data"] = {"classes": self.source.classes}
            store.seal(self.folder, self.final, manifest)
        else:
            store.sync_files(self.folder)
            store.sync_folders(self.folder)
            self.folder.rename(self.final)
            store.sync(self.final.parent)
        vocabulary = self.source.vocabulary
        return Report(
            self.parts,
            str(self.final),
            self.to,
            _count(self.specs),
            len(self.specs),
            len(shards),
            size,
            _name(self.dtype),
            self.from_masters,
            None if vocabulary is None else str(vocabulary.path),
            self.warnings,
            inputs.shape[1] if self.source.model.image is None else self.source.model.image.tokens * len(inputs),
            difference,
            rounding,
            loaded_with,
            f"{inputs.shape[1]} tokens of real text" if self.source.model.image is None else f"{len(inputs)} images",
        )

    def _trained_dtype(self) -> torch.dtype:
        """Of the weights as trained, from the smallest that is not kept in fp32."""
        names = [name for name, spec in self.specs.items() if not spec.keep_fp32]
        smallest = min(names, key=lambda name: torch.Size(self.specs[name].shape).numel())
        weights = self.source.weights
        trained: Tensor = getattr(weights, "as_trained", weights).read(smallest)
        return trained.dtype

    def _kind(self, name: str) -> torch.dtype:
        return torch.float32 if self.specs[name].keep_fp32 else self.dtype

    def _read(self, name: str) -> Tensor:
        """A tensor as it is written."""
        masters = self.source.masters if self.from_masters else None
        return (masters or self.source.weights).read(name).to(self._kind(name))

    def _facts(self) -> dict[str, Any]:
        source = self.source
        facts = run_facts(run_folder_of(source.path), source.config) if source.kind == "training" else {}
        return {**{k: v for k, v in source.facts.items() if v is not None}, **facts}

    def _compare(self) -> tuple[Tensor, float, float, str]:
        source, model = self.source, self.source.model
        ids = parity.real_inputs(model, source.vocabulary, None if self.mask is None else self.mask[1])
        result, loaded_with = self._result(ids)
        wanted = trained = parity.logits(model, self._read, ids)
        if self.dtype != self.trained or self.from_masters:
            trained = parity.logits(model, source.weights.read, ids)
        if not trained.isfinite().all():
            raise UserError(
                f"{source.path}: its logits are not finite, the run diverged; convert an earlier checkpoint"
            )
        if not wanted.isfinite().all():
            raise UserError(
                f"{self.final}: not written, its logits are not finite in {_name(self.dtype)}; use bfloat16 or float32"
            )
        difference = parity.difference(wanted, result)
        if not difference <= parity.TOLERANCE:
            raise UserError(
                f"{self.final}: not written, its logits differ from those of {source.path} by {difference:.2e} of the "
                f"largest ({parity.TOLERANCE:g} is allowed); please report it"
            )
        rounding = 0.0 if trained is wanted else parity.difference(trained, result)
        return ids, difference, rounding, loaded_with

    def _result(self, ids: Tensor) -> tuple[Tensor, str]:
        """Logits of what was written, in fp32."""
        if self.to == "training":
            return parity.logits(self.source.model, Parts(self.folder).read, ids), "training's model, block by block"
        written = open_source(self.folder)
        if self.to == "hf" and 4 * _count(self.specs) <= WHOLE_MODEL_BYTES:
            from .. import hf
            from ..hf.bundle import class_name

            name = class_name(self.source.model.head)
            loaded = getattr(hf, name).from_pretrained(self.folder, dtype=torch.float32).eval()
            with torch.inference_mode():
                return loaded(ids, use_cache=False).logits, name
        assert isinstance(written.weights, Files)
        return parity.logits(written.model, written.weights.read, ids), "training's model, block by block"

    def _write_hf(self, shards: list[list[str]], facts: dict[str, Any]) -> int:
        from ..hf import bundle

        source = self.source
        size = write_safetensors(self.folder, shards, self._read, _hf_name)
        bundle.write(self.folder)
        inner = self.folder / TRAINING
        inner.mkdir()
        ids: dict[str, Any] = {}
        if source.vocabulary is not None:
            tokenizer.keep(source.vocabulary, inner)
            causal = source.model.head == "causal_lm"
            problem = tokenizer.export(source.vocabulary, self.folder, self.mask, causal)
            self.warnings += [problem] if problem else []
            ids = {f"{kind}_token_id": source.vocabulary.tokenizer.eod_id for kind in ("bos", "eos", "pad")}
            ids |= {} if self.mask is None else {"mask_token_id": self.mask[1]}
        elif source.model.image is None:
            self.warnings.append(f"{source.path}: no tokenizer was found, so none is exported")
        config = {
            "architectures": [bundle.class_name(source.model.head)],
            "auto_map": bundle.auto_map(source.model.head),
            "model_type": "lightnet",
            **{
                name: value
                for name, value in source.model.model_dump(mode="json").items()
                if name not in ("image", "classes")
            },
            **self._heads_fields(),
            **ids,
            "dtype": _name(self.dtype),
            "tie_word_embeddings": source.model.tie_embeddings,
            "transformers_version": metadata.version("transformers"),
        }
        _write_json(self.folder / "config.json", config)
        if source.model.head == "causal_lm":
            generation = {**ids, "transformers_version": config["transformers_version"]}
            _write_json(self.folder / "generation_config.json", generation)
        if source.model.image is not None:
            _write_json(self.folder / "preprocessor_config.json", _image_processor(source.config))
        (inner / "config.yaml").write_text(dump_config(_published(source.config)), encoding="utf-8")
        _write_json(inner / "facts.json", facts)
        name = source.config.train.name or "LightNet"
        text = card(name, source.model, source.config, facts, _count(self.specs), config["dtype"])
        (self.folder / "README.md").write_text(text, encoding="utf-8")
        return size

    def _heads_fields(self) -> dict[str, Any]:
        """What of an image model or a classifier has Transformers' names alone, see ``LightNetConfig``."""
        model = self.source.model
        fields: dict[str, Any] = {}
        if model.image is not None:
            image = model.image
            fields |= {"image_size": list(image.size), "patch_size": image.patch, "num_channels": image.channels}
        count = model.image.classes if model.image is not None else model.classes
        if count is not None:
            names = [*self.source.classes[:count], *(f"LABEL_{n}" for n in range(len(self.source.classes), count))]
            fields["id2label"] = {str(number): name for number, name in enumerate(names)}
            fields["label2id"] = {name: number for number, name in enumerate(names)}
            fields |= {"problem_type": "regression"} if count == 1 and model.image is None else {}
        return fields

    def _write_training(self, shards: list[list[str]], facts: dict[str, Any]) -> int:
        size = write_training(self.folder, shards, self._read, self.specs)
        self._write_own()
        return size

    def _write_plain(self, shards: list[list[str]], facts: dict[str, Any]) -> int:
        size = write_safetensors(self.folder, shards, self._read, lambda name: name)
        self._write_own()
        classes = {"classes": self.source.classes} if self.source.classes else {}
        _write_json(self.folder / "facts.json", facts | classes)
        return size

    def _write_own(self) -> None:
        (self.folder / "config.yaml").write_text(dump_config(self.source.config), encoding="utf-8")
        if self.source.vocabulary is not None:
            tokenizer.keep(self.source.vocabulary, self.folder)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hf_name(name: str) -> str:
    found = to_hugging_face(name)
    if found is None:
        raise UserError(f"tensor '{name}' has no name in a Hugging Face folder; it is missing in convert/names.py")
    return found


def _published(config: RunConfig) -> RunConfig:
    """What of a run's configuration goes out with its weights: not the paths and hosts of whoever trained it."""
    tree = config.model_dump(mode="json")
    kept: dict[str, Any] = {name: tree[name] for name in ("model", "optimizer", "schedule")}
    kept |= {"masking": tree["masking"]} if config.model.head == "masked_lm" else {}
    kept |= {"augmentation": tree["augmentation"]} if config.model.head == "classifier" else {}
    private = ("output", "init_from", "resume", "stop_at_step")
    kept["train"] = {name: value for name, value in tree["train"].items() if name not in private}
    kept["data"] = {"sequence_length": config.data.sequence_length}
    return validate(kept, "config.yaml")


def _image_processor(config: RunConfig) -> dict[str, Any]:
    """preprocessor_config.json: validation's crop and numbers in training. Transformers' resizing keeps a square's sides as
    ours does; of images that are not square, a side may be a pixel off."""
    image, given = config.model.image, config.augmentation
    assert image is not None
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(max(image.size) / given.center_share)},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": image.size[0], "width": image.size[1]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(given.mean) * (image.channels if len(given.mean) == 1 else 1),
        "image_std": list(given.std) * (image.channels if len(given.std) == 1 else 1),
    }


def _count(specs: dict[str, ParameterSpec]) -> int:
    return sum(torch.Size(spec.shape).numel() for spec in specs.values())


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise UserError("--to hf needs transformers; install it with pip install 'lightnet-llm[hf]'") from None
