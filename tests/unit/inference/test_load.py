"""Checkpoints of any layout, and what is wrong with them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lightnet_data.tokenizer import Tokenizer
from safetensors.torch import save_file

from lightnet_llm.checkpoint import store
from lightnet_llm.checkpoint.weights import load_weights
from lightnet_llm.config import dump_config
from lightnet_llm.errors import UserError
from lightnet_llm.inference import Loaded, load_model, read
from lightnet_llm.inference.load import read_config, require_tokenizer
from lightnet_llm.models.parameters import shard, spec_of

from . import toy

IDS = torch.tensor([[1, 300, 301, 302]])


def resave(run: Path, step: int, tensor: int, stages: int) -> Path:
    """The newest checkpoint once more, as ``tensor`` ranks and ``stages`` pipeline stages would have written it."""
    source = store.resolve(run, print)
    loaded = load_model(source, "cpu")
    weights = load_weights(source)
    folder = store.begin(run / "checkpoints", step)
    (folder / "weights").mkdir()
    shutil.copyfile(source / "config.yaml", folder / "config.yaml")
    names = list(dict(loaded.model.named_parameters()))
    for stage in range(stages):
        for rank in range(tensor):
            parts, joins = {}, {}
            for name in names[stage::stages]:
                spec = spec_of(loaded.model.get_parameter(name))
                local = list(spec.shape)
                if spec.partition_dim is not None:  # padded up where the ranks do not divide it
                    local[spec.partition_dim] = -(-local[spec.partition_dim] // tensor)
                parts[name] = shard(weights[name], spec, tuple(local), rank).contiguous().clone()
                joins[name] = {"dim": spec.partition_dim, "shape": list(spec.shape)}
            facts = {"joins": json.dumps(joins), "tensor_rank": str(rank), "tensor_size": str(tensor)}
            save_file(parts, folder / "weights" / f"stage{stage:03d}_tensor{rank:03d}.safetensors", facts)
    return store.commit(run / "checkpoints", step, {"state": {"step": step}})


@pytest.fixture
def mine(run: Path, tmp_path: Path) -> Path:
    """A copy of the run folder that may be broken."""
    return toy.copy(run, tmp_path / "run")


def test_run_folder_step_folder_and_checkpoints_folder_are_the_same(run: Path, loaded: Loaded) -> None:
    wanted = read(loaded.model, IDS).logits
    for path in (run / "checkpoints", run / "checkpoints" / "step_00000060", str(run)):
        again = load_model(path, "cpu")
        assert again.folder == loaded.folder and torch.equal(read(again.model, IDS).logits, wanted)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize(("tensor", "stages"), [(3, 1), (1, 2), (3, 3)])
def test_layout_does_not_matter(mine: Path, loaded: Loaded, tensor: int, stages: int) -> None:
    folder = resave(mine, 61, tensor, stages)
    again = load_model(mine, "cpu")
    assert again.folder == folder
    assert torch.equal(read(again.model, IDS).logits, read(loaded.model, IDS).logits)


def test_bf16_keeps_what_training_keeps_in_fp32(run: Path, loaded: Loaded) -> None:
    model = load_model(run, "cpu", "bf16").model
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["embedding.weight"] == kinds["layers.0.attention.qkv.weight"] == torch.bfloat16
    assert kinds["tpe.raw"] == kinds["tpe.beta"] == kinds["layers.1.attention.lrpe.theta"] == torch.float32
    difference = read(model, IDS).logits.float() - read(loaded.model, IDS).logits
    assert 0 < float(difference.abs().max()) < 0.3
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_default_dtype_on_the_cpu_is_fp32_for_a_bf16_run(mine: Path) -> None:
    folder = store.resolve(mine, print)
    config = read_config(folder)
    config.train.precision = "bf16"
    (folder / "config.yaml").write_text(dump_config(config))
    rewrite_manifest(folder)
    assert load_model(mine, "cpu").model.embedding.weight.dtype == torch.float32


def rewrite_manifest(folder: Path) -> None:
    """Make the manifest fit files that a test has changed."""
    target = store.partial_folder(folder.parent, 60)
    folder.rename(target)
    (target / store.MANIFEST).unlink()
    store.commit(folder.parent, 60, {"state": {"step": 60}})


def test_tokenizer_comes_from_the_run_or_from_its_data(mine: Path, loaded: Loaded) -> None:
    (mine / "tokenizer.model").unlink()
    again = load_model(mine, "cpu")
    assert again.tokenizer is not None and loaded.tokenizer is not None
    assert again.tokenizer.fingerprint == loaded.tokenizer.fingerprint


def test_end_of_document_token_is_the_one_of_the_data(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run folder holds a bare tokenizer file; which of its tokens ends a document stands in the manifest."""
    loaded = load_model(mine, "cpu")
    facts = {"eod_id": 0, "fingerprint": require_tokenizer(loaded).fingerprint}
    monkeypatch.setattr("lightnet_llm.inference.load.manifest.load", lambda folder: {"tokenizer": facts})
    monkeypatch.setattr("lightnet_data.tokenizer._SentencePiece.__init__", _any_token_ends)
    assert require_tokenizer(load_model(mine, "cpu")).eod_id == 0
    facts["fingerprint"] = "of another tokenizer"
    assert require_tokenizer(load_model(mine, "cpu")).eod_id == 1


