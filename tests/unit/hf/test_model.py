"""Configuration, saving and loading, the loss, training under the Trainer, torch.compile."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from lightnet_llm import LightNetConfig, LightNetForCausalLM
from lightnet_llm.config.model import ModelConfig
from lightnet_llm.convert.source import specs_of

from .conftest import SMALL, build


def rows(count: int = 32) -> list[dict[str, list[int]]]:
    """Arithmetic sequences modulo 50 of unlike lengths, padded on the right."""
    drawn = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        length, start = (int(torch.randint(low, high, (), generator=drawn)) for low, high in ((8, 24), (1, 40)))
        ids, pad = [(start + 3 * i) % 50 + 1 for i in range(length)], 24 - length
        made.append(
            {
                "input_ids": ids + [0] * pad,
                "attention_mask": [1] * length + [0] * pad,
                "labels": ids + [-100] * pad,
            }
        )
    return made


def batch(count: int = 4) -> dict[str, torch.Tensor]:
    made = rows(count)
    return {name: torch.tensor([row[name] for row in made]) for name in made[0]}


def test_fields_and_defaults_are_those_of_training() -> None:
    config = LightNetConfig()
    for name, field in ModelConfig.model_fields.items():
        if name in ("image", "classes"):  # under Transformers' names
            continue
        assert hasattr(config, name), name
        if not field.is_required() and name != "vocab_size":
            assert getattr(config, name) == field.default, name
    named = LightNetConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=4, intermediate_size=100)
    assert (named.width, named.layers, named.heads, named.glu_width, named.head_width) == (96, 2, 4, 100, 24)
    with pytest.raises(ValueError, match="heads 5 must divide width 64"):
        LightNetConfig(width=64, heads=5)


@pytest.mark.parametrize("fields", [{"tie_embeddings": True}, {"norm": "layer"}, {"lrpe_learnable": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded(fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(**fields).to(dtype)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(loaded) is LightNetForCausalLM and type(AutoConfig.from_pretrained(tmp_path)) is LightNetConfig
    mine, others = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        kept = "theta" in name or "tpe" in name
        assert others[name].dtype == (torch.float32 if kept else dtype)
        assert torch.equal(others[name], value.to(others[name].dtype)), name
    bare = AutoModel.from_pretrained(tmp_path, dtype=dtype).eval()
    ids = batch()["input_ids"]
    with torch.inference_mode():
        hidden = bare(ids).last_hidden_state
        head = loaded.model.embedding if loaded.model.head is None else loaded.model.head
        assert torch.equal(hidden @ head.weight.T, loaded(ids).logits)


def test_initial_values_are_training_s() -> None:
    torch.manual_seed(1)
    model = LightNetForCausalLM(LightNetConfig(**{**SMALL, "width": 128, "layers": 4}))
    for name, spec in specs_of(ModelConfig(**{**SMALL, "width": 128, "layers": 4})).items():
        value, drawn = model.model.get_parameter(name), spec.init(torch.Generator().manual_seed(5), spec.shape)
        assert value.shape == drawn.shape
        assert abs(float(value.std() / drawn.std().clamp_min(1e-9)) - 1) < 0.1, name


@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": True}])
def test_loss_is_transformers_own(fields: dict[str, Any]) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    model, given = build(**fields), batch()
    output = model(**given)
    wanted = ForCausalLMLoss(output.logits, given["labels"], 251)
    torch.testing.assert_close(output.loss, wanted)
    torch.testing.assert_close(
        model(**given, num_items_in_batch=7).loss * 7, wanted * (given["labels"][:, 1:] >= 0).sum()
    )
    packed = torch.cat(
        [row[keep.bool()] for row, keep in zip(given["input_ids"], given["attention_mask"], strict=True)]
    )
    bounds = torch.nn.functional.pad(given["attention_mask"].sum(1).cumsum(0), (1, 0))
    labels = packed.clone()
    labels[bounds[:-1]] = -100
    torch.testing.assert_close(model(packed[None], cu_seqlens=bounds, labels=labels[None]).loss, wanted)
    model.train()
    trained = model(**given)
    assert trained.logits is None
    torch.testing.assert_close(trained.loss, wanted)


@pytest.mark.parametrize("recompute", [False, True])
def test_fifty_steps_under_the_trainer(recompute: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LightNetForCausalLM(LightNetConfig(**{**SMALL, "layers": 2, "vocab_size": 64, "dropout": 0.1}))
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=50,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=25,
        save_strategy="steps",
        save_steps=50,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=recompute,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows(64), eval_dataset=rows(8))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    held = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[0] > 4 * losses[-1] and held[1] < held[0] < losses[0]
    assert all(block.recompute is recompute for block in model.model.layers)
    loaded = LightNetForCausalLM.from_pretrained(tmp_path / "checkpoint-50").eval()
    ids = batch()["input_ids"]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_recomputed_gradients_are_the_same() -> None:
    gradients = []
    for recompute in (False, True):
        model = build(dropout=0.3).train()
        if recompute:
            model.gradient_checkpointing_enable()
        torch.manual_seed(9)
        model(**batch()).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def compiled(model: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import torch._dynamo.utils

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # commands set it, and so for the whole process
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(layers=1), batch(2)["input_ids"]
    with torch.no_grad():
        fast = compiled(model, backend, monkeypatch)(ids, use_cache=False).logits
        torch.testing.assert_close(fast, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_torch_compile_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = build(layers=2).train(), batch()
    del given["attention_mask"]
    given["labels"] = given["labels"].clamp_min(0)
    results = []
    for call in (model, compiled(model, "inductor", monkeypatch)):
        model.zero_grad()
        loss = call(**given).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_importing_the_library_stays_light() -> None:
    code = "import lightnet_llm, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    import lightnet_llm

    assert "LightNetForCausalLM" in dir(lightnet_llm)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        lightnet_llm.Nonsense  # noqa: B018
