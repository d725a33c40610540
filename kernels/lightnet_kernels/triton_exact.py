"""The exact form of a block whose running maximum grows fast (model-spec 1, "Numerics": the slow path).

Token after token with the running maximum as reference: no exponent is positive, at any growth. It serves blocks that
are seldom met, so it is written to be short and quick to compile, not fast. Pointers point at the block's first token.
"""

# What Triton compiles is not quite Python: types change between uses.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import activated, exp, load_angles, load_keys, load_vector


@triton.jit
def next_mass(k_ptr, stride, t, col, top, total, D: tl.constexpr, DH: tl.constexpr):
    """Running maximum and s_t (in units of exp(maximum)) with token t added; vectors [DH]."""
    key = load_vector(k_ptr + t * stride, col, D, DH).to(tl.float32)
    new = tl.maximum(top, key)
    return new, total * exp(top - new) + exp(key - new)


@triton.jit
def exact_scale(k_ptr, stride, count, col, enter, mass, BT: tl.constexpr, D: tl.constexpr, DH: tl.constexpr):
    """exp(enter) / s_t, [BT, DH]; 0 where there is no token."""
    step = tl.arange(0, BT)
    scale = tl.zeros([BT, DH], tl.float32)
    top, total = enter, mass
    for t in range(0, count):
        top, total = next_mass(k_ptr, stride, t, col, top, total, D, DH)
        scale = tl.where((step == t)[:, None], (exp(enter - top) / total)[None, :], scale)
    return scale


@triton.jit
def exact_scores(
    q_ptr, k_ptr, enter_ptr, mass_ptr, cos_ptr, sin_ptr, sqn, skn, head, count,
    D: tl.constexpr, DH: tl.constexpr, NH: tl.constexpr, BT: tl.constexpr, LRPE: tl.constexpr, SILU: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """Scores of the block's queries and keys, [t, r], or [r, t] with BY_KEY; 0 for r > t."""
    step = tl.arange(0, BT)
    scores = tl.zeros([BT, BT], tl.float32)
    for part in range(0, NH):
        col = part * DH + tl.arange(0, DH)
        keys = load_keys(k_ptr, step, skn, col, step < count, D, DH)
        top, total = load_vector(enter_ptr, col, D, DH), load_vector(mass_ptr, col, D, DH)
        if LRPE:
            cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
            sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
        for t in range(0, count):
            top, total = next_mass(k_ptr, skn, t, col, top, total, D, DH)
            phi = activated(load_vector(q_ptr + t * sqn, col, D, DH), SILU) / total
            weight = tl.where((step <= t)[:, None], exp(keys - top[None, :]), 0.0) * phi[None, :]
            if LRPE:
                cos_t = load_vector(cos_ptr + (head * BT + t) * D, col, D, DH).to(tl.float32)
                sin_t = load_vector(sin_ptr + (head * BT + t) * D, col, D, DH).to(tl.float32)
                weight *= cos * cos_t[None, :] + sin * sin_t[None, :]
            line = tl.sum(weight, 1)
            if BY_KEY:
                scores += tl.where((step == t)[None, :], line[:, None], 0.0)
            else:
                scores += tl.where((step == t)[:, None], line[None, :], 0.0)
    return scores


@triton.jit
def exact_query_sums(
    pairs, k_ptr, cos_ptr, sin_ptr, skn, head, count, col, enter, mass,
    BT: tl.constexpr, D: tl.constexpr, DH: tl.constexpr, LRPE: tl.constexpr,
):  # fmt: skip
    """sum over r <= t of pairs[t, r] exp(k_r) / s_t (cos, sin)(r theta): what the block's own keys give dphi."""
    step = tl.arange(0, BT)
    real = tl.zeros([BT, DH], tl.float32)
    imag = tl.zeros([BT, DH], tl.float32)
    keys = load_keys(k_ptr, step, skn, col, step < count, D, DH)
    if LRPE:
        cos = load_angles(cos_ptr, head, step, col, D, DH, BT)
        sin = load_angles(sin_ptr, head, step, col, D, DH, BT)
    top, total = enter, mass
    for t in range(0, count):
        top, total = next_mass(k_ptr, skn, t, col, top, total, D, DH)
        here = (step == t)[:, None]
        of_keys = tl.sum(tl.where(here, pairs, 0.0), 0)  # [r]
        weight = tl.where((step <= t)[:, None], exp(keys - top[None, :]), 0.0) * of_keys[:, None]
        if LRPE:
            real = tl.where(here, (tl.sum(weight * cos, 0) / total)[None, :], real)
            imag = tl.where(here, (tl.sum(weight * sin, 0) / total)[None, :], imag)
        else:
            real = tl.where(here, (tl.sum(weight, 0) / total)[None, :], real)
    return real, imag


@triton.jit
def exact_taken(
    product, k_ptr, skn, count, col, enter, mass, BT: tl.constexpr, D: tl.constexpr, DH: tl.constexpr
):  # fmt: skip
    """sum over t >= r of product[t] exp(k_r) / s_t, [r, DH]: what the block's own normalisers take from dk."""
    step = tl.arange(0, BT)
    keys = load_keys(k_ptr, step, skn, col, step < count, D, DH)
    taken = tl.zeros([BT, DH], tl.float32)
    top, total = enter, mass
    for t in range(0, count):
        top, total = next_mass(k_ptr, skn, t, col, top, total, D, DH)
        asked = tl.sum(tl.where((step == t)[:, None], product, 0.0), 0) / total
        taken += tl.where((step <= t)[:, None], exp(keys - top[None, :]), 0.0) * asked[None, :]
    return taken


@triton.jit
def exact_key_sums(
    pairs, q_ptr, k_ptr, cos_ptr, sin_ptr, sqn, skn, head, count, col, enter, mass,
    BT: tl.constexpr, D: tl.constexpr, DH: tl.constexpr, LRPE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """sum over t >= r of pairs[r, t] exp(k_r) / s_t phi_t (cos, sin)(t theta): what the block's own queries give dk."""
    step = tl.arange(0, BT)
    real = tl.zeros([BT, DH], tl.float32)
    imag = tl.zeros([BT, DH], tl.float32)
    keys = load_keys(k_ptr, step, skn, col, step < count, D, DH)
    top, total = enter, mass
    for t in range(0, count):
        top, total = next_mass(k_ptr, skn, t, col, top, total, D, DH)
        of_query = tl.sum(tl.where((step == t)[None, :], pairs, 0.0), 1)  # [r]
        phi = activated(load_vector(q_ptr + t * sqn, col, D, DH), SILU) / total
        weight = tl.where((step <= t)[:, None], exp(keys - top[None, :]), 0.0) * of_query[:, None] * phi[None, :]
        if LRPE:
            real += weight * load_vector(cos_ptr + (head * BT + t) * D, col, D, DH).to(tl.float32)[None, :]
            imag += weight * load_vector(sin_ptr + (head * BT + t) * D, col, D, DH).to(tl.float32)[None, :]
        else:
            real += weight
    return real, imag