def _any_token_ends(self: object, model: bytes, eod: object, name: str) -> None:
    self.vocab_size, self.eod_id = 330, eod if isinstance(eod, int) else 1  # type: ignore[attr-defined]
    self.token = lambda token: str(token)  # type: ignore[attr-defined]


def error_of(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(path, "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert "no such checkpoint" in error_of(tmp_path / "nothing")
    assert "holds no whole checkpoint" in error_of(tmp_path)
    (tmp_path / "step_00000007").mkdir()
    assert "damaged checkpoint" in error_of(tmp_path / "step_00000007")


def test_damaged_newest_checkpoint_is_passed_over(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = resave(mine, 61, 1, 1)
    file = next((bad / "weights").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    assert load_model(mine, "cpu").folder.name == "step_00000060"
    assert "warning: passing over a damaged checkpoint" in capsys.readouterr().err
    assert "damaged checkpoint" in error_of(bad)


def test_configuration_of_another_model(mine: Path) -> None:
    folder = store.resolve(mine, print)
    text = (folder / "config.yaml").read_text()
    for change, message in (
        (("layers: 2", "layers: 3"), "has no tensor 'layers.2."),
        (("layers: 2", "layers: 1"), "has no place in this model"),
        (("glu_width: 64", "glu_width: 65"), "is [64, 48], this model needs [65, 48]"),
        (("causal: true", "causal: false"), "bidirectional"),
        (("heads: 3", "heads: 5"), "must divide width"),
        (("model:", "model: ["), "not valid YAML"),
    ):
        (folder / "config.yaml").write_text(text.replace(*change))
        rewrite_manifest(folder)
        assert message in error_of(folder), message


def test_no_tokenizer(mine: Path) -> None:
    folder = store.resolve(mine, print)
    (mine / "tokenizer.model").unlink()
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("\n  path: ", "\n  path: /nowhere"))
    rewrite_manifest(folder)
    loaded = load_model(mine, "cpu")
    assert loaded.tokenizer is None
    with pytest.raises(UserError, match=r"no tokenizer\.model or tokenizer\.json there or in data\.path \(/nowhere"):
        require_tokenizer(loaded)


def test_tokenizer_of_another_model(mine: Path) -> None:
    words = toy.documents(300, seed=9)
    larger = Tokenizer.train(words, 340)
    larger.save(mine)
    assert "has 340 ids, the model of" in error_of(mine)


def test_a_damaged_tokenizer_is_said_with_a_way_out(mine: Path) -> None:
    (mine / "tokenizer.model").write_bytes(b"x")
    assert "tokenizer.model: neither" in error_of(
        mine
    ) and "; put the tokenizer of its training data there" in error_of(mine)
