"""Image models and the bidirectional language model: counts, and what they must not depend on."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightnet_llm.config import ModelConfig
from lightnet_llm.models import CausalLM, Denoiser, ForwardContext, ImageClassifier, count_parameters, initialize
from lightnet_llm.models.backbone import grid_coordinates
from lightnet_llm.models.denoiser import guided
from lightnet_llm.models.dropout import DropoutKey
from lightnet_llm.parallel.sequence import training_context

PHOTO = {"size": [224, 224], "patch": 16, "classes": 1000}
LATENT = {"size": [32, 32], "patch": 2, "channels": 4, "classes": 1000}
CLASSIFIER = {"head": "classifier", "causal": False, "axes": 2, "norm": "layer", "image": PHOTO, "tpe_init_length": 14}
DENOISER = {"head": "denoiser", "causal": False, "axes": 2, "norm": "layer", "image": LATENT, "tpe_init_length": 16}
MASKED = {"head": "masked_lm", "causal": False, "vocab_size": 32768}
# Layers, width, heads, GLU; the count, without TPE and without LRPE (model-spec 6).
COUNTS: list[tuple[dict[str, Any], tuple[int, int, int, int], int, int | None, int | None]] = [
    (CLASSIFIER, (12, 192, 6, 512), 6_009_640, 5_960_488, 6_007_336),
    (CLASSIFIER, (12, 384, 16, 1024), 22_635_112, 22_536_808, 22_630_504),
    (CLASSIFIER, (12, 768, 16, 2048), 87_736_552, 87_539_944, 87_727_336),
    (DENOISER, (18, 384, 6, 1024), 33_532_448, 33_434_144, None),
    (DENOISER, (18, 768, 6, 2048), 131_060_768, 130_864_160, None),
    (DENOISER, (36, 1024, 16, 2816), 470_050_848, 469_788_704, None),
    (DENOISER, (42, 1152, 16, 3072), 678_523_424, 678_228_512, None),
    (MASKED, (16, 768, 12, 2048), 140_095_488, None, None),
]
MODELS = {"classifier": ImageClassifier, "denoiser": Denoiser, "masked_lm": CausalLM}


@pytest.mark.parametrize(("head", "sizes", "whole", "no_tpe", "no_lrpe"), COUNTS)
def test_count(
    head: dict[str, Any], sizes: tuple[int, ...], whole: int, no_tpe: int | None, no_lrpe: int | None
) -> None:
    fields = {**head, **dict(zip(("layers", "width", "heads", "glu_width"), sizes, strict=True))}
    for changes, count in (({}, whole), ({"tpe": False}, no_tpe), ({"lrpe": False}, no_lrpe)):
        if count is not None:
            config = ModelConfig.model_validate({**fields, **changes})
            with torch.device("meta"):
                assert count_parameters(MODELS[config.head](config)) == count


SMALL = {"layers": 2, "width": 24, "heads": 3, "glu_width": 20, "gate_rank": 5, "tpe_rank": 4, "initializer_std": 0.3}


def small(head: dict[str, Any], **changes: Any) -> Any:
    """A model in float64 whose every part matters."""
    image = (
        {"image": {"size": [8, 8], "patch": 2, "channels": 3, "classes": 5}} if "image" in head else {"vocab_size": 40}
    )
    config = ModelConfig.model_validate({**head, **SMALL, **image, "tpe_init_length": 4, **changes})
    model = MODELS[config.head](config).double()
    initialize(model, 3)
    if config.head == "denoiser":
        torch.nn.init.normal_(model.head.weight, std=0.3)  # it begins at zero
    return model


def photos(count: int, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [(8, 8), (4, 12), (2, 2), (14, 6)])
def test_images_of_any_size_are_classified_alone_or_together(size: tuple[int, int]) -> None:
    model = small(CLASSIFIER)
    images = photos(3, *size)
    together = model(images).logits
    assert torch.isfinite(together).all() and together.shape == (3, 5)
    torch.testing.assert_close(torch.cat([model(images[i : i + 1]).logits for i in range(3)]), together)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 1, 8, 8), "1 channels; the model takes 3"),
        ((1, 4, 8, 8), "4 channels; the model takes 3"),
        ((1, 3, 9, 8), "9 x 8 are not made of whole patches of 2"),
        ((1, 3, 1, 8), "1 x 8 are not made of whole patches of 2"),
    ],
)
@pytest.mark.parametrize("head", [CLASSIFIER, DENOISER])
def test_images_that_do_not_fit_are_refused(head: dict[str, Any], shape: tuple[int, ...], words: str) -> None:
    more = () if head is CLASSIFIER else (torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=words):
        small(head)(torch.zeros(shape, dtype=torch.float64), *more)


@pytest.mark.parametrize("size", [(4, 6), (2, 2), (10, 4)])
def test_patches_are_embedded_by_a_convolution(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its value alone: cuDNN's takes TF32 by default."""
    embedding, images = small(DENOISER).embedding, photos(3, *size).transpose(2, 3).contiguous().transpose(2, 3)
    with torch.no_grad():
        embedding.bias.normal_()
    with monkeypatch.context() as patch:
        patch.setattr(functional, "conv2d", None)
        found = embedding(images.requires_grad_())
    wanted = functional.conv2d(images, embedding.weight, embedding.bias, stride=2).flatten(2).transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    weights, inputs = torch.randn_like(wanted), (embedding.weight, embedding.bias, images)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (found, wanted))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("tpe", "lrpe"), [(True, False), (False, True), (True, True), (False, False)])
