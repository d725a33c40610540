"""Exports of the heads that are not causal: there and back, equal to training's models, under Transformers' rules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoTokenizer

import lightnet_llm
from lightnet_llm import (
    LightNetConfig,
    LightNetForCausalLM,
    LightNetForImageClassification,
    LightNetForMaskedLM,
    LightNetForSequenceClassification,
)
from lightnet_llm.checkpoint.weights import load_into
from lightnet_llm.convert import convert, open_source
from lightnet_llm.convert.names import to_hugging_face
from lightnet_llm.convert.source import specs_of
from lightnet_llm.errors import UserError
from lightnet_llm.hf.bundle import class_name
from lightnet_llm.models import PlainLayers, build_model

from .toy import HEADS, TEXT, checkpoint, config_of, exported


def trained(folder: Path) -> Any:
    """Training's own model with the weights of a source."""
    source = open_source(folder)
    model = build_model(source.model, PlainLayers())
    for parameter in model.parameters():
        parameter.data.zero_()
    load_into(model, {name: source.weights.read(name) for name in source.weights.shapes}, str(folder))
    return model.eval()


def fields_of(name: str) -> dict[str, Any]:
    """A head's fields as LightNetConfig takes them, but for those under Transformers' names."""
    tree = config_of(**HEADS[name]).model.model_dump()
    return {field: value for field, value in tree.items() if field not in ("image", "classes")}


