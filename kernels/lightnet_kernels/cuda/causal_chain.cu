// Chains of the causal scan's blocks of 64 tokens, forward (the state that every block finds) and with BACKWARD (what all later
// queries ask of the state that a block leaves): what triton_forward's chain_states and triton_backward's chain_grads do, whose
// buffers these are. One block of threads a (span, head, slice of 64 features), the slices of a head side by side.
//
// The state stays in registers for the whole span (causal_state.cuh); what it meets, keys and values or queries and gradients,
// comes by a pipeline of blocks. Angles of places go on by a turn of 8 tokens, from the table's float32.
//
// With UNITS (forward) a chain begins with maxima and sums, not with known units, and also does what triton_units does: units,
// masses and flags of the blocks, whose keys it has on chip, and the last maxima and sums. With SUMS it leaves nothing of
// its blocks, and of a piece, not a span, what the piece adds or asks (triton_span_sums): forward together with maxima and
// sums of its own. Its state does not turn: places count from the block that comes first.
//
// Given by the compiler: BACKWARD, UNITS, SUMS, LRPE; D and V, widths; GROUPED, whether four warps multiply together (sm_90 alone);
// BLOCKS on a multiprocessor, STAGES of the pipeline, WARPS (4 or, with LRPE, 8).

constexpr int BYTES = 2 * (STAGES * SLOT + WARPS * STAGED) + LRPE * 3 * F * THREADS * 8;

extern "C" __device__ int shared_bytes = BYTES;

#define STRIDES(x) i64 x##_b, i64 x##_t, i64 x##_h

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_chain(const u16* left, const u16* right, const int* spans, const float* turns, u16* kept, const u16* found, float* enter,
             float* leave, float* mass, int* flag, const float* top_before, const float* sum_before, float* top_after,
             float* sum_after, float* before, float* after, float* moved, STRIDES(left), STRIDES(right), i64 heads, i64 from) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const i64 which = blockIdx.x / (u32)SLICES, span = which / heads, head = which % heads;
  const int slice = blockIdx.x % (u32)SLICES * SLICE, own = slice + warp * OWN, feature = own + g;
  const int *fields = spans + span * FIELDS, length = fields[2], place = fields[4], blocks = (length + BT - 1) / BT;
  const i64 block = fields[3], sequence = fields[5] * heads + head;
  if (SUMS && (BACKWARD ? place == 0 : fields[6] != 0)) return;  // nobody asks
  // from: 0, nothing; 1, of pieces; 2, of sequences.
  const i64 source = from == 1 ? (i64)fields[BACKWARD ? LAST_PIECE : FIRST_PIECE] * heads + head : sequence;
  const i64 target = SUMS ? which : sequence;
  u16* staged = memory + STAGES * SLOT + warp * STAGED;
  // With LRPE the thread's angles that it does not need at all times: of its first tokens (f, e), and of a block (2 F + f).
  float2* angles = (float2*)(memory + STAGES * SLOT + WARPS * STAGED) + threadIdx.x;
  left += fields[0] * left_b + fields[1] * left_t + head * left_h + slice;
  right += fields[0] * right_b + fields[1] * right_t + head * right_h;
  turns += head * (BT + 1) * (2 * D) + feature;
  kept += (block * heads + head) * STATE + (own + lane / COLUMN_TILES) * V + lane % COLUMN_TILES * 8;
  if (BACKWARD && LRPE) found += (block * heads + head) * STATE + feature * V + 2 * t;
  const i64 next_unit = heads * D, next_state = heads * STATE;

  const Spots spots(lane);
  const int key_spot = spot<BT>(lane & 15, warp * F + (lane >> 4) % F);

  // Blocks in turn, one more with every call.
  constexpr int LEFT_ROWS = THREADS / (SLICE / 8), RIGHT_ROWS = THREADS / COLUMN_TILES;
  const int first = BACKWARD ? blocks - 1 : 0, on = BACKWARD ? -BT : BT;
  left += (first * BT + threadIdx.x / (SLICE / 8)) * left_t + threadIdx.x % (SLICE / 8) * 8;
  right += (first * BT + threadIdx.x / COLUMN_TILES) * right_t + threadIdx.x % COLUMN_TILES * 8;
  int loaded = 0, wanted = length - first * BT;
  auto load = [&](u16* slot) {
    if (loaded < blocks) {
      fetch<SLICE>(slot, left, LEFT_ROWS * left_t, wanted);
      fetch<V>(slot + BT * SLICE, right, RIGHT_ROWS * right_t, wanted);
    }
    commit();
    left += on * left_t, right += on * right_t;
    loaded++, wanted -= on;
  };
#pragma unroll
  for (int i = 0; i < PREFETCHED; i++) load(memory + i * SLOT);

  // The chain's own numbers; of features g (and g + 8) of the warp's.
  State state;
  Each enters, leaves, sum, top, total;  // the last two, with UNITS, of all earlier keys
  float2 factor[F], step[F], base[F];    // step: of 8 tokens; base: with SUMS, of a block's first token
  u32 all_peaks[F];                      // with UNITS and SUMS, the lane's
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) state[m][j][e] = 0.f;
  i64 unit_at = ((block + first) * heads + head) * D + feature;
  kept += first * next_state;
  if (BACKWARD && LRPE) found += first * next_state;
