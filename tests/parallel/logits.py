"""The parallel model's own logits, for comparisons with what it is converted to: planted like a fault, changes nothing."""

import os
from typing import Any


def dump_logits() -> None:
    """Every validation pass leaves its last batch: ids and cu_seqlens in ``LOGITS``.in, whole logits in ``LOGITS``.out."""
    import torch

    from lightnet_llm.models import causal_lm
    from lightnet_llm.parallel import pipeline

    target = os.environ["LOGITS"]
    embed, head_loss, staged = causal_lm.embed, causal_lm.head_loss, pipeline.EmbeddingStage.forward

    def saw(layers: Any, ids: Any, cu_seqlens: Any) -> None:
        if not torch.is_grad_enabled() and layers.tensor_rank == 0:
            torch.save({"ids": ids.reshape(1, -1).cpu(), "cu_seqlens": cu_seqlens.cpu()}, f"{target}.in")

    def watched_embed(*arguments: Any, **options: Any) -> Any:
        saw(arguments[2], arguments[4], arguments[5].cu_seqlens)
        return embed(*arguments, **options)

    def watched_stage(stage: Any, payload: Any) -> Any:
        saw(stage.layers_set, payload[0], stage.context(payload).cu_seqlens)
        return staged(stage, payload)

    def watched_loss(hidden: Any, weight: Any, norm: Any, layers: Any, labels: Any, vocab_size: int, how: str) -> Any:
        if not torch.is_grad_enabled():
            logits = torch.nn.functional.linear(layers.enter(norm(hidden)), weight)
            logits = layers.gather_logits(logits, vocab_size)
            if layers.tensor_rank == 0:
                torch.save(logits.cpu(), f"{target}.out")
        return head_loss(hidden, weight, norm, layers, labels, vocab_size, how)

    causal_lm.embed, pipeline.EmbeddingStage.forward = watched_embed, watched_stage  # type: ignore[method-assign]
    for module in (causal_lm, pipeline):
        module.head_loss = watched_loss  # type: ignore[attr-defined]
