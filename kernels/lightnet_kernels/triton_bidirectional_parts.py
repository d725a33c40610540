"""Triton kernels of the bidirectional one-scan form (model-spec 1 and 2), driven by `triton_bidirectional_scan`.

Per head, with w_tj = exp(k_tj - m_j) / S_j over all tokens, e = phi or w, and doubled features e~ = [e cos, e sin]:
forward G = w~^T v and o = phi~ G; backward, from do, dG = phi~^T do, dphi~ = do G^T, dv = w~ dG, dw~ = v dG^T and
dk = w (dw - p) with p_j = sum_t w_tj dw_tj = sum_v G_jv dG_jv, for which no tokens are read. The maximum m over a whole
sequence is known before any weight is used, so no exponent is positive and keys of any size are safe.

A program walks over one piece of a sequence in blocks of BT tokens. Where there are heads enough the piece is the
sequence, and the fused kernels read every token once and write it once; else the pieces' sums are merged in between.

Widths need not be powers of two: features and values are cut in one or two tiles, FW and VW, such as (64, 16) for 72.
Sets of tiles are tuples, [feature tile][value tile] side by side. Padded features are 0 in G and in phi.
Angles take no table: theta is given in turns, as the integer nearest to 2^32 theta / (2 pi) and a float32 remainder, so
that integer arithmetic reduces position times theta exactly.
"""

# ruff: noqa: RUF005 (Triton's language has no starred tuples)
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import activated  # importing it mends the interpreter

TURN = tl.constexpr(6.283185307179586 / 2**32)
PIECE_FIELDS = tl.constexpr(4)  # first token of its sequence, first token, tokens, sequence


@triton.jit
def find_piece(table, piece, splits, length, tokens, TABLE: tl.constexpr):
    """Batch row, (first token of the sequence, first token, number of tokens) and sequence of a piece."""
    if TABLE:
        row = table + piece * PIECE_FIELDS
        return piece * 0, (tl.load(row), tl.load(row + 1), tl.load(row + 2)), tl.load(row + 3)
    else:
        first = (piece % splits) * length
        return piece // splits, (0, first, tl.minimum(length, tokens - first)), piece // splits


@triton.jit
def row_of(ptr, batch, head, token, batch_stride, token_stride, head_stride, ALIGN: tl.constexpr):
    """A head at the first token of a piece. Strides come divided by ALIGN: so the compiler knows what divides them,
    16 bytes at a time, even for 72 features."""
    row = batch.to(tl.int64) * (batch_stride * ALIGN) + token.to(tl.int64) * (token_stride * ALIGN)
    return ptr + row + head * (head_stride * ALIGN)


@triton.jit
def block(window, start, mask, BT: tl.constexpr, MASK: tl.constexpr):
    """Tokens of a block, whether they lie in the piece, and whether they exist."""
    step = tl.arange(0, BT)
    inside = start + step < window[2]
    token = window[1] + start + step
    present = inside
    if MASK:
        present = inside & (tl.load(mask + token, mask=inside, other=0) != 0)
    return token, inside, present