#pragma unroll
  for (int f = 0; f < F; f++) {
    sum[f] = 0.f, base[f] = pair_of(1.f, 0.f), top[f] = -INFINITE, total[f] = 0.f, all_peaks[f] = NO_KEYS;
    if (UNITS) {
      if (from) top[f] = top_before[source * D + feature + f * 8], total[f] = sum_before[source * D + feature + f * 8];
      leaves[f] = top[f];
    } else {
      enters[f] = enter[unit_at + f * 8], leaves[f] = SUMS ? enters[f] : leave[unit_at + f * 8];
    }
    if (!LRPE) continue;
    float2 two = turn_by(turns, BT, f);
    if (BACKWARD) two.y = -two.y;
    angles[(2 * F + f) * THREADS] = two;
    step[f] = turn_by(turns, 8, f);
#pragma unroll
    for (int e = 0; e < 2; e++) angles[(2 * f + e) * THREADS] = turn_by(turns, 2 * t + e, f);
  }
  const bool earlier = !BACKWARD && !UNITS && from == 1 && place > 0;  // the unit is that of the block before
  if (!SUMS && from && (BACKWARD || earlier || top_before)) {
    move<true>(state, before + source * STATE + feature * V + 2 * t);
    if (!UNITS) {
      const int rest = length - first * BT;
#pragma unroll
      for (int f = 0; f < F; f++) {
        factor[f] = pair_of(1.f, 0.f);
        if (BACKWARD && LRPE) factor[f] = turn_by(turns, rest, f), factor[f].y = -factor[f].y;
        if (!BACKWARD) factor[f].x = fade(earlier ? leave[unit_at + f * 8 - next_unit] : top_before[sequence * D + feature + f * 8], enters[f]);
      }
      turn(state, factor);
    }
  }

  int slot = 0, rest = length - first * BT;
