"""Ordinary attention in LightNet's place, between the same projections: the peer in comparisons (``mixer: softmax``)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .context import ForwardContext


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, context: ForwardContext, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)) v per head, within segments and among real tokens.

    Args:
        query, key, value: [B, N, H, D].

    Returns:
        [B, N, H, D]; 0 at masked tokens.
    """
    if context.exchange is not None or context.decode:
        raise ValueError(
            "mixer: softmax has no state: it takes neither sequence parallelism nor token-by-token decoding"
        )
    tokens, device = query.shape[1], query.device
    allowed: Tensor | None = None
    if context.cu_seqlens is not None:
        places = torch.arange(tokens, device=device)
        segment = torch.searchsorted(context.cu_seqlens.to(device=device, dtype=torch.int64), places, right=True)
        allowed = (segment[:, None] == segment)[None, None]
    if context.key_mask is not None:
        real = context.key_mask[:, None, None, :]
        allowed = real if allowed is None else allowed & real
    if causal and allowed is not None:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = scaled_dot_product_attention(query, key, value, allowed, is_causal=causal and allowed is None).transpose(1, 2)
    if context.key_mask is not None:
        out = torch.where(context.key_mask[:, :, None, None], out, torch.zeros((), dtype=out.dtype, device=device))
    return out