@triton.jit
def load_tile(
    ptr, start, stride, present, col, BT: tl.constexpr, W: tl.constexpr, FULL: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    at = ptr + tl.cast(start, tl.int64) * stride + tl.arange(0, BT)[:, None] * stride + col[None, :]
    if FULL:
        return tl.load(at, mask=present[:, None], other=0.0)
    else:
        return tl.load(at, mask=present[:, None] & (col < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(ptr, start, stride, inside, col, x, BT: tl.constexpr, WIDTH: tl.constexpr):
    at = ptr + tl.cast(start, tl.int64) * stride + tl.arange(0, BT)[:, None] * stride + col[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside[:, None] & (col < WIDTH)[None, :])


@triton.jit
def load_tiles(ptr, start, stride, present, BT: tl.constexpr, WS: tl.constexpr, WIDTH: tl.constexpr, OP: tl.constexpr):
    """All columns of a block, as operands: a tuple of tiles."""
    tiles = ()
    for j in tl.static_range(len(WS)):
        col = j * WS[0] + tl.arange(0, WS[j])
        tile = load_tile(ptr, start, stride, present, col, BT, WS[j], j * WS[0] + WS[j] <= WIDTH, WIDTH)
        tiles = tiles + (tile.to(OP),)
    return tiles


@triton.jit
def zero(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def zeros(RS: tl.constexpr, CS: tl.constexpr):
    tiles = ()
    for i in tl.static_range(len(RS)):
        for j in tl.static_range(len(CS)):
            tiles = tiles + (zero(RS[i], CS[j]),)
    return tiles


@triton.constexpr_function
def sideways(W):
    """Sums over tokens put features on the rows of the product, where the hardware has 64: fewer lie sideways."""
    return W < 64


@triton.constexpr_function
def tile_at(i, FW, VW):
    """Where row i begins among the tiles of `sums`."""
    return sum(1 if W < 64 else len(VW) for W in FW[:i])


@triton.constexpr_function
def padded(VW):
    return max(64, 2 * VW[0]) if len(VW) > 1 else VW[0]


@triton.jit
def sums(FW: tl.constexpr, VW: tl.constexpr):
    """A state as it is summed: [FW[i], VW[j]] tiles, but [all values, FW[i]] for a narrow feature tile."""
    tiles = ()
    for i in tl.static_range(len(FW)):
        if sideways(FW[i]):
            tiles = tiles + (zero(padded(VW), FW[i]),)
        else:
            for j in tl.static_range(len(VW)):
                tiles = tiles + (zero(FW[i], VW[j]),)
    return tiles


@triton.jit
def vector(fill, W: tl.constexpr):
    return tl.full((W,), fill, tl.float32)


@triton.jit
def vectors(fill, WS: tl.constexpr):
    tiles = ()
    for i in tl.static_range(len(WS)):
        tiles = tiles + (vector(fill, WS[i]),)
    return tiles


@triton.jit
def load_vectors(ptr, first, WS: tl.constexpr, WIDTH: tl.constexpr):
    tiles = ()
    for i in tl.static_range(len(WS)):
        col = first + i * WS[0] + tl.arange(0, WS[i])
        tiles = tiles + (tl.load(ptr + col, mask=col < WIDTH, other=0.0),)
    return tiles


@triton.jit
def store_vectors(ptr, first, x, WS: tl.constexpr, WIDTH: tl.constexpr):
    for i in tl.static_range(len(WS)):
        col = first + i * WS[0] + tl.arange(0, WS[i])
        tl.store(ptr + col, x[i], mask=col < WIDTH)


@triton.jit
def matrix_at(ptr, first, i: tl.constexpr, j: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, D, V):
    row = first + i * FW[0] + tl.arange(0, FW[i])
    col = j * VW[0] + tl.arange(0, VW[j])
    return ptr + row[:, None] * V + col[None, :], (row < D)[:, None] & (col < V)[None, :]


@triton.jit
def load_matrix(ptr, first, FW: tl.constexpr, VW: tl.constexpr, D: tl.constexpr, V: tl.constexpr):
    """One half (cosine or sine) of a state, [D, V], from feature `first` on."""
    tiles = ()
    for i in tl.static_range(len(FW)):
        for j in tl.static_range(len(VW)):
            at, mask = matrix_at(ptr, first, i, j, FW, VW, D, V)
            tiles = tiles + (tl.load(at, mask=mask, other=0.0),)
    return tiles


@triton.jit
def sideways_at(ptr, first, i: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, D, V):
    row = first + i * FW[0] + tl.arange(0, FW[i])
    col = tl.arange(0, padded(VW))
    return ptr + row[None, :] * V + col[:, None], (row < D)[None, :] & (col < V)[:, None]


@triton.jit
def store_sums(ptr, first, x, FW: tl.constexpr, VW: tl.constexpr, D: tl.constexpr, V: tl.constexpr):
    for i in tl.static_range(len(FW)):
        if sideways(FW[i]):
            at, mask = sideways_at(ptr, first, i, FW, VW, D, V)
            tl.store(at, x[tile_at(i, FW, VW)].to(ptr.dtype.element_ty), mask=mask)
        else:
            for j in tl.static_range(len(VW)):
                at, mask = matrix_at(ptr, first, i, j, FW, VW, D, V)
                tl.store(at, x[tile_at(i, FW, VW) + j].to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def products_with(ptr, x, FW: tl.constexpr, VW: tl.constexpr, D: tl.constexpr, V: tl.constexpr, totals):
    """totals + the sum over values of a state in memory times the sums x, for every feature."""
    results = ()
    for i in tl.static_range(len(FW)):
        total = totals[i]
        if sideways(FW[i]):
            at, mask = sideways_at(ptr, 0, i, FW, VW, D, V)
            total += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32) * x[tile_at(i, FW, VW)], 0)
        else:
            for j in tl.static_range(len(VW)):
                at, mask = matrix_at(ptr, 0, i, j, FW, VW, D, V)
                total += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32) * x[tile_at(i, FW, VW) + j], 1)
        results = results + (total,)
    return results


@triton.jit
def scaled(x, rows, FW: tl.constexpr, VW: tl.constexpr):
    """Sums, those of each feature times a factor."""
    tiles = ()
    for i in tl.static_range(len(FW)):
        if sideways(FW[i]):
            tiles = tiles + (x[tile_at(i, FW, VW)] * rows[i][None, :],)
        else:
            for j in tl.static_range(len(VW)):
                tiles = tiles + (x[tile_at(i, FW, VW) + j] * rows[i][:, None],)
    return tiles


@triton.jit
def load_state(
    ptr, first, FW: tl.constexpr, VW: tl.constexpr, D: tl.constexpr, V: tl.constexpr, LRPE: tl.constexpr
):  # fmt: skip
    cosine = load_matrix(ptr, first, FW, VW, D, V)
    if LRPE:
        return cosine, load_matrix(ptr + D * V, first, FW, VW, D, V)
    else:
        return cosine, ()


@triton.jit
def store_state(
    ptr, first, x, FW: tl.constexpr, VW: tl.constexpr, D: tl.constexpr, V: tl.constexpr, LRPE: tl.constexpr
):  # fmt: skip
    store_sums(ptr, first, x[0], FW, VW, D, V)
    if LRPE:
        store_sums(ptr + D * V, first, x[1], FW, VW, D, V)


@triton.constexpr_function
def full(i, FW, NF, D):
    """Whether feature tile i has no padding; NF blocks of features are programs."""
    return sum(FW) * NF == D if NF > 1 else i * FW[0] + FW[i] <= D


@triton.jit
def places(places_ptr, token, window, present, col, D: tl.constexpr, AXES: tl.constexpr):
    """Coordinate of each token, [BT, 1], or with several axes of each (token, feature), [BT, W]. AXES 0: its place."""
    if AXES == 0:
        return (token - window[0])[:, None]
    else:
        place = tl.load(places_ptr + token * AXES, mask=present, other=0)[:, None]
        for axis in tl.static_range(1, AXES):
            other = tl.load(places_ptr + token * AXES + axis, mask=present, other=0)
            place = tl.where((col >= axis * (D // AXES))[None, :], other[:, None], place)
        return place


@triton.jit
def turn(place, theta, remainder, col, D: tl.constexpr, APPROX: tl.constexpr):
    """cos and sin of place times theta."""
    turns = tl.load(theta + col, mask=col < D, other=0)
    angle = (place * turns[None, :]).to(tl.float32) * TURN
    if remainder is not None:
        rest = tl.load(remainder + col, mask=col < D, other=0.0)
        angle += place.to(tl.float32) * rest[None, :]
    if APPROX:  # of a reduced angle good to 2^-20; the accurate functions cost many times as much
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        return cos, sin
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def add_products(
    left, right, wide, tiles, i: tl.constexpr, keep, FW: tl.constexpr, VW: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """Row i of the sums `tiles`, times keep by feature, plus left^T @ right."""
    results = ()
    if sideways(FW[i]):
        result = tl.dot(tl.trans(wide[0]), left, tiles[tile_at(i, FW, VW)] * keep[None, :], input_precision=PREC)
        results = results + (result,)
    else:
        for j in tl.static_range(len(VW)):
            result = tl.dot(
                tl.trans(left), right[j], tiles[tile_at(i, FW, VW) + j] * keep[:, None], input_precision=PREC
            )
            results = results + (result,)
    return results


@triton.jit
def load_wide(
    ptr, start, stride, present, right, BT: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, WIDTH: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """All columns in one tile where a feature tile is narrow (a copy out of the cache), else nothing."""
    if len(FW) > 1 and sideways(FW[len(FW) - 1]):
        if len(VW) == 1:
            return right
        else:
            col = tl.arange(0, padded(VW))
            return (load_tile(ptr, start, stride, present, col, BT, padded(VW), padded(VW) <= WIDTH, WIDTH).to(OP),)
    else:
        return ()


@triton.jit
def like(x, product, APPROX: tl.constexpr):
    """x, laid out as the result of a product is. Left to itself the compiler does all that hangs on x twice, once in
    the layout of the load and once in this one."""
    if APPROX:
        return tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f,f", [x, product], tl.float32, True, 1)
    else:
        return x


@triton.jit
def collect(
    key, value, key_stride, value_stride, window, theta, remainder, places_ptr, mask, first,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, NF: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, MASK: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    APPROX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maximum, mass and weighted values of a piece, the latter two in units of exp(maximum)."""
    peak, mass = vectors(float("-inf"), FW), vectors(0.0, FW)
    cosine = sums(FW, VW)
    sine = sums(FW, VW) if LRPE else ()
    for start in tl.range(0, window[2], BT, num_stages=STAGES):
        token, _, present = block(window, start, mask, BT, MASK)
        values = load_tiles(value, start, value_stride, present, BT, VW, V, OP)
        wide = load_wide(value, start, value_stride, present, values, BT, FW, VW, V, OP)
        new_peak, new_mass, new_cosine, new_sine = (), (), (), ()
        for i in tl.static_range(len(FW)):
            col = first + i * FW[0] + tl.arange(0, FW[i])
            keys = load_tile(key, start, key_stride, present, col, BT, FW[i], full(i, FW, NF, D), D).to(tl.float32)
            keys = tl.where(present[:, None], keys, float("-inf"))
            top = tl.maximum(peak[i], tl.max(keys, 0))
            unit = tl.where(top == float("-inf"), 0.0, top)
            keep = tl.exp(peak[i] - unit)
            weight = tl.exp(keys - unit[None, :])
            new_peak = new_peak + (top,)
            new_mass = new_mass + (mass[i] * keep + tl.sum(weight, 0),)
            if LRPE:
                place = places(places_ptr, token, window, present, col, D, AXES)
                cos, sin = turn(place, theta, remainder, col, D, APPROX)
                left = (weight * sin).to(OP)
                new_sine = new_sine + add_products(left, values, wide, sine, i, keep, FW, VW, PREC)
                weight = weight * cos
            new_cosine = new_cosine + add_products(weight.to(OP), values, wide, cosine, i, keep, FW, VW, PREC)
        peak, mass, cosine, sine = new_peak, new_mass, new_cosine, new_sine
    return peak, mass, (cosine, sine)


@triton.jit
def read_products(left, state, i: tl.constexpr, results, VW: tl.constexpr, PREC: tl.constexpr):
    """results + left @ row i of the state, by value tile."""
    new = ()
    for j in tl.static_range(len(VW)):
        new = new + (tl.dot(left, state[i * len(VW) + j], results[j], input_precision=PREC),)
    return new


@triton.jit
def back_products(
    left, state, i: tl.constexpr, BT: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, PREC: tl.constexpr
):
    """left @ (row i of the state)^T: the gradient of a doubled feature, [BT, FW[i]]."""
    result = zero(BT, FW[i])
    for j in tl.static_range(len(VW)):
        result = tl.dot(left[j], tl.trans(state[i * len(VW) + j]), result, input_precision=PREC)
    return result


@triton.jit
def read(
    query, output, query_stride, output_stride, window, theta, remainder, places_ptr, mask, held, state_ptr,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, MASK: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    APPROX: tl.constexpr, SILU: tl.constexpr, RELOAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs of a piece from the whole sequence's G: `held`, or, where it is too large to hold, loaded each time."""
    for start in tl.range(0, window[2], BT, num_stages=STAGES):
        token, inside, present = block(window, start, mask, BT, MASK)
        outputs = zeros((BT,), VW)
        for i in tl.static_range(len(FW)):
            col = i * FW[0] + tl.arange(0, FW[i])
            phi = activated(load_tile(query, start, query_stride, present, col, BT, FW[i], full(i, FW, 1, D), D), SILU)
            state = load_state(state_ptr, 0, FW, VW, D, V, LRPE) if RELOAD else held
            if LRPE:
                place = places(places_ptr, token, window, present, col, D, AXES)
                cos, sin = turn(place, theta, remainder, col, D, APPROX)
                outputs = read_products((phi * sin).to(OP), state[1], i, outputs, VW, PREC)
                phi = phi * cos
            outputs = read_products(phi.to(OP), state[0], i, outputs, VW, PREC)
        for j in tl.static_range(len(VW)):
            col = j * VW[0] + tl.arange(0, VW[j])
            store_tile(output, start, output_stride, inside, col, outputs[j], BT, V)


@triton.jit
def state_grads(
    query, grad, query_stride, grad_stride, window, theta, remainder, places_ptr, mask, first,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, NF: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, MASK: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    APPROX: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dG of a piece."""
    cosine = sums(FW, VW)
    sine = sums(FW, VW) if LRPE else ()
    for start in tl.range(0, window[2], BT, num_stages=STAGES):
        token, _, present = block(window, start, mask, BT, MASK)
        grads = load_tiles(grad, start, grad_stride, present, BT, VW, V, OP)
        wide = load_wide(grad, start, grad_stride, present, grads, BT, FW, VW, V, OP)
        new_cosine, new_sine = (), ()
        for i in tl.static_range(len(FW)):
            col = first + i * FW[0] + tl.arange(0, FW[i])
            phi = activated(load_tile(query, start, query_stride, present, col, BT, FW[i], full(i, FW, NF, D), D), SILU)
            ones = vector(1.0, FW[i])
            if LRPE:
                place = places(places_ptr, token, window, present, col, D, AXES)
                cos, sin = turn(place, theta, remainder, col, D, APPROX)
                new_sine = new_sine + add_products((phi * sin).to(OP), grads, wide, sine, i, ones, FW, VW, PREC)
                phi = phi * cos
            new_cosine = new_cosine + add_products(phi.to(OP), grads, wide, cosine, i, ones, FW, VW, PREC)
        cosine, sine = new_cosine, new_sine
    return cosine, sine


@triton.jit
def query_grads(
    query, grad, grad_query, query_stride, grad_stride, grad_query_stride, window, theta, remainder, places_ptr, mask,
    first, held, state_ptr,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, NF: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, MASK: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    APPROX: tl.constexpr, SILU: tl.constexpr, RELOAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradient of q. A loop of its own: with the sums of `state_grads` beside it the registers would not do, and its
    second reading of a piece comes out of the cache. Returns the torque (theta's gradient)."""
    torque = vectors(0.0, FW)
    for start in tl.range(0, window[2], BT, num_stages=STAGES):
        token, inside, present = block(window, start, mask, BT, MASK)
        grads = load_tiles(grad, start, grad_stride, present, BT, VW, V, OP)
        new_torque = ()
        for i in tl.static_range(len(FW)):
            col = first + i * FW[0] + tl.arange(0, FW[i])
            state = load_state(state_ptr, first, FW, VW, D, V, LRPE) if RELOAD else held
            grad_phi = back_products(grads, state[0], i, BT, FW, VW, PREC)
            q = load_tile(query, start, query_stride, present, col, BT, FW[i], full(i, FW, NF, D), D).to(tl.float32)
            q = like(q, grad_phi, APPROX)
            gate = tl.sigmoid(q) if SILU else 1.0
            if LRPE:
                place = places(places_ptr, token, window, present, col, D, AXES)
                cos, sin = turn(place, theta, remainder, col, D, APPROX)
                other = back_products(grads, state[1], i, BT, FW, VW, PREC)
                moved = place.to(tl.float32) * (q * gate) * (cos * other - sin * grad_phi)
                new_torque = new_torque + (torque[i] + tl.sum(moved, 0),)
                grad_phi = grad_phi * cos + other * sin
            if SILU:
                grad_phi = grad_phi * gate * (1.0 + q * (1.0 - gate))
            store_tile(grad_query, start, grad_query_stride, inside, col, grad_phi, BT, D)
        if LRPE:
            torque = new_torque
    return torque


@triton.jit
def weight_grads(
    key, value, grad_key, grad_value, key_stride, value_stride, grad_key_stride, grad_value_stride, window, theta,
    remainder, places_ptr, mask, peak, norm, pressure, held, state_ptr,
    D: tl.constexpr, V: tl.constexpr, FW: tl.constexpr, VW: tl.constexpr, BT: tl.constexpr,
    LRPE: tl.constexpr, AXES: tl.constexpr, MASK: tl.constexpr, OP: tl.constexpr, PREC: tl.constexpr,
    APPROX: tl.constexpr, RELOAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of k and v from dG and p (`pressure`), the weights being exp(k - peak) norm, with norm () for 1; returns
    the torque."""
    torque = vectors(0.0, FW)
    for start in tl.range(0, window[2], BT, num_stages=STAGES):
        token, inside, present = block(window, start, mask, BT, MASK)
        values = load_tiles(value, start, value_stride, present, BT, VW, V, OP)
        grads = zeros((BT,), VW)
        new_torque = ()
        for i in tl.static_range(len(FW)):
            col = i * FW[0] + tl.arange(0, FW[i])
            state = load_state(state_ptr, 0, FW, VW, D, V, LRPE) if RELOAD else held
            grad_weight = back_products(values, state[0], i, BT, FW, VW, PREC)
            keys = load_tile(key, start, key_stride, present, col, BT, FW[i], full(i, FW, 1, D), D).to(tl.float32)
            keys = tl.where(present[:, None], like(keys, grad_weight, APPROX), float("-inf"))
            weight = tl.exp(keys - peak[i][None, :])
            if len(norm) > 0:
                weight = weight * norm[i][None, :]
            turned = weight
            if LRPE:
                place = places(places_ptr, token, window, present, col, D, AXES)
                cos, sin = turn(place, theta, remainder, col, D, APPROX)
                other = back_products(values, state[1], i, BT, FW, VW, PREC)
                grads = read_products((weight * sin).to(OP), state[1], i, grads, VW, PREC)
                moved = place.to(tl.float32) * weight * (cos * other - sin * grad_weight)
                new_torque = new_torque + (torque[i] + tl.sum(moved, 0),)
                grad_weight = grad_weight * cos + other * sin
                turned = weight * cos
            grads = read_products(turned.to(OP), state[0], i, grads, VW, PREC)
            result = weight * (grad_weight - pressure[i][None, :])
            store_tile(grad_key, start, grad_key_stride, inside, col, result, BT, D)
        for j in tl.static_range(len(VW)):
            col = j * VW[0] + tl.arange(0, VW[j])
            store_tile(grad_value, start, grad_value_stride, inside, col, grads[j], BT, V)
        if LRPE:
            torque = new_torque
    return torque
