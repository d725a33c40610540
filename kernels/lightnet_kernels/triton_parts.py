"""Parts shared by the Triton kernels of the additive scan (model-spec 1, "Numerics").

A sequence is cut into chunks of NB blocks of BT tokens. Between chunks goes the state; inside a chunk blocks meet as in
attention, with keys exp(k - c) and queries phi(q) exp(c) / s_t. Two facts keep every exponent in range:

- For a query after a key's block, with c any running maximum between the two, both factors are at most 1.
- Inside one block c is half way up the growth g of the running maximum, so both stay within exp(+-g / 2). Where g is
  above SAFE_GROWTH the kernels run a second time, only for the flagged blocks, in the exact form: the block is halved
  until single tokens remain, and at every level the first fact holds, with c the maximum of the left half.

Tiles are [BT, DH] or [BT, VP]: value features are padded to a power of two, query and key features are cut into blocks
of DH, so that what a program holds stays in registers. Gradients of a feature need only that feature, so there blocks
are programs; scores are sums over all of them. Tokens that do not exist have key -inf and query 0;
features that do not exist have key 0 and query 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

SAFE_GROWTH = tl.constexpr(80.0)
LEVELS = tl.constexpr(6)  # log2(BT): halvings down to single tokens
BLOCK = 64  # BT
CHUNK_FIELDS = tl.constexpr(4)  # batch row, first token, tokens, bit 0: first of its sequence, bit 1: last


def _interpreter_shim() -> None:
    """Gaps of Triton 3.6's interpreter: it reads loop bounds with int(array of one element), which NumPy 2.4 no longer
    takes; multiplies bfloat16 matrices as the integers that hold their bits; and cuts float32 to bfloat16, where a GPU
    rounds."""
    import numpy as np
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    builder = interpreter.InterpreterBuilder
    plain_dot = builder.create_dot

    def create_dot(self, a, b, *rest):
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return plain_dot(self, a, b, *rest)

    builder.create_dot = create_dot
    plain_cast = builder.cast_impl

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            special = ~np.isfinite(src.data)
            return interpreter.TensorHandle(
                (np.where(special, bits, rounded) >> np.uint32(16)).astype(np.uint16), tl.bfloat16
            )
        return plain_cast(self, src, dst_type)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = lambda self, src, dst_type, rounding: cast_impl(self, src, dst_type)


if triton.knobs.runtime.interpret:
    _interpreter_shim()


@triton.jit
def load_chunk(chunks_ptr, chunk):
    """A row of the chunk table."""
    row = chunks_ptr + chunk * CHUNK_FIELDS
    return tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def load_rows(
    ptr, row, stride, col, present, WIDTH: tl.constexpr, PADDED: tl.constexpr, AGAIN: tl.constexpr = 0
):  # fmt: skip
    """One head's rows; 0 where there is no token or no feature.

    A tile that is needed again much later is loaded again, out of the cache, with another AGAIN: kept in registers it
    would be spilled. (Each AGAIN is an eviction policy, a difference for which the compiler keeps both loads.)
    """
    POLICY: tl.constexpr = "" if AGAIN == 0 else ("evict_last" if AGAIN == 1 else "evict_first")
    at = ptr + row[:, None] * stride + col[None, :]
    if WIDTH % PADDED == 0:
        return tl.load(at, mask=present[:, None], other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(at, mask=present[:, None] & (col < WIDTH)[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def load_keys(
    ptr, row, stride, col, present, WIDTH: tl.constexpr, PADDED: tl.constexpr, AGAIN: tl.constexpr = 0
):  # fmt: skip
    keys = load_rows(ptr, row, stride, col, present, WIDTH, PADDED, AGAIN).to(tl.float32)
    return tl.where(present[:, None], keys, float("-inf"))


@triton.jit
def activated(query, SILU: tl.constexpr):
    query = query.to(tl.float32)
    return query * tl.sigmoid(query) if SILU else query


@triton.jit
def store_rows(ptr, row, stride, col, present, x, WIDTH: tl.constexpr):
    at = ptr + row[:, None] * stride + col[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=present[:, None] & (col < WIDTH)[None, :])


@triton.jit
def load_vector(ptr, col, D: tl.constexpr, DH: tl.constexpr):
    if D % DH == 0:
        return tl.load(ptr + col)
    else:
        return tl.load(ptr + col, mask=col < D, other=0.0)


@triton.jit
def load_matrix(ptr, row, col, D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VP: tl.constexpr):
    """Rows of a state's [D, V], padded with zeros."""
    at = ptr + row[:, None] * V + col[None, :]
    if D % DH == 0 and V == VP:
        return tl.load(at)
    else:
        return tl.load(at, mask=(row < D)[:, None] & (col < V)[None, :], other=0.0)


@triton.jit
def load_half(ptr, row, col, D: tl.constexpr, V: tl.constexpr):
    return tl.load(ptr + row[:, None] * V + col[None, :], mask=(row < D)[:, None] & (col < V)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def store_half(ptr, row, col, x, D: tl.constexpr, V: tl.constexpr):
    at = ptr + row[:, None] * V + col[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row < D)[:, None] & (col < V)[None, :])


