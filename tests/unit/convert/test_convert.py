"""Conversions of random weights: bytes, padding, names, memory of what was there, and refusals of bad input."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lightnet_llm.checkpoint import store
from lightnet_llm.cli import main
from lightnet_llm.convert import convert, open_source
from lightnet_llm.convert.names import TABLE, to_hugging_face, to_training
from lightnet_llm.convert.source import specs_of
from lightnet_llm.errors import UserError
from lightnet_llm.inference.load import load_model

from .toy import HEADS, TEXT, checkpoint, config_of, exported, give_tokenizer

CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "tp2": (2, 1, {}),  # GLU 45 is padded to 46
    "tp4_pp2_untied": (4, 2, {"heads": 4, "tie_embeddings": False, "norm": "layer"}),
    "seven": (4, 1, {"heads": 4, "vocab_size": 7}),  # padded to 512
    "bare": (1, 2, {"tpe": False, "lrpe": False, "norm": "rms"}),
    "no_share": (2, 1, {"decay": "independent", "decay_rank": 4}),
}


QUICK = (("tp4_pp2_untied", "bf16"), ("seven", "fp32"), ("bare", "fp32"))
ALL = [(name, precision) for name in CASES for precision in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("name", "precision"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL]
)
def test_there_and_back_is_bit_equal(name: str, precision: str, tmp_path: Path) -> None:
    tensor, pipeline, fields = CASES[name]
    config = config_of(precision, **fields)
    folder = checkpoint(tmp_path / "run", config, tensor, pipeline)
    report = convert(tmp_path / "run", tmp_path / "hf", "hf")
    assert report.difference == 0 and report.rounding == 0 and report.loaded_with == "LightNetForCausalLM"
    convert(tmp_path / "hf", tmp_path / "back", "training")
    convert(tmp_path / "back", tmp_path / "hf2", "hf")
    convert(tmp_path / "hf2", tmp_path / "plain", "safetensors")
    convert(tmp_path / "plain", tmp_path / "hf3", "hf")
    files = [(tmp_path / place / "model.safetensors").read_bytes() for place in ("hf", "hf2", "hf3")]
    assert files[0] == files[1] == files[2]
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    specs = specs_of(config.model)
    assert set(stored) == {to_hugging_face(parameter) for parameter in specs}  # tied weights once
    for parameter, spec in specs.items():
        tensors = [stored[str(to_hugging_face(parameter))], open_source(tmp_path / "back").weights.read(parameter)]
        for found in tensors:
            assert tuple(found.shape) == spec.shape  # without padding
            assert found.dtype == (torch.bfloat16 if precision == "bf16" and not spec.keep_fp32 else torch.float32)
            assert torch.equal(found, open_source(folder).weights.read(parameter))
    # The checkpoint made of it is one for every reader of checkpoints, and pads as it needs.
    model, ids = load_model(tmp_path / "back").model, torch.arange(6)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, load_model(folder).model(ids).logits)


def test_the_table_names_every_parameter_both_ways() -> None:
    seen = set()
    for fields in [*(fields for _, _, fields in CASES.values()), *HEADS.values()]:
        for name in specs_of(config_of(**fields).model):
            other = to_hugging_face(name)
            assert other is not None and to_training(other) == name
            seen.add(".".join("*" if part.isdigit() else part for part in name.split(".")))
    assert seen == {here for here, _ in TABLE}
    assert to_hugging_face("layers.0.attention.bias") is None and to_training("lm_head.weight") is None


def test_shards_and_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightnet_llm.convert import target

    checkpoint(tmp_path / "run", config_of())
    convert(tmp_path / "run", tmp_path / "one", "hf")
    monkeypatch.setattr(target, "SHARD_BYTES", 20_000)
    report = convert(tmp_path / "run", tmp_path / "many", "hf")
    files = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert report.files == len(files) > 3
    assert all(sum(x.nbytes for x in load_file(file).values()) <= 20_000 or len(load_file(file)) == 1 for file in files)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.bytes
    merged = {name: load_file(tmp_path / "many" / file)[name] for name, file in index["weight_map"].items()}
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert merged.keys() == whole.keys() and all(torch.equal(merged[name], whole[name]) for name in whole)
    convert(tmp_path / "many", tmp_path / "back", "training")
    assert len(list((tmp_path / "back" / "weights").iterdir())) == len(files)
    convert(tmp_path / "back", tmp_path / "again", "safetensors")
    (tmp_path / "many" / files[1].name).unlink()
    with pytest.raises(UserError, match="half a checkpoint"):
        open_source(tmp_path / "many")


@pytest.mark.parametrize("dtype", ["bfloat16", "fp16", "float32"])
def test_dtype(dtype: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", config_of())
    report = convert(tmp_path / "run", tmp_path / "hf", "hf", dtype=dtype)
    assert report.difference == 0 and (0 < report.rounding < 0.02 or dtype == "float32")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    kinds = {str(value.dtype) for name, value in stored.items() if "theta" not in name and "tpe" not in name}
    assert kinds == {"torch." + {"fp16": "float16"}.get(dtype, dtype)}
    assert stored["model.tpe.raw"].dtype == torch.float32


def test_average(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folders = [checkpoint(run, config_of(), tensor, step=step, seed=step) for step, tensor in ((1, 1), (2, 2), (3, 1))]
    report = convert(run, tmp_path / "two", "hf", average="last:2")
    assert report.source == [str(folder) for folder in folders[1:]]
    convert(run, tmp_path / "all", "safetensors", average="all")
    for count, place in ((2, "two"), (3, "all")):
        averaged = open_source(tmp_path / place).weights
        parts = [open_source(folder).weights for folder in folders[-count:]]
        for name in averaged.shapes:
            mean = torch.stack([part.read(name).double() for part in parts]).mean(0).float()
            torch.testing.assert_close(averaged.read(name), mean, rtol=1e-7, atol=1e-9)
    assert "average of steps" in (tmp_path / "two" / "README.md").read_text()
    shutil.rmtree(folders[1] / "weights")  # damaged: passed over
    assert convert(run, tmp_path / "rest", "hf", average="last:2").source == [str(folders[0]), str(folders[2])]
    for which, words in (("last:3", "2 whole checkpoints"), ("last:0", "last:K"), ("best", "last:K")):
        with pytest.raises(UserError, match=words):
            convert(run, tmp_path / "no", "hf", average=which)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "huggingface"])
def test_tokenizers_read_alike(kind: str, tmp_path: Path) -> None:
    from lightnet_data.tokenizer import Tokenizer
    from lightnet_data.training import fit
    from transformers import AutoTokenizer

    run = tmp_path / "run"
    checkpoint(run, config_of(vocab_size=512))
    if kind == "huggingface":
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>"]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
        made.train_from_iterator([TEXT * 20], trainer)
        own = Tokenizer(made.to_str().encode())
    else:
        from pydoc_data.topics import topics

        own = Tokenizer(fit([*"".join(topics[key] for key in sorted(topics))[:40000].splitlines(True)], 400, kind))
    own.save(run)
    report = convert(run, tmp_path / "hf", "hf")
    assert len(report.warnings) == (kind == "unigram")  # the library cannot help seeing special tokens in a text
    spelt = "" if kind == "unigram" else f"{own.eod_token} </s><unk><0x41>"
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    for text in (
        TEXT,
        "  two  spaces,\ta tab\n\n",
        f"naïve 日本語 🙂 {spelt}",
        "",
        "\x00\ufeff",
        "of rain " * 99,
    ):
        ids = theirs(text).input_ids
        assert ids == [own.eod_id, *own.encode(text)]  # exactly one BOS
        assert theirs.decode(ids, skip_special_tokens=True) == own.decode(own.encode(text)) == text
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == own.eod_id
    assert theirs(["a", TEXT], padding=True).attention_mask[0][0] == 0  # on the left
    convert(tmp_path / "hf", tmp_path / "back", "training")
    kept = load_model(tmp_path / "back").tokenizer
    assert kept is not None and kept.fingerprint == own.fingerprint and kept.eod_id == own.eod_id


def test_card_and_facts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint(run, config_of())
    (run / "metrics.jsonl").write_text(
        '{"step": 7, "loss": 1.5}\n{"step": 7, "validation": {"held": {"loss": 2.25}}}\n'
    )
    convert(run, tmp_path / "hf", "hf")
    text = (tmp_path / "hf" / "README.md").read_text()
    assert "library_name: transformers" in text and "| step | 7 |" in text and "| training loss | 1.5 |" in text
    assert "held 2.25" in text and "| tokens | 1,234 |" in text and "trust_remote_code" in text
    convert(tmp_path / "hf", tmp_path / "back", "training")
    convert(tmp_path / "back", tmp_path / "again", "hf")
    assert (tmp_path / "again" / "README.md").read_text() == text
    assert str(tmp_path) not in "".join(
        p.read_text() for p in (tmp_path / "hf").rglob("*.*") if p.suffix != ".safetensors"
    )


def _edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        if path.suffix == ".json":
            tree = json.loads(path.read_text())
            change(tree)
            path.write_text(json.dumps(tree))
        else:
            tree = load_file(path)
            change(tree)
            save_file(tree, path, {"format": "pt"})

    return edit


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _broken(folder: Path) -> None:
    (folder / "config.json").write_text("{")


WEIGHT = "model.layers.1.glu.up.weight"
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickle": (_pickle, "--trust-pickle"),
    "missing": (_edit("model.safetensors", lambda t: t.pop(WEIGHT)), "no tensor 'layers.1.glu.up.weight'"),
    "extra": (
        _edit("model.safetensors", lambda t: t.update({"model.layers.7.glu.up.weight": t[WEIGHT] + 0})),
        "no place",
    ),
    "foreign": (_edit("model.safetensors", lambda t: t.update({"lm_head.weight": t[WEIGHT] + 0})), "lm_head.weight"),
    "misshapen": (
        _edit("model.safetensors", lambda t: t.update({WEIGHT: t[WEIGHT][:-1]})),
        r"is \[44, 32\].*needs \[45, 32\]",
    ),
    "integers": (
        _edit("model.safetensors", lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.int8)})),
        "holds I8 numbers",
    ),
    "double": (_edit("model.safetensors", lambda t: t.update({WEIGHT: t[WEIGHT].double()})), "holds F64 numbers"),
    "architecture": (_edit("config.json", lambda t: t.update(model_type="llama")), "another architecture"),
    "labels": (_edit("config.json", lambda t: t.update(id2label=["a", "b"])), "does not name its classes"),
    "gap": (_edit("config.json", lambda t: t.update(id2label={"0": "a", "2": "b"})), "does not name its classes"),
    "label_number": (_edit("config.json", lambda t: t.update(id2label=3)), "does not name its classes"),
    "no_type": (
        _edit("config.json", lambda t: t.update(model_type=None, architectures=[3, "X"])),
        r"another architecture \(3, X\)",
    ),
    "config": (_edit("config.json", lambda t: t.update(heads=5)), "must divide.*; copy the folder again"),
    "pickled_shards": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model-00001-of-00002.bin"),
        "pickled shards, which are not read; ask for safetensors",
    ),
    "tokenizer_damaged": (
        lambda f: (f / "training" / "tokenizer.model").write_bytes(b"x"),
        "nor a Hugging Face.*; copy the folder again",
    ),
    "cut": (_cut, "copy it again"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "no_json": (_broken, "not readable"),
    "tokenizer": (lambda f: give_tokenizer(f / "training", 400), "has 400 ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders(name: str, tmp_path: Path) -> None:
    damage, words = BAD[name]
    folder = exported(tmp_path / "hf")
    damage(folder)
    with pytest.raises(UserError, match=words) as error:
        convert(folder, tmp_path / "out", "training")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]


def test_trusted_pickles_hold_weights_only(tmp_path: Path) -> None:
    folder = exported(tmp_path / "hf")
    wanted = (folder / "model.safetensors").read_bytes()
    _pickle(folder)
    convert(folder, tmp_path / "again", "hf", trust_pickle=True)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == wanted
    integers = {"model.embedding.weight": torch.zeros(2, dtype=torch.int32)}
    for held, words in (
        ({"model.embedding.weight": _Evil()}, "more than weights; ask for safetensors"),
        ([torch.zeros(2)], "something else than tensors by name"),
        ({"model": {"model.embedding.weight": torch.zeros(2)}}, "something else than tensors by name"),
        ({"step": 3}, "something else than tensors by name"),
        (integers, "holds int32 numbers"),
    ):
        torch.save(held, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match=words) as error:
            convert(folder, tmp_path / "no", "hf", trust_pickle=True)
        assert "\n" not in str(error.value) and "weights_only" not in str(error.value)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        convert(folder, tmp_path / "no", "hf", trust_pickle=True)


def test_two_conversions_to_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is refused while the first writes, and when it has written; the first is whole."""
    module = importlib.import_module("lightnet_llm.convert.convert")
    checkpoint(tmp_path / "run", config_of())
    original, refused = module._Conversion.run, []

    def run(self: Any) -> Any:
        with pytest.raises(UserError, match="another conversion writes it"):
            convert(tmp_path / "run", tmp_path / "hf", "hf")
        refused.append(1)
        return original(self)

    monkeypatch.setattr(module._Conversion, "run", run)
    convert(tmp_path / "run", tmp_path / "hf", "hf")
    assert refused == [1] and sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]
    with pytest.raises(UserError, match="has just made it"), module._alone(tmp_path / "hf"):
        raise AssertionError


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("run!",)


