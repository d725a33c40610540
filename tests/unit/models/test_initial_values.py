"""Initial values are a function of the seed and a parameter's name alone, however they are drawn."""

import hashlib
from typing import Any

import pytest
import torch

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import CausalLM, build_model, initialize
from lightnet_llm.models import parameters as under_test
from lightnet_llm.models.layers import PlainLayers
from lightnet_llm.models.parameters import Undrawn, spec_of
from tests.initial_values import drawn, part
from tests.unit.models.small import SMALL

FIELDS: dict[str, Any] = {**SMALL, "vocab_size": 251, "tie_embeddings": False}
IMAGE: dict[str, Any] = {
    **SMALL,
    "causal": False,
    "axes": 2,
    "norm": "layer",
    "image": {"size": [4, 6], "patch": 2, "channels": 3, "classes": 5},
    "tpe_init_length": 4,
}
HEADS: list[dict[str, Any]] = [
    FIELDS,
    {**IMAGE, "head": "classifier"},
    {**IMAGE, "head": "denoiser"},
    {**IMAGE, "head": "denoiser", "conditioning": "adaln_single"},
    {**SMALL, "vocab_size": 64, "head": "sequence_classifier", "causal": False, "classes": 3},
]


class Split(PlainLayers):
    """The shapes of one of several tensor-parallel ranks; its widths (GLU, vocabulary) are padded."""

    def __init__(self, ranks: int, rank: int):
        super().__init__()
        self.tensor_parallel, self.tensor_rank = ranks, rank

    def _column(self, in_features: int, out_features: int) -> torch.nn.Module:
        return super()._column(in_features, out_features // self.tensor_parallel)

    def _row(self, in_features: int, out_features: int) -> torch.nn.Module:
        return super()._row(in_features // self.tensor_parallel, out_features)

    def _embedding(self, rows: int, width: int) -> torch.nn.Module:
        return super()._embedding(rows // self.tensor_parallel, width)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_the_definition(
    ranks: int, rank: int, threads: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By threads, on the way to another dtype and for parts of it; memory drawn into before holds other values."""
    monkeypatch.setattr(under_test, "WORTH_A_THREAD", 1)
    config = ModelConfig(**FIELDS)
    with Undrawn():
        model = CausalLM(config, Split(ranks, rank))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize(model, 7, rank, torch.device("cpu"), dtype, threads)
    for name, parameter in model.named_parameters():
        wide = spec_of(parameter).keep_fp32 or dtype is None
        assert parameter.dtype == (torch.float32 if wide else dtype) and parameter.is_contiguous()
        wanted = part(drawn(config, 7, name, spec_of(parameter).shape), tuple(parameter.shape), rank)
        assert torch.equal(parameter, wanted.to(parameter.dtype)), name


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="PyTorch draws by other instructions here"
)
def test_values_never_change() -> None:
    """A run begins the same under another version of PyTorch, too."""
    model = CausalLM(ModelConfig(**FIELDS))
    initialize(model, 7)
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not spec_of(parameter).keep_fp32:  # those are computed in float64, which may end in another digit elsewhere
            found.update(name.encode() + parameter.detach().numpy().tobytes())
    assert found.hexdigest() == "3098e8636ca06650154023e722397057d168a179a828caa9e6c0db975223c5da"


@pytest.mark.parametrize("fields", HEADS, ids=lambda fields: fields.get("head", "causal_lm"))
def test_built_without_drawing(fields: dict[str, Any]) -> None:
    """Nothing is drawn when a model is built, and nothing of it is left to chance when it was initialised."""
    config = ModelConfig.model_validate(fields)
    drawn_first = build_model(config)
    before = torch.get_rng_state()
    with Undrawn():
        model = build_model(config)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize(drawn_first, 7)
    initialize(model, 7)
    assert all(torch.equal(one, other) for one, other in zip(drawn_first.parameters(), model.parameters(), strict=True))


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "WORTH_A_THREAD", 1)
    model = torch.nn.Linear(4, 4)  # declares nothing
    with pytest.raises(AttributeError):
        initialize(model, 7, threads=2)