@triton.jit
def load_angles(
    ptr, head, row, col, LENGTH: tl.constexpr, D: tl.constexpr, DH: tl.constexpr, AGAIN: tl.constexpr = 0
):  # fmt: skip
    """cos or sin of the rows' places in the chunk, from the table [H, LENGTH + 1, D]."""
    POLICY: tl.constexpr = "" if AGAIN == 0 else ("evict_last" if AGAIN == 1 else "evict_first")
    at = ptr + (head * (LENGTH + 1) + row)[:, None] * D + col[None, :]
    if D % DH == 0:
        return tl.load(at, eviction_policy=POLICY)
    else:
        return tl.load(at, mask=(col < D)[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def reference(before, first_key, peak):
    """Half way up the growth of the running maximum inside a block, and the growth."""
    low = tl.maximum(before, first_key)
    growth = tl.maximum(before, peak) - low
    return low + 0.5 * growth, growth


@triton.jit
def triangle(BT: tl.constexpr, OP: tl.constexpr):
    step = tl.arange(0, BT)
    return tl.where(step[:, None] >= step[None, :], 1.0, 0.0).to(OP)


@triton.jit
def running_mass(keys, before, mass, unit, BT: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr):
    """s_t in units of exp(unit), fast form: a product with a triangle of ones is a cumulative sum."""
    weight = tl.exp(keys - unit[None, :]).to(OP)
    inside = tl.dot(triangle(BT, OP), weight, input_precision=PREC)
    return inside + (mass * tl.exp(before - unit))[None, :]


@triton.jit
def left_half(BT: tl.constexpr, SIZE: tl.constexpr):
    return (tl.arange(0, BT) % SIZE) < (SIZE // 2)


@triton.jit
def over_left(x, fill, BT: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, MAX: tl.constexpr):
    """Maximum or sum of x over the left half of each row's node of SIZE tokens, on every row of the node."""
    kept = tl.reshape(tl.where(left_half(BT, SIZE)[:, None], x, fill), (BT // SIZE, SIZE, DP))
    total = tl.max(kept, 1) if MAX else tl.sum(kept, 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], (BT // SIZE, SIZE, DP)), (BT, DP))


@triton.jit
def left_peak(keys, BT: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr):
    """The reference of a level: the maximum of the left half (0 where no token is in it)."""
    peak = over_left(keys, float("-inf"), BT, DP, SIZE, True)
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def level_keys(keys, peak, BT: tl.constexpr, SIZE: tl.constexpr):
    """exp(k - peak) in the left halves, 0 elsewhere."""
    left = left_half(BT, SIZE)[:, None]
    return tl.where(left, tl.exp(tl.where(left, keys - peak, 0.0)), 0.0)


@triton.jit
def level_scale(peak, top, mass, present, BT: tl.constexpr, SIZE: tl.constexpr):
    """exp(peak) / s_t in the right halves, 0 elsewhere."""
    right = (present & (left_half(BT, SIZE) == 0))[:, None]
    return tl.where(right, tl.exp(tl.where(right, peak - top, 0.0)) / mass, 0.0)


@triton.jit
def level_pairs(BT: tl.constexpr, SIZE: tl.constexpr):
    """[t, r]: both in one node, t in its right half, r in its left."""
    step = tl.arange(0, BT)
    node = step // SIZE
    left = left_half(BT, SIZE)
    return (node[:, None] == node[None, :]) & (left[:, None] == 0) & left[None, :]


@triton.jit
def earlier_pairs(BT: tl.constexpr, SIZE: tl.constexpr):
    """`level_pairs` as [r, t]."""
    step = tl.arange(0, BT)
    node = step // SIZE
    left = left_half(BT, SIZE)
    return (node[:, None] == node[None, :]) & left[:, None] & (left[None, :] == 0)


@triton.jit
def exact_mass(keys, before, mass, present, BT: tl.constexpr, DP: tl.constexpr):
    """(R, s): s_t in units of exp(R_t) with R_t the running maximum, no exponent positive."""
    own = tl.where(present[:, None], keys, 0.0)
    top = tl.maximum(own, before[None, :])
    total = tl.exp(own - top) + mass[None, :] * tl.exp(before[None, :] - top)
    for level in tl.static_range(LEVELS):
        right = left_half(BT, 2 << level)[:, None] == 0
        peak = left_peak(keys, BT, DP, 2 << level)
        added = over_left(level_keys(keys, peak, BT, 2 << level), 0.0, BT, DP, 2 << level, False)
        new = tl.where(right, tl.maximum(top, peak), top)
        total = total * tl.exp(top - new) + tl.where(right, added * tl.exp(tl.where(right, peak - new, 0.0)), 0.0)
        top = new
    return top, total


@triton.jit
def read_scale(
    keys, before, mass, unit, target, present, BT: tl.constexpr, DP: tl.constexpr, EXACT: tl.constexpr,
    OP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """exp(target) / s_t for a target that no later running maximum is below; `unit` is the block's mid reference."""
    if EXACT:
        top, total = exact_mass(keys, before, mass, present, BT, DP)
        return tl.where(present[:, None], tl.exp(target[None, :] - top) / total, 0.0)
    else:
        total = running_mass(keys, before, mass, unit, BT, OP, PREC)
        return tl.exp(target - unit)[None, :] / total
