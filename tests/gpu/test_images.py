"""Classifiers and denoisers on a GPU: near one process's fp32 in bf16, and the same under layouts of as many GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ranks, steps_of

pytest.importorskip("webdataset")
pytest.importorskip("PIL")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FP32 = ["train.precision=fp32"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "bf16": (1, []),
    "bf16_zero3": (2, ["parallel.zero_stage=3"]),
    "bf16_tp2": (2, ["parallel.tensor=2"]),
    "bf16_sp2": (2, ["parallel.sequence=2"]),
    "bf16_pp2": (2, ["parallel.pipeline=2"]),
}


@pytest.fixture(scope="module")
def heads(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.parallel import images, sentences

    adaln = ["model.conditioning=adaln_single"]
    writers: dict[str, tuple[Any, list[str]]] = {
        "classifier": (images.write_classifier, []),
        "denoiser": (images.write_denoiser, []),
        "adaln": (images.write_denoiser, adaln),
        "sentences": (
            lambda folder: sentences.write_config(folder, "classes"),
            ["model.dropout=0", "optimizer.learning_rate=5e-4"],
        ),
    }
    found: dict[str, Any] = {}

    def head(name: str) -> Any:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            write, own = writers[name]
            config = write(folder)
            rows = ranks.train(1, config, [*own, *FP32], folder, "one")
            found[name] = config, own, steps_of(rows, "loss", "batch_checksum")
        return found[name]

    return head


@pytest.mark.parametrize("head", ["classifier", "denoiser", "adaln", "sentences"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_bf16_beside_fp32(head: str, name: str, ranks: Ranks, tmp_path: Path, heads: Any) -> None:
    world, overrides = LAYOUTS[name]
    if head in ("denoiser", "adaln") and "pp2" in name:
        pytest.skip("a denoiser has no stages")
    config, own, wanted = heads(head)
    rows = ranks.train(world, config, [*own, "train.precision=bf16", *overrides], tmp_path, "run")
    found = steps_of(rows, "loss", "batch_checksum")
    for step in range(1, 11):
        assert abs(found[step][0] / wanted[step][0] - 1) < 1e-2 and found[step][1] == wanted[step][1], step


def test_drawn_images_do_not_depend_on_the_batch() -> None:
    from lightnet_llm.config import ModelConfig
    from lightnet_llm.inference.images import Sampler, draw
    from lightnet_llm.models import Denoiser, initialize

    image = {"size": [16, 16], "patch": 2, "classes": 5}
    fields = {"head": "denoiser", "causal": False, "axes": 2, "norm": "layer", "layers": 3, "width": 96, "heads": 4}
    config = ModelConfig.model_validate({**fields, "glu_width": 128, "tpe_init_length": 8, "image": image})
    model = Denoiser(config)
    initialize(model, 1)
    torch.nn.init.normal_(model.head.weight, std=0.05)
    wanted, sampler = [(i % 5, i) for i in range(6)], Sampler("ddpm", 20, 2.0)
    on_cpu = draw(model.eval(), wanted, sampler)
    model.cuda()
    for batch in (6, 4, 1):
        assert (draw(model, wanted, sampler, batch) - on_cpu).abs().max() < 2e-2, batch


def test_patches_are_embedded_in_fp32_with_gradients_of_the_same_bits() -> None:
    """cuDNN's convolutions would take TF32 by default (errors of 1e-3)."""
    from lightnet_llm.config import ModelConfig
    from lightnet_llm.models import initialize
    from lightnet_llm.models.patches import PatchEmbedding

    image = {"size": [32, 32], "patch": 2, "channels": 4, "classes": 5}
    fields = {"head": "denoiser", "causal": False, "axes": 2, "norm": "layer", "layers": 1, "width": 384, "heads": 6}
    embedding = PatchEmbedding(ModelConfig.model_validate({**fields, "glu_width": 64, "image": image}))
    initialize(embedding, 1)
    images = torch.randn(64, 4, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = embedding.double()(images.double())
        embedding.float().cuda()
        assert (embedding(images.cuda()).cpu() - wanted).abs().max() < 1e-5 * wanted.abs().max()

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(embedding(images.cuda()).square().sum(), embedding.weight)[0]

    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(5))