def test_bad_checkpoints_and_arguments(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = checkpoint(run, config_of("bf16"), tensor=2)
    (folder / "engine").mkdir()
    with pytest.raises(UserError, match="--trust-pickle"):
        convert(run, tmp_path / "out", "hf", dtype="float32")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for arguments, words in (
        ((run, tmp_path / "out", "onnx"), "must be one of hf"),
        ((run, run, "hf"), "never overwritten"),
        ((run, tmp_path / "link", "hf"), "link: exists and is never overwritten"),
        ((run, tmp_path / "a" / "b", "hf"), "does not exist"),
        ((run, Path("/proc/out"), "hf"), "/proc/out: cannot be written"),
        ((tmp_path / "none", tmp_path / "out", "hf"), "does not exist"),
        ((tmp_path, tmp_path / "out", "hf"), "no whole checkpoint"),
        ((folder / "config.yaml", tmp_path / "out", "hf"), "is a file"),
    ):
        with pytest.raises(UserError, match=words):
            convert(*arguments)
    with pytest.raises(UserError, match="did you mean 'float16'"):
        convert(run, tmp_path / "out", "hf", dtype="flot16")
    next((folder / "weights").glob("*tensor001*")).unlink()
    with pytest.raises(UserError, match="damaged checkpoint"):
        convert(folder, tmp_path / "out", "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run"]


def test_the_gate_sees_a_wrong_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lightnet_llm.convert.convert")
    checkpoint(tmp_path / "run", config_of())
    original = module.write_safetensors

    def swapped(folder: Path, shards: Any, read: Any, rename: Any) -> int:
        other = {"layers.0.glu.up.weight": "layers.0.glu.gate.weight"}
        return original(folder, shards, lambda name: read(other.get(name, name)), rename)

    monkeypatch.setattr(module, "write_safetensors", swapped)
    with pytest.raises(UserError, match="logits differ"):
        convert(tmp_path / "run", tmp_path / "out", "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("factor", "words"), [(1e6, "not finite in float16; use bfloat16"), (float("nan"), "diverged")]
)
def test_logits_that_are_not_finite(factor: float, words: str, tmp_path: Path) -> None:
    """By a dtype that cannot hold the weights, or in the weights as trained."""
    folder = exported(tmp_path / "hf")
    _edit("model.safetensors", lambda tensors: tensors[WEIGHT].mul_(factor))(folder)
    with pytest.raises(UserError, match=words):
        convert(folder, tmp_path / "out", "hf", dtype="float16")
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name]


def test_command_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint(run, config_of())
    give_tokenizer(run)
    done = CliRunner().invoke(main, ["convert", str(run), str(tmp_path / "hf"), "--to", "hf", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["difference"] == 0 and facts["to"] == "hf" and facts["tokens"] == 256
    assert facts["tokenizer"] == str(run / "tokenizer.model")
    with pytest.raises(
        UserError, match=r"hf: is no checkpoint.*lightnet convert .*hf NEW --to training"
    ):  # as init_from
        store.resolve(tmp_path / "hf", print)
    done = CliRunner().invoke(main, ["convert", str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "training"])
    assert done.exit_code == 0 and "largest difference 0.00e+00" in done.output
    done = CliRunner().invoke(main, ["convert", str(run), str(tmp_path / "hf"), "--to", "hf"])
    assert done.exit_code == 1 and "never overwritten" in done.output