#pragma unroll 1
  for (int left_over = blocks; left_over > 0; left_over--) {
    arrived<PREFETCHED - 1>();
    if (GROUPED) copies_fence();
    __syncthreads();
    load(memory + (slot + PREFETCHED) % STAGES * SLOT);
    u16* tokens = memory + slot * SLOT;
    const u16* values = tokens + BT * SLICE;
    if (!BACKWARD && rest < BT) {  // rows of no token have come as 0
      uint4 none;
      none.x = none.y = none.z = none.w = NO_KEYS;
#pragma unroll 1
      for (int at = rest * SLICE + threadIdx.x * 8; at < BT * SLICE; at += THREADS * 8) *(uint4*)(tokens + at) = none;
      __syncthreads();
    }
    slot = slot + 1 < STAGES ? slot + 1 : 0;
    u32 keys[BT / 16][4];
#pragma unroll
    for (int k = 0; k < BT / 16 * (UNITS || SUMS); k++) load_keys(keys[k], tokens + k * 16 * 64 + key_spot);
    u32 peaks[F];
#pragma unroll
    for (int f = 0; f < F * UNITS; f++) {
      peaks[f] = larger2(keys[0][2 * f], keys[0][2 * f + 1]);
#pragma unroll
      for (int k = 1; k < BT / 16; k++) peaks[f] = larger2(peaks[f], larger2(keys[k][2 * f], keys[k][2 * f + 1]));
    }
    if (UNITS && SUMS) {
      bool higher = false;
#pragma unroll
      for (int f = 0; f < F; f++) {
        all_peaks[f] = larger2(all_peaks[f], peaks[f]);
        higher |= (fmaxf(low(peaks[f]), high(peaks[f])) - leaves[f]) * LOG2E > HIGHEST;
      }
      finish(state);
      if (some(higher)) {
#pragma unroll
        for (int f = 0; f < F; f++) {
          const float now = highest(all_peaks[f]);
          factor[f].x = fade(leaves[f], now);
          leaves[f] = now, total[f] *= factor[f].x;
        }
        rescale(state, factor);
      }
    } else if (UNITS) {
      bool flagged = false;
#pragma unroll
      for (int f = 0; f < F; f++) {
        const float peak = highest(peaks[f]);
        const float begin = fmaxf(top[f], low(tokens[(warp * F + f) * 8 + g])), end = fmaxf(top[f], peak);
        const bool fast = end - begin > SAFE_GROWTH;
        enters[f] = fast ? begin : begin + 0.5f * (end - begin);
        const float faded = fade(leaves[f], enters[f]);
        leaves[f] = fast ? end : enters[f];
        factor[f] = pair_of(faded, 0.f);
        if (LRPE && left_over < blocks) factor[f] = scaled(angles[(2 * F + f) * THREADS], faded);  // the first one is in place
        if (t == 0) {
          const i64 at = unit_at + f * 8;
          enter[at] = enters[f], leave[at] = leaves[f], mass[at] = total[f] * fade(top[f], enters[f]);
        }
        total[f] *= fade(top[f], end);
        top[f] = end;
        flagged |= fast;
      }
      if (some(flagged) && lane == 0) flag[unit_at / D] = 1;
      turn(state, factor);
    }
    if (!SUMS) store(state, staged, spots, kept, lane);
    if (!(UNITS && SUMS)) {
      if (SUMS) finish(state);
#pragma unroll
      for (int f = 0; f < F; f++) factor[f].x = exp2_of((enters[f] - leaves[f]) * LOG2E);
      rescale(state, factor);
    }
    // To the next block's unit and place.
    unit_at += on / BT * next_unit, kept += on / BT * next_state;
    Each next_enters, next_leaves, added;
#pragma unroll
    for (int f = 0; f < F * !UNITS; f++)
      if (left_over > 1) next_enters[f] = enter[unit_at + f * 8], next_leaves[f] = SUMS ? 0.f : leave[unit_at + f * 8];
    float2 run[F][2];  // cosine and sine of the lane's next two tokens
#pragma unroll
    for (int f = 0; f < F; f++) {
      added[f] = 0.f;
#pragma unroll
      for (int e = 0; e < 2 * LRPE; e++) {
        run[f][e] = angles[(2 * f + e) * THREADS];
        if (SUMS) run[f][e] = product(run[f][e], base[f]);
      }
    }
#pragma unroll
    for (int k = 0; k < BT; k += 16) {
      u32 operand[TILES][4], *r = keys[k / 16];
      if (!SUMS) load_keys(r, tokens + k * 64 + key_spot);
      weigh(operand, r, leaves, run, step, added);
      multiply(state, operand, values + k * 64, spots);
    }
    if (!SUMS) finish(state);
    if (BACKWARD && LRPE && !SUMS) {
      const int at = place + left_over - 1;
      if (at % WINDOW == 0 && at > 0) {
#pragma unroll
        for (int f = 0; f < F; f++)
#pragma unroll
          for (int j = 0; j < COLUMN_TILES; j++) {
            const u32 real = *(const u32*)(found + f * 8 * V + j * 8), imag = *(const u32*)(found + (D + f * 8) * V + j * 8);
            const float *asked_real = pair(state, f, 0, j), *asked_imag = pair(state, f, 1, j);
            sum[f] += low(imag) * asked_real[0] - low(real) * asked_imag[0];
            sum[f] += high(imag) * asked_real[1] - high(real) * asked_imag[1];
          }
      }
      found -= next_state;
    }
#pragma unroll
    for (int f = 0; f < F * (UNITS && SUMS); f++) total[f] += added[f];  // the lane's
    if (UNITS && !SUMS) {
#pragma unroll
      for (int f = 0; f < F; f++) {
        added[f] += exchanged(added[f], 1);
        added[f] += exchanged(added[f], 2);
        total[f] += added[f] * exp2_of((leaves[f] - top[f]) * LOG2E);
      }
    }
    if (left_over == 1) break;
    rest -= on;
#pragma unroll
    for (int f = 0; f < F * (LRPE && SUMS); f++) base[f] = product(base[f], angles[(2 * F + f) * THREADS]);
    if (UNITS) continue;
#pragma unroll
    for (int f = 0; f < F; f++) {
      const float faded = BACKWARD ? exp2_of((next_leaves[f] - enters[f]) * LOG2E) : fade(leaves[f], next_enters[f]);
      factor[f] = LRPE ? scaled(angles[(2 * F + f) * THREADS], faded) : pair_of(faded, 0.f);
      leaves[f] = SUMS ? enters[f] : next_leaves[f];  // sums go from one block's enter to the next one's
      enters[f] = next_enters[f];
    }
    if (!SUMS) turn(state, factor);
  }

  if (SUMS) finish(state);
#pragma unroll
  for (int f = 0; f < F * (UNITS && SUMS); f++) {
    top[f] = highest(all_peaks[f]);
    total[f] *= fade(leaves[f], top[f]);
    total[f] += exchanged(total[f], 1);
    total[f] += exchanged(total[f], 2);
  }
  if (BACKWARD && LRPE && !SUMS) {
#pragma unroll
    for (int f = 0; f < F; f++) {
      sum[f] += exchanged(sum[f], 1);
      sum[f] += exchanged(sum[f], 2);
      if (t == 0) moved[which * D + feature + f * 8] = sum[f] * (WINDOW * BT);
    }
  }
  if (!after || (!SUMS && (BACKWARD ? place != 0 : fields[6] == 0))) return;
#pragma unroll
  for (int f = 0; f < F; f++) {
    const i64 at = target * D + feature + f * 8;
    if (UNITS && t == 0) top_after[at] = top[f], sum_after[at] = total[f];
    const float faded = BACKWARD ? 1.f : exp2_of((leaves[f] - (UNITS ? top[f] : top_after[at])) * LOG2E);
    if (LRPE && !BACKWARD) base[f] = product(base[f], turn_by(turns, rest, f));
    factor[f] = scaled(base[f], faded);
  }
  if (SUMS || !BACKWARD) turn(state, factor);
  move<false>(state, after + target * STATE + feature * V + 2 * t);
}
