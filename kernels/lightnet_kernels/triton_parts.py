"""Parts shared by the Triton kernels of the additive scan (model-spec 1, "Numerics").

A sequence is cut into blocks of BT tokens. From block to block goes the state; inside a block tokens meet as in
attention, with keys exp(k - unit) and queries phi(q) exp(unit) / s_t. The unit of a block, one number a feature, is half
way up the growth g of the running maximum inside the block, so both factors stay within exp(+-g / 2). A block with a
feature of g above SAFE_GROWTH is flagged and takes the exact form (`triton_exact`), where every exponent is at most 0.

Two units a feature and block: `enter`, in which the block's queries meet the state that they find, and `leave`, in which
later queries meet the block's keys. They are equal but in features of fast growth, where `enter` is the running maximum
at the first token and `leave` that after the last. Units never fall from block to block.

Tiles are [BT, DH] or [BT, VP]: value features are padded to a power of two, query and key features are cut into slices
of DH. Tokens that do not exist have key -inf and query 0; features that do not exist have key 0 and query 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

SAFE_GROWTH = tl.constexpr(80.0)
LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK = 64  # BT


def _interpreter_shim() -> None:
    """Gaps of Triton 3.6's interpreter: it reads loop bounds with int(array of one element), which NumPy 2.4 no longer
    takes; multiplies bfloat16 matrices as the integers that hold their bits; cuts float32 to bfloat16, where a GPU rounds; and
    scans element by element, where a step for all columns at once is fifty times faster."""
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

    def generic_scan(self, operands):
        done = [np.moveaxis(x.handle.data, self.axis, 0).copy() for x in operands]
        for i in range(1, len(done[0])):
            pairs = list(zip(done, operands, strict=True))
            before, here = ([self.to_tensor(x[j], o.dtype) for x, o in pairs] for j in (i - 1, i))
            for x, new in zip(done, self.combine_fn.fn(*before, *here), strict=True):
                x[i] = new.handle.data
        return [self.to_tensor(np.moveaxis(x, 0, self.axis), o.dtype) for x, o in zip(done, operands, strict=True)]

    interpreter.ScanOps.generic_scan = generic_scan
    builder.create_fp_to_fp = lambda self, src, dst_type, rounding: cast_impl(self, src, dst_type)


if triton.knobs.runtime.interpret:
    _interpreter_shim()


@triton.jit
def load_block(blocks_ptr, block):
    """A row of the block table: batch row, first token, tokens, place in its sequence."""
    row = blocks_ptr + block * 4
    return tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def load_rows(ptr, row, stride, col, present, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """One head's rows; 0 where there is no token or no feature."""
    at = ptr + row[:, None] * stride + col[None, :]
    if WIDTH % PADDED == 0:
        return tl.load(at, mask=present[:, None], other=0.0)
    else:
        return tl.load(at, mask=present[:, None] & (col < WIDTH)[None, :], other=0.0)


@triton.jit
def load_keys(ptr, row, stride, col, present, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    if WIDTH % PADDED == 0:
        at = ptr + row[:, None] * stride + col[None, :]
        return tl.load(at, mask=present[:, None], other=float("-inf")).to(tl.float32)
    else:
        keys = load_rows(ptr, row, stride, col, present, WIDTH, PADDED).to(tl.float32)
        return tl.where(present[:, None], keys, float("-inf"))


@triton.jit
def exp(x):
    """exp in two instructions, denormals 0. (tl.exp spends five on denormals, 1 / x eight.)"""
    return tl.exp2(x * LOG2_E)


@triton.jit
def inverse(x):
    """1 / x of x > 0, to three units in the last place; 0 at infinity."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def activated(query, SILU: tl.constexpr):
    query = query.to(tl.float32)
    return query * inverse(1.0 + exp(-query)) if SILU else query


@triton.jit
def activated_over(query, mass, SILU: tl.constexpr):
    """phi(query) / mass with one reciprocal."""
    query = query.to(tl.float32)
    return query * inverse(mass * (1.0 + exp(-query))) if SILU else query * inverse(mass)


@triton.jit
def store_rows(ptr, row, stride, col, present, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    at = ptr + row[:, None] * stride + col[None, :]
    if WIDTH % PADDED == 0:
        tl.store(at, x.to(ptr.dtype.element_ty), mask=present[:, None])
    else:
        tl.store(at, x.to(ptr.dtype.element_ty), mask=present[:, None] & (col < WIDTH)[None, :])


@triton.jit
def load_vector(ptr, col, D: tl.constexpr, DH: tl.constexpr):
    if D % DH == 0:
        return tl.load(ptr + col)
    else:
        return tl.load(ptr + col, mask=col < D, other=0.0)


@triton.jit
def store_vector(ptr, col, x, D: tl.constexpr, DH: tl.constexpr):
    if D % DH == 0:
        tl.store(ptr + col, x)
    else:
        tl.store(ptr + col, x, mask=col < D)


@triton.jit
def load_matrix(ptr, row, col, D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VP: tl.constexpr):
    """Rows of a state's [D, V], padded with zeros."""
    at = ptr + row[:, None] * V + col[None, :]
    if D % DH == 0 and V == VP:
        return tl.load(at)
    else:
        return tl.load(at, mask=(row < D)[:, None] & (col < V)[None, :], other=0.0)


@triton.jit
def store_matrix(ptr, row, col, x, D: tl.constexpr, V: tl.constexpr, DH: tl.constexpr, VP: tl.constexpr):
    at = ptr + row[:, None] * V + col[None, :]
    if D % DH == 0 and V == VP:
        tl.store(at, x.to(ptr.dtype.element_ty))
    else:
        tl.store(at, x.to(ptr.dtype.element_ty), mask=(row < D)[:, None] & (col < V)[None, :])


@triton.jit
def load_angles(ptr, head, row, col, D: tl.constexpr, DH: tl.constexpr, BT: tl.constexpr):
    """cos or sin of the rows' places in their block, from the table [H, BT, D]."""
    at = ptr + (head * BT + row)[:, None] * D + col[None, :]
    if D % DH == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(col < D)[None, :], other=0.0)


@triton.jit
def fade(source, target):
    """exp(source - target) for source <= target; 0 where the source is -inf, also where both are."""
    return tl.where(source == float("-inf"), 0.0, exp(source - target))


@triton.jit
def turned(real, imag, cos, sin):
    """A state's halves with the origin moved on by the angle (model-spec 2, Kc', Ks'). The adjoint: -sin."""
    return real * cos[:, None] + imag * sin[:, None], imag * cos[:, None] - real * sin[:, None]


@triton.jit
def some_flags(flag_ptr, start, total, COUNT: tl.constexpr):
    """Whether any of COUNT (block, head) from `start` on needs the exact form."""
    at = start + tl.arange(0, COUNT)
    return tl.max(tl.load(flag_ptr + at, mask=at < total, other=0), 0) != 0


@triton.jit
def load_triangle(ptr, BT: tl.constexpr):
    """[t, r]: 1 where r <= t. A product with it is a cumulative sum. (Built in registers it costs more than all else
    that is done to a tile of keys.)"""
    step = tl.arange(0, BT)
    return tl.load(ptr + step[:, None] * BT + step[None, :])


@triton.jit
def running_mass(triangle, weight, mass, PREC: tl.constexpr):
    """s_t in the block's unit."""
    return tl.dot(triangle, weight, input_precision=PREC) + mass[None, :]
