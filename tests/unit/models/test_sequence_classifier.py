"""The classifier of sentences: a row's logits, loss and gradients are those of the row alone, however it is padded."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightnet_llm.config import ModelConfig, RunConfig
from lightnet_llm.models import ForwardContext, SequenceClassifier, build_model, count_parameters, initialize
from lightnet_llm.models.dropout import DropoutKey
from lightnet_llm.models.sequence_classifier import mean_of_tokens, sentence_loss
from tests.unit.models.small import SMALL

FIELDS: dict[str, Any] = {
    **SMALL,
    "head": "sequence_classifier",
    "causal": False,
    "vocab_size": 40,
    "tpe_init_length": 8,
}
LENGTHS = (5, 1, 9, 3)


def small(classes: int = 3, **changes: Any) -> SequenceClassifier:
    """A model in float64 whose every part matters."""
    model = build_model(ModelConfig.model_validate({**FIELDS, "classes": classes, **changes})).double()
    assert isinstance(model, SequenceClassifier)
    initialize(model, 3)
    return model


def rows(left: bool = False, width: int = 9) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Padded rows with noise as padding, their mask, and each row alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (len(LENGTHS), width), generator=generator)
    places = torch.arange(width)
    mask = torch.stack([places >= width - n if left else places < n for n in LENGTHS])
    return ids, mask, [row[real] for row, real in zip(ids, mask, strict=True)]


def bounds_of(width: int) -> Tensor:
    """Each row's real tokens as one segment, and its padding, if any, as another."""
    ends = {end for i, n in enumerate(LENGTHS) for end in (i * width, i * width + n)}
    return torch.tensor(sorted({*ends, len(LENGTHS) * width}), dtype=torch.int32)


def test_the_head_alone_is_added_to_a_masked_model() -> None:
    base = {**FIELDS, "head": "masked_lm"}
    with torch.device("meta"):
        language = count_parameters(build_model(ModelConfig.model_validate(base)))
        names = dict(build_model(ModelConfig.model_validate(base)).named_parameters())
        model = build_model(ModelConfig.model_validate({**FIELDS, "classes": 3}))
    assert count_parameters(model) == language + 24 * 24 + 24 + 3 * 24 + 3
    added = {name for name, _ in model.named_parameters() if name not in names}
    assert all(name.startswith(SequenceClassifier.fresh) for name in added)
    assert set(names) <= {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("form", ["mask", "left", "segments", "wider"])
@pytest.mark.parametrize("changes", [{}, {"lrpe": False}, {"tpe": False}, {"norm": "layer", "decay": "independent"}])
def test_a_row_in_a_batch_is_the_row_alone(form: str, changes: dict[str, Any]) -> None:
    model = small(**changes)
    width = 13 if form == "wider" else 9
    ids, mask, alone = rows(form == "left", width)
    context = ForwardContext(cu_seqlens=bounds_of(width)) if form in ("segments", "wider") else None
    labels = torch.tensor([2, 0, 1, 1])
    found = model(ids, context, labels, mask)
    found.loss.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = torch.cat([model(row[None]).logits for row in alone])
    functional.cross_entropy(logits, labels).backward()
    torch.testing.assert_close(found.logits, logits, rtol=1e-9, atol=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-7, atol=1e-9, msg=name)


def test_the_mean_is_over_real_tokens_alone() -> None:
    tokens = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    tokens[0, 2] = float("nan")
    tokens.requires_grad_()
    found = mean_of_tokens(tokens, mask)
    torch.testing.assert_close(found[0], tokens[0, :2].mean(0))
    torch.testing.assert_close(found[2], tokens[2].mean(0))
    assert (found[1] == 0).all()
    found.sum().backward()
    assert torch.isfinite(tokens.grad).all() and (tokens.grad[~mask] == 0).all()
    half = torch.full((1, 3000, 1), 0.1, dtype=torch.bfloat16)  # a sum in bf16 stands still long before
    torch.testing.assert_close(mean_of_tokens(half, None).float(), half[:, 0].float())
    torch.testing.assert_close(mean_of_tokens(half, torch.ones(1, 3000).bool()).float(), half[:, 0].float())


@pytest.mark.parametrize("classes", [1, 3])
def test_micro_batches_of_unlike_counts_add_up(classes: int) -> None:
    logits = torch.randn(10, classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels: Tensor = torch.arange(10) % 3
    if classes == 1:
        labels = torch.linspace(-2, 5, 10, dtype=torch.float64)
        whole = functional.mse_loss(logits[:, 0], labels)
    else:
        whole = functional.cross_entropy(logits, labels)
    torch.testing.assert_close(sentence_loss(logits, labels), whole)
    counts = torch.arange(10) < 9  # 9 that count and 1 that does not; and the other way round
    nothing = torch.tensor(float("nan") if classes == 1 else -1, dtype=labels.dtype)
    parts = [sentence_loss(logits, torch.where(which, labels, nothing)) for which in (counts, ~counts)]
    torch.testing.assert_close(sum(parts), whole)
    none = sentence_loss(logits.requires_grad_(), nothing.expand(10))
    none.backward()
    assert none == 0 and (logits.grad == 0).all()


def test_dropout_of_a_row_does_not_depend_on_its_batch_or_padding() -> None:
    model = small(dropout=0.2).train()
    ids, mask, _ = rows()
    samples = torch.tensor([7, 8, 2**33 + 5, 1])
    whole = ForwardContext(cu_seqlens=bounds_of(9), dropout=DropoutKey(1, 0, samples, 9))
    out = model(ids, whole, mask=mask).logits
    for i, n in enumerate(LENGTHS):
        key = DropoutKey(1, 0, samples[i : i + 1], n)
        torch.testing.assert_close(model(ids[i : i + 1, :n], ForwardContext(dropout=key)).logits, out[i : i + 1])
    assert (out - model(ids, mask=mask).logits).abs().max() > 1e-3
    silent = small(dropout=0.2)
    torch.nn.init.zeros_(silent.head.output.bias)
    silent.head.dropout = 0.0
    assert (silent(ids, whole, mask=mask).logits - out).abs().max() > 1e-3  # the head's own


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": None}, "classes is missing"),
        ({"head": "masked_lm"}, "classes is not for head: masked_lm"),
        ({"causal": True}, "needs causal: false"),
        ({"vocab_size": 0}, "vocab_size is missing"),
        ({"image": {"size": [8, 8], "patch": 2, "classes": 5}}, "image is not for head: sequence_classifier"),
    ],
)
def test_configurations_that_make_no_model(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate({**FIELDS, "classes": 2, **changes})


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tensor": 2, "tensor_sequence_parallel": True}, "tensor_sequence_parallel splits rows of one length"),
        ({"pipeline": 2, "pipeline_partition": "time"}, "time measures language models; use parameters or uniform"),
    ],
)
def test_layouts_that_it_has_not(parallel: dict[str, Any], words: str) -> None:
    tree = {"model": {**FIELDS, "classes": 2}, "train": {"steps": 1}}
    for legal in ({"tensor": 2, "zero_stage": 3}, {"sequence": 2, "pipeline": 2}):
        RunConfig.model_validate({**tree, "parallel": legal})
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({**tree, "parallel": parallel})
