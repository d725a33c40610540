"""Decoding on a GPU: a step captured as a CUDA graph is the step itself, and the whole re-read."""

import pytest
import torch

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.inference import read
from lightnet_llm.inference.decoder import EAGER_STEPS, Decoder

from .model import bf16_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = {"layers": 3, "width": 256, "heads": 2, "glu_width": 320, "vocab_size": 500, "gate_rank": 16, "tpe_rank": 8}
CASES = [{}, {"lrpe": False}, {"tpe": False}, {"decay": "independent"}, {"tie_embeddings": False}]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_captured_step_gives_the_same_bits(changes):
    """Over two blocks' ends, and with a row left out on the way."""
    model = bf16_model(ModelConfig(**{**SHAPE, **changes})).eval()
    ids = torch.randint(1, 500, (3, 70 + 150), generator=torch.Generator().manual_seed(0))
    state = read(model, ids[:, :70]).state
    decoders = [Decoder(model, state, graph=graph) for graph in (True, False)]
    rows = torch.arange(3)
    for step in range(150):
        if step == 90:
            rows = torch.tensor([2, 0])
            for decoder in decoders:
                decoder.keep(rows)
        logits = [decoder(ids[rows, 70 + step]) for decoder in decoders]
        assert torch.equal(*logits), step
    captured = changes.get("decay") != "independent"
    assert (decoders[0].graph is not None) == captured and decoders[1].graph is None
    whole = read(model, ids).logits[rows.cuda()]
    assert (logits[0] - whole).abs().max() < 0.02 * whole.abs().max() + 0.02
    caches = [decoder.cache(logits[0]).state.layers[1] for decoder in decoders]
    assert all(torch.equal(one, other) for one, other in zip(*caches, strict=True))


def test_logits_stay_what_they_were():
    """A replay writes into the graph's own memory: what was handed out is a copy."""
    model = bf16_model(ModelConfig(**SHAPE)).eval()
    decoder = Decoder(model, read(model, [[1, 2, 3]]).state)
    kept = [decoder(torch.tensor([token])) for token in range(5, 5 + EAGER_STEPS + 3)]
    copies = [logits.clone() for logits in kept]
    decoder(torch.tensor([499]))
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
    assert not torch.equal(kept[-1], kept[-2])
    with pytest.raises(ValueError, match="2 tokens for 1 rows"):
        decoder(torch.tensor([1, 2]))


def test_where_a_capture_fails_steps_go_on(monkeypatch):
    model = bf16_model(ModelConfig(**SHAPE)).eval()
    state = read(model, [[1, 2, 3]]).state
    decoders = [Decoder(model, state) for _ in range(2)]

    def fails(*_, **__):
        raise torch.OutOfMemoryError("no room")

    for token in range(5, 5 + EAGER_STEPS + 3):
        wanted = decoders[0](torch.tensor([token]))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "graph", fails)
            assert torch.equal(decoders[1](torch.tensor([token])), wanted)
    assert decoders[0].graph is not None and decoders[1].graph is None and not decoders[1].can_capture