def test_positions_matter_by_either_encoding_and_without_any_not_at_all(tpe: bool, lrpe: bool) -> None:
    """Columns of patches go round by one: the mean over tokens sees no order unless TPE or LRPE shows it."""
    model, images = small(CLASSIFIER, tpe=tpe, lrpe=lrpe), photos(2)
    difference = float((model(images).logits - model(images.roll(2, 3)).logits).abs().max())
    assert difference > 1e-6 if tpe or lrpe else difference < 1e-12


def test_soft_labels_of_one_class_are_that_class() -> None:
    model, images, labels = small(CLASSIFIER), photos(4), torch.tensor([0, 4, 2, 2])
    hard, soft = (model(images, labels=x).loss for x in (labels, torch.eye(5, dtype=torch.float64)[labels]))
    torch.testing.assert_close(hard, soft.to(hard.dtype))


def test_prefix_tokens_lie_outside_the_grid() -> None:
    assert grid_coordinates((2, 3), 2, torch.device("cpu")).tolist() == [
        [0, 0], [0, 0], [1, 1], [1, 2], [1, 3], [2, 1], [2, 2], [2, 3],
    ]  # fmt: skip
    model = small(DENOISER)
    noisy, times, labels = photos(2), torch.tensor([3, 999]), torch.tensor([1, 5])
    base = model(noisy, times, labels)
    assert base.shape == (2, 6, 8, 8)
    for other in (model(noisy, times + 1, labels), model(noisy, times, labels - 1)):
        assert ((other - base).flatten(1).abs().amax(1) > 1e-6).all()


@pytest.mark.parametrize("count", [1, 3])
def test_guidance(count: int) -> None:
    model, noisy = small(DENOISER), photos(count)
    times, labels = torch.full((count,), 7), torch.arange(count) % 5
    with_class, without = model(noisy, times, labels), model(noisy, times, torch.full_like(labels, 5))
    torch.testing.assert_close(guided(model, noisy, times, labels, 1.0), with_class)
    found = guided(model, noisy, times, labels, 4.0)
    torch.testing.assert_close(found[:, :3], without[:, :3] + 4 * (with_class[:, :3] - without[:, :3]))
    torch.testing.assert_close(found[:, 3:], with_class[:, 3:])


@pytest.mark.parametrize("changes", [{}, {"mixer": "softmax", "lrpe": False}])
def test_packed_documents_do_not_see_each_other(changes: dict[str, Any]) -> None:
    model = small(MASKED, **changes)
    ids = torch.randint(0, 40, (1, 20), generator=torch.Generator().manual_seed(1))
    packed = model(ids, ForwardContext(cu_seqlens=torch.tensor([0, 7, 8, 20]))).logits
    alone = torch.cat([model(ids[:, a:b]).logits for a, b in ((0, 7), (7, 8), (8, 20))], 1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("changes", [{}, {"mixer": "softmax", "lrpe": False}])
def test_padding_is_not_there(changes: dict[str, Any]) -> None:
    model = small(MASKED, **changes)
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    padded = model(ids, ForwardContext(key_mask=mask)).logits
    torch.testing.assert_close(padded[1, :5], model(ids[1:, :5]).logits[0])
    torch.testing.assert_close(padded[0], model(ids[:1]).logits[0])


@pytest.mark.parametrize(("dropout", "drop_path", "drops"), [(0.0, 0.0, False), (0.1, 0.0, True), (0.0, 0.1, True)])
def test_training_has_a_key_for_whatever_is_dropped(dropout: float, drop_path: float, drops: bool) -> None:
    config = small(MASKED, dropout=dropout, drop_path=drop_path).config
    key = training_context(torch.tensor([0, 8]), torch.tensor([3]), 8, config, 1, 2).dropout
    assert (key is not None) == drops
    assert training_context(torch.tensor([0, 8]), torch.tensor([3]), 8, config, 1, None).dropout is None


def test_dropped_paths_are_of_samples_and_last_layers_most() -> None:
    ids = torch.arange(20_000)
    key = DropoutKey(1, 2, ids, 4)
    assert abs(float(key.samples(5, 0.3).double().mean()) - 0.7) < 0.02
    assert torch.equal(DropoutKey(1, 2, ids[77:99], 9, 3).samples(5, 0.3), key.samples(5, 0.3)[77:99])
    model = small(CLASSIFIER, drop_path=0.5)
    assert [block.drop_path for block in model.layers] == [0.0, 0.5]
    images, ids = photos(8), torch.arange(8)
    out = model(images, ForwardContext(dropout=DropoutKey(1, 0, ids, 16))).logits
    half = model(images[4:], ForwardContext(dropout=DropoutKey(1, 0, ids[4:], 16))).logits
    torch.testing.assert_close(out[4:], half)
    assert (out - model(images).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**CLASSIFIER, "causal": True, "axes": 1}, "needs causal: false"),
        ({**CLASSIFIER, "axes": 1}, "set axes: 2"),
        ({**CLASSIFIER, "vocab_size": 9}, "vocab_size is not for head: classifier"),
        ({**MASKED, "vocab_size": 0}, "vocab_size is missing"),
        ({**MASKED, "image": PHOTO}, "image is not for head: masked_lm"),
        ({**CLASSIFIER, "image": None}, "image is missing"),
        ({**CLASSIFIER, "image": {**PHOTO, "size": [225, 224]}}, r"nearest: \[224, 224\]"),
        ({**MASKED, "mixer": "softmax"}, "set lrpe: false"),
    ],
)
def test_configurations_that_make_no_model(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig.model_validate({**fields, "layers": 2, "width": 24, "heads": 4, "glu_width": 20})