@pytest.mark.parametrize("name", [x if x != "regression" else pytest.param(x, marks=pytest.mark.slow) for x in HEADS])
def test_there_and_back_is_bit_equal(name: str, tmp_path: Path) -> None:
    fields = HEADS[name]
    config = config_of("bf16" if name == "masked_lm" else "fp32", **fields)
    folder = checkpoint(tmp_path / "run", config, tensor=2)
    kind = class_name(config.model.head)
    report = convert(tmp_path / "run", tmp_path / "hf", "hf")
    assert report.difference == 0 and report.loaded_with == kind
    convert(tmp_path / "hf", tmp_path / "back", "training")
    convert(tmp_path / "back", tmp_path / "plain", "safetensors")
    convert(tmp_path / "plain", tmp_path / "again", "hf")
    one, other = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("hf", "again"))
    assert one == other
    assert (tmp_path / "hf" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()
    stored, source = load_file(tmp_path / "hf" / "model.safetensors"), open_source(folder)
    assert set(stored) == {to_hugging_face(parameter) for parameter in specs_of(config.model)}
    back = open_source(tmp_path / "back")
    assert back.model == config.model
    for parameter in source.weights.shapes:
        wanted = source.weights.read(parameter)
        assert torch.equal(stored[str(to_hugging_face(parameter))], wanted), parameter
        assert torch.equal(back.weights.read(parameter), wanted), parameter
    model = getattr(lightnet_llm, kind).from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.inference_mode():
        if config.model.image is not None:
            images = torch.randn(2, 3, 20, 12)  # of another shape than trained
            torch.testing.assert_close(model(images).logits, trained(folder)(images).logits, atol=1e-5, rtol=1e-5)
            return
        ids = torch.arange(2, 26).view(2, 12)
        wanted = trained(folder)(ids).logits
        torch.testing.assert_close(model(ids).logits, wanted[..., : model(ids).logits.shape[-1]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["masked_lm", "sequence_classifier"])
def test_padding_on_either_side(name: str, tmp_path: Path) -> None:
    config = LightNetConfig(**fields_of(name), num_labels=3)
    torch.manual_seed(0)
    model: Any = (LightNetForMaskedLM if name == "masked_lm" else LightNetForSequenceClassification)(config).eval()
    rows = [torch.arange(5, 5 + length) for length in (9, 4, 1)]
    with torch.inference_mode():
        alone = [model(row[None]).logits[0] for row in rows]
        for left in (True, False):
            pads = [torch.full((9 - len(row),), 7) for row in rows]
            ids = torch.stack([torch.cat([p, r] if left else [r, p]) for p, r in zip(pads, rows, strict=True)])
            ones = [torch.ones(len(row)) for row in rows]
            mask = torch.stack(
                [torch.cat([p * 0.0, o] if left else [o, p * 0.0]) for p, o in zip(pads, ones, strict=True)]
            )
            together = model(ids, attention_mask=mask).logits
            for row, kept, wanted in zip(together, mask.bool(), alone, strict=True):
                torch.testing.assert_close(row[kept] if name == "masked_lm" else row, wanted, atol=1e-5, rtol=1e-5)
                assert name != "masked_lm" or not row[~kept].any()


def test_losses(tmp_path: Path) -> None:
    """Transformers' conventions: -100 does not count, labels are not shifted, a given number of items divides."""
    cross = torch.nn.functional.cross_entropy
    torch.manual_seed(0)
    config = LightNetConfig(**fields_of("masked_lm"))
    masked = LightNetForMaskedLM(config).eval()
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 12)
    mask[1, :5] = 0
    labels = torch.full((2, 12), -100)
    labels[0, 3], labels[0, 7], labels[1, 9] = 11, 250, 3
    output = masked(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.loss, cross(output.logits.flatten(0, 1), labels.flatten()))
    whole = masked(ids, labels=labels)
    torch.testing.assert_close(whole.loss, cross(whole.logits.flatten(0, 1), labels.flatten()))
    assert masked(ids, labels=torch.full((2, 12), -100)).loss == 0  # no NaN
    torch.testing.assert_close(masked(ids, mask, labels, num_items_in_batch=6).loss * 2, output.loss)
    assert masked.train()(ids, labels=labels).logits is None

    fields = fields_of("sequence_classifier")
    sentences = LightNetForSequenceClassification(LightNetConfig(**fields, num_labels=3)).eval()
    output = sentences(ids, mask, labels=torch.tensor([2, -100]))
    torch.testing.assert_close(output.loss, cross(output.logits[:1], torch.tensor([2])))
    value = LightNetForSequenceClassification(LightNetConfig(**fields, num_labels=1)).eval()
    output = value(ids, mask, labels=torch.tensor([2.5, 1.0]))
    torch.testing.assert_close(output.loss, ((output.logits[:, 0] - torch.tensor([2.5, 1.0])) ** 2).mean())

    images = LightNetForImageClassification(image_config()).eval()
    pixels = torch.randn(3, 3, 12, 16)
    output = images(pixels, labels=torch.tensor([4, -100, 0]))
    torch.testing.assert_close(output.loss, cross(output.logits[[0, 2]], torch.tensor([4, 0])))
    shares = torch.rand(3, 5).softmax(1)
    torch.testing.assert_close(images(pixels, labels=shares).loss, cross(images(pixels).logits, shares))
    assert images(pixels, labels=torch.full((3,), -100)).loss == 0


def image_config() -> LightNetConfig:
    return LightNetConfig(**fields_of("classifier"), image_size=(12, 16), patch_size=4, num_labels=5)


def test_a_masked_model_is_fine_tuned_into_a_classifier(tmp_path: Path) -> None:
    folder = exported(tmp_path / "hf", **HEADS["masked_lm"])
    model = LightNetForSequenceClassification.from_pretrained(folder, num_labels=4)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(model.model.layers[0].glu.up.weight, stored["model.layers.0.glu.up.weight"])
    assert model.model.head.output.weight.shape == (4, 32) and model.model.head.output.weight.std() > 0.05
    model.save_pretrained(tmp_path / "tuned")
    report = convert(tmp_path / "tuned", tmp_path / "back", "training")
    assert report.difference == 0 and open_source(tmp_path / "back").model.classes == 4


def test_tokenizers_of_masked_models(tmp_path: Path) -> None:
    """The mask, which here is the first id after the tokenizer's own, is found in a text; a pair is as in training."""
    from lightnet_data.sentences import encode

    folder = exported(tmp_path / "hf", **HEADS["masked_lm"])
    tokenizer, own = AutoTokenizer.from_pretrained(folder, trust_remote_code=True), open_source(folder).vocabulary
    assert own is not None and tokenizer.mask_token_id == own.tokenizer.vocab_size == 299
    ids = tokenizer(f"the ship {tokenizer.mask_token} under").input_ids
    assert ids.count(299) == 1 and ids[0] == own.tokenizer.eod_id
    assert tokenizer(TEXT, "of rain").input_ids == encode(own.tokenizer, TEXT, "of rain", 999)[0]
    assert tokenizer(["a", TEXT], padding=True).attention_mask[0][-1] == 0  # on the right
    config = LightNetConfig.from_pretrained(folder)
    assert config.mask_token_id == 299 and config.vocab_size == 300


def test_classes_have_names_and_pixels_are_training_s(tmp_path: Path) -> None:
    from lightnet_data.image_transforms import CenterCrop
    from PIL import Image

    run = tmp_path / "run"
    config = config_of(**{**HEADS["classifier"], "image": {"size": [32, 32], "patch": 4, "channels": 3, "classes": 5}})
    config = config.model_copy(update={"augmentation": config.augmentation.model_copy(update={"mean": (0.25,)})})
    folder = checkpoint(run, config)
    names = ["cat", "dog", "emu"]  # fewer than the model has
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "data": {"classes": names}}))
    convert(folder, tmp_path / "hf", "hf")
    found = LightNetConfig.from_pretrained(tmp_path / "hf")
    assert found.id2label == {0: "cat", 1: "dog", 2: "emu", 3: "LABEL_3", 4: "LABEL_4"} and found.image.size == (32, 32)
    for place, to in (("plain", "safetensors"), ("back", "training"), ("hf2", "hf")):
        source = "plain" if place == "back" else "hf"
        convert(tmp_path / source, tmp_path / place, to)
        assert open_source(tmp_path / place).classes[:3] == names
        assert open_source(tmp_path / place).config.augmentation.mean == (0.25,)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "hf")  # torchvision is not here
    for width, height in (
        (40, 40),
        (80, 40),
        (24, 48),
    ):  # sides that need no rounding, which Transformers does otherwise
        pixels = np.random.default_rng(0).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
        seen = processor(image, return_tensors="pt").pixel_values[0]
        cropped = torch.tensor(np.asarray(CenterCrop((32, 32))(image, None))).permute(2, 0, 1) / 255  # type: ignore[arg-type]
        wanted = (cropped - 0.25) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
        assert seen.shape == (3, 32, 32)
        assert float((seen - wanted).abs().max()) < 1e-5, (width, height)
    assert processor(image.resize((91, 60)), return_tensors="pt").pixel_values.shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LightNetForMaskedLM(LightNetConfig()), "bidirectional"),
        (lambda: LightNetForSequenceClassification(image_config()), "bidirectional language model"),
        (lambda: LightNetForImageClassification(LightNetConfig()), "no image_size"),
        (lambda: LightNetForCausalLM(LightNetConfig(causal=False)), "not a causal"),
        (lambda: LightNetForImageClassification(image_config())(torch.zeros(1, 3, 13, 16)), "whole patches of 4"),
        (lambda: LightNetForImageClassification(image_config())(torch.zeros(1, 1, 12, 16)), "1 channels"),
        (lambda: LightNetForImageClassification(image_config())(torch.zeros(3, 12, 16)), "pixel_values"),
        (lambda: LightNetConfig(image_size=32), "patch_size"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_denoiser_is_refused(tmp_path: Path) -> None:
    image = {"size": [8, 8], "patch": 2, "channels": 4, "classes": 5}
    config = config_of(head="denoiser", causal=False, axes=2, norm="layer", vocab_size=0, image=image)
    checkpoint(tmp_path / "run", config)
    with pytest.raises(UserError, match="holds a denoiser; what is converted is causal_lm, masked_lm"):
        convert(tmp_path / "run", tmp_path / "hf", "hf")
