// Chains of the causal scan's blocks of 64 tokens, forward (the state that every block finds) and with BACKWARD (what all later
// queries ask of the state that a block leaves): what triton_forward's chain_states and triton_backward's chain_grads do, whose
// buffers these are. One block of threads a (span, head, slice of 64 features), the slices of a head side by side.
//
// A warp holds 16 features of the state, with LRPE both halves, and all value features in registers for the whole span. A
// product's left operand, keys' weights or queries turned by their places, is made in the registers in which the product
// wants it. Lanes are those of short_scan.cuh: (g, t) = (lane / 4, lane % 4), and with LRPE a tile of 16 rows is 8 cosines,
// then 8 sines, so that both halves of a feature belong to one lane and states turn without an exchange. Places go from t
// to t by a turn of 8 tokens, from the table's float32.
//
// With UNITS (forward) a chain begins with maxima and sums, not with known units, and also does what triton_units does: units,
// masses and flags of the blocks, whose keys it has on chip, and the last maxima and sums. With SUMS it leaves nothing of
// its blocks, and of a piece, not a span, what the piece adds or asks (triton_span_sums): forward together with maxima and
// sums of its own. Its state does not turn: places count from the block that comes first.
//
// Given by the compiler: BACKWARD, UNITS, SUMS, LRPE; D and V, widths; GROUPED, whether four warps multiply together (sm_90 alone);
// BLOCKS on a multiprocessor, STAGES of the pipeline, WARPS (4 or, with LRPE, 8).

constexpr float LOG2E = 1.4426950408889634f, SAFE_GROWTH = 80.f;
constexpr u32 NO_KEYS = 0xff80ff80u;  // -inf
constexpr float HIGHEST = 16.f;  // of sums: a weight may reach 2^16 before their unit moves
constexpr int IN_FLIGHT = 1;     // products that a warp does not wait for
constexpr int BT = 64, WINDOW = 4, FIELDS = 9, FIRST_PIECE = 7, LAST_PIECE = 8;
constexpr int SLICE = 64, OWN = SLICE / WARPS, SLICES = D / SLICE, THREADS = 32 * WARPS;
constexpr int F = OWN / 8;  // features of a lane
constexpr int HALVES = LRPE ? 2 : 1, TILES = LRPE ? F : 1, COLUMN_TILES = V / 8;
static_assert(LRPE || F == 2, "a tile is 16 features");
constexpr int STATE = HALVES * D * V;  // numbers of a head's state in memory
constexpr int PREFETCHED = STAGES - 1 - (SUMS && GROUPED);  // blocks: those of sums are still read in the next block's time
constexpr int SLOT = BT * (SLICE + V), STAGED = SUMS ? 0 : HALVES * OWN * V;
constexpr int BYTES = 2 * (STAGES * SLOT + WARPS * STAGED) + LRPE * 3 * F * THREADS * 8;

extern "C" __device__ int shared_bytes = BYTES;

// Where 16 bytes of a row lie in shared memory: in panels of 64 columns and ROWS rows, and those of eight rows that are read at
// once in different banks.
template <int ROWS> DEVICE int spot(int row, int chunk) { return chunk / 8 * ROWS * 64 + row * 64 + ((chunk % 8 ^ (row & 7)) << 3); }

// Of rows that a lane reads or writes by tiles, lane % 16 of 16 and chunks j, j + 1: the lane's place in each of four j.
struct Spots {
  int at[4];

  DEVICE Spots(int lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) at[i] = spot<0>(lane & 15, 2 * i + (lane >> 4));
  }
  template <int ROWS> DEVICE int of(int j) const { return at[j / 2 % 4] + j / 8 * ROWS * 64; }
};

// Rows [BT, WIDTH] from memory behind the threads' backs; from row `there` on 0. `from`: the thread's own 16 bytes of the
// first rows, `step` the way to the next ones.
template <int WIDTH> DEVICE void fetch(u16* to, const u16* from, i64 step, int there) {
  constexpr int CHUNKS = WIDTH / 8, ROWS = THREADS / CHUNKS;  // at a time
  const int row = threadIdx.x / CHUNKS, at = spot<BT>(row, threadIdx.x % CHUNKS);
#pragma unroll
  for (int i = 0; i < BT / ROWS; i++) {
    copy16(to + at + i * ROWS * 64, from, row + i * ROWS < there);
    from += step;
  }
}

DEVICE float fade(float source, float target) { return source == -INFINITE ? 0.f : exp2_of((source - target) * LOG2E); }

typedef float State[TILES][COLUMN_TILES][4], Each[F];

// Of 16 tokens features g, tokens from 0 and 8 on, then features g + 8.
DEVICE void load_keys(u32* r, const u16* at) {
  if (F == 2) load_turned4(r, at);
  else load_turned2(r, at);
}

// Of all lanes that hold a feature.
DEVICE float highest(u32 pairs) {
  float x = fmaxf(low(pairs), high(pairs));
  x = fmaxf(x, exchanged(x, 1));
  return fmaxf(x, exchanged(x, 2));
}

// A pair of neighbours of feature f in half h.
DEVICE float* pair(State& state, int f, int h, int j) { return LRPE ? &state[f][j][2 * h] : &state[0][j][2 * f]; }

// The state times a factor a feature; with LRPE a complex one.
DEVICE void turn(State& state, const float* cos, const float* sin) {
#pragma unroll
  for (int f = 0; f < F; f++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& real = pair(state, f, 0, j)[e];
        if (LRPE) {
          float& imag = pair(state, f, 1, j)[e];
          const float before = real;
          real = before * cos[f] + imag * sin[f];
          imag = imag * cos[f] - before * sin[f];
        } else {
          real *= cos[f];
        }
      }
}

DEVICE void rescale(State& state, const float* by) {
  bool changes = false;
#pragma unroll
  for (int f = 0; f < F; f++) changes |= by[f] != 1.f;
  if (!some(changes)) return;
  if (GROUPED && SUMS) group_wait<0>();
#pragma unroll
  for (int f = 0; f < F; f++)
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) pair(state, f, h, j)[0] *= by[f], pair(state, f, h, j)[1] *= by[f];
}

// A state of float32 from or to memory, from the lane's first feature and value feature on.
template <bool LOAD> DEVICE void move(State& state, float* memory) {
#pragma unroll
  for (int f = 0; f < F; f++)
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) {
        float2* at = (float2*)(memory + (h * D + f * 8) * V + j * 8);
        float* two = pair(state, f, h, j);
        if (LOAD) {
          const float2 x = *at;
          two[0] = x.x, two[1] = x.y;
        } else {
          float2 x;
          x.x = two[0], x.y = two[1];
          *at = x;
        }
      }
}

// The state as bfloat16 to memory, by way of the warp's place on chip: 16 bytes a lane. `to`: the lane's of the warp's first rows.
DEVICE void store(const State& state, u16* staged, const Spots& spots, u16* to, int lane) {
  constexpr int ROWS = 32 / COLUMN_TILES;  // at a time
  const int low = lane / COLUMN_TILES, place = spot<HALVES * OWN>(low, lane % COLUMN_TILES);
  __syncwarp();
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j += 2) {
      u32 r[4];
#pragma unroll
      for (int i = 0; i < 4; i++) r[i] = packed(state[m][j + i / 2][i % 2 * 2], state[m][j + i / 2][i % 2 * 2 + 1]);
      store_tiles4(staged + m * 16 * 64 + spots.of<HALVES * OWN>(j), r);
    }
  __syncwarp();
#pragma unroll
  for (int row = 0; row < HALVES * OWN; row += ROWS) {
    const int there = LRPE ? row / 16 * 8 + row % 8 + row / 8 % 2 * D : row;
    *(uint4*)(to + there * V) = *(const uint4*)(staged + row * 64 + (place ^ (row & 7) << 3));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_chain(const u16* left, const u16* right, const int* spans, const float* turns, u16* kept, const u16* found, float* enter,
             float* leave, float* mass, int* flag, const float* top_before, const float* sum_before, float* top_after,
             float* sum_after, float* before, float* after, float* moved, i64 left_b, i64 left_t, i64 left_h, i64 right_b, i64 right_t, i64 right_h, i64 heads, i64 from) {
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
  Each enters, leaves, factor_cos, factor_sin, sum, step_cos, step_sin;
  Each base_cos, base_sin;  // with SUMS, of a block's first token
  Each top, total;          // with UNITS, of all earlier keys
  u32 all_peaks[F];         // with UNITS and SUMS, the lane's
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
    sum[f] = 0.f, base_cos[f] = 1.f, base_sin[f] = 0.f, top[f] = -INFINITE, total[f] = 0.f, all_peaks[f] = NO_KEYS;
    if (UNITS) {
      if (from) top[f] = top_before[source * D + feature + f * 8], total[f] = sum_before[source * D + feature + f * 8];
      leaves[f] = top[f];
    } else {
      enters[f] = enter[unit_at + f * 8], leaves[f] = leave[unit_at + f * 8];
    }
    if (!LRPE) continue;
    float2 two;
    two.x = turns[BT * 2 * D + f * 8], two.y = turns[(BT * 2 + 1) * D + f * 8];
    if (BACKWARD) two.y = -two.y;
    angles[(2 * F + f) * THREADS] = two;
    step_cos[f] = turns[8 * 2 * D + f * 8], step_sin[f] = turns[(8 * 2 + 1) * D + f * 8];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      two.x = turns[(2 * t + e) * 2 * D + f * 8], two.y = turns[((2 * t + e) * 2 + 1) * D + f * 8];
      angles[(2 * f + e) * THREADS] = two;
    }
  }
  const bool earlier = !BACKWARD && !UNITS && from == 1 && place > 0;  // the unit is that of the block before
  if (!SUMS && from && (BACKWARD || earlier || top_before)) {
    move<true>(state, before + source * STATE + feature * V + 2 * t);
    if (!UNITS) {
      const int rest = length - first * BT;
#pragma unroll
      for (int f = 0; f < F; f++) {
        factor_cos[f] = 1.f, factor_sin[f] = 0.f;
        if (BACKWARD && LRPE) factor_cos[f] = turns[rest * 2 * D + f * 8], factor_sin[f] = -turns[(rest * 2 + 1) * D + f * 8];
        if (!BACKWARD) factor_cos[f] = fade(earlier ? leave[unit_at + f * 8 - next_unit] : top_before[sequence * D + feature + f * 8], enters[f]);
      }
      turn(state, factor_cos, factor_sin);
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
        higher |= fmaxf(low(peaks[f]), high(peaks[f])) * LOG2E - leaves[f] * LOG2E > HIGHEST;
      }
      if (some(higher)) {
#pragma unroll
        for (int f = 0; f < F; f++) {
          const float now = highest(all_peaks[f]);
          factor_cos[f] = fade(leaves[f], now);
          leaves[f] = now, total[f] *= factor_cos[f];
        }
        rescale(state, factor_cos);
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
        factor_cos[f] = faded, factor_sin[f] = 0.f;
        if (LRPE && left_over < blocks) {  // at its first token a state is where it should be
          const float2 two = angles[(2 * F + f) * THREADS];
          factor_cos[f] *= two.x, factor_sin[f] = two.y * faded;
        }
        if (t == 0) {
          const i64 at = unit_at + f * 8;
          enter[at] = enters[f], leave[at] = leaves[f], mass[at] = total[f] * fade(top[f], enters[f]);
        }
        total[f] *= fade(top[f], end);
        top[f] = end;
        flagged |= fast;
      }
      if (some(flagged) && lane == 0) flag[unit_at / D] = 1;
      turn(state, factor_cos, factor_sin);
    }
    if (!SUMS) store(state, staged, spots, kept, lane);
    Each crossed, target;
#pragma unroll
    for (int f = 0; f < F; f++) {
      if (!(UNITS && SUMS)) crossed[f] = exp2_of((enters[f] - leaves[f]) * LOG2E);
      target[f] = leaves[f] * LOG2E;
    }
    if (!(UNITS && SUMS)) rescale(state, crossed);
    // To the next block's unit and place.
    unit_at += on / BT * next_unit, kept += on / BT * next_state;
    Each next_enters, next_leaves, added;
#pragma unroll
    for (int f = 0; f < F * !UNITS; f++)
      if (left_over > 1) next_enters[f] = enter[unit_at + f * 8], next_leaves[f] = leave[unit_at + f * 8];
    float run_cos[F][2], run_sin[F][2];
#pragma unroll
    for (int f = 0; f < F; f++) {
      added[f] = 0.f;
#pragma unroll
      for (int e = 0; e < 2 * LRPE; e++) {
        const float2 two = angles[(2 * f + e) * THREADS];
        run_cos[f][e] = two.x, run_sin[f][e] = two.y;
        if (!SUMS) continue;
        run_cos[f][e] = two.x * base_cos[f] - two.y * base_sin[f];
        run_sin[f][e] = two.y * base_cos[f] + two.x * base_sin[f];
      }
    }
#pragma unroll
    for (int k = 0; k < BT; k += 16) {
      u32 r[4], operand[TILES][4];
      if (SUMS) r[0] = keys[k / 16][0], r[1] = keys[k / 16][1], r[2] = keys[k / 16][2], r[3] = keys[k / 16][3];
      else load_keys(r, tokens + k * 64 + key_spot);
      if (BACKWARD && !LRPE) {
        operand[0][0] = r[0], operand[0][1] = r[2], operand[0][2] = r[1], operand[0][3] = r[3];
      } else {
        float x[F][4];
#pragma unroll
        for (int f = 0; f < F; f++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const u32 two = r[f * 2 + e / 2];
            const float one = e % 2 ? high(two) : low(two);
            x[f][e] = BACKWARD ? one : exp2_of(one * LOG2E - target[f]);
          }
        if (UNITS) {
#pragma unroll
          for (int f = 0; f < F; f++)
#pragma unroll
            for (int e = 0; e < 4; e++) added[f] += x[f][e];
        }
        if (LRPE) {
#pragma unroll
          for (int f = 0; f < F; f++) {
            float up[4], down[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
              float &c = run_cos[f][e % 2], &s = run_sin[f][e % 2];
              up[e] = x[f][e] * c, down[e] = x[f][e] * s;
              const float now = c;
              c = now * step_cos[f] - s * step_sin[f];
              s = s * step_cos[f] + now * step_sin[f];
            }
            u32* made = operand[LRPE ? f : 0];
            made[0] = packed(up[0], up[1]), made[1] = packed(down[0], down[1]);
            made[2] = packed(up[2], up[3]), made[3] = packed(down[2], down[3]);
          }
        } else {
#pragma unroll
          for (int f = 0; f < F; f++) operand[0][f] = packed(x[f][0], x[f][1]), operand[0][f + 2] = packed(x[f][2], x[f][3]);
        }
      }
      const u16* rows = values + k * 64;
      if constexpr (GROUPED) {
        group_fence();
#pragma unroll
        for (int m = 0; m < TILES; m++) group_product<V, BT>(state[m], operand[m], rows);
        group_commit();
        group_wait<IN_FLIGHT>();
      } else {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j += 2) {
          u32 columns[4];
          load_turned4(columns, rows + spots.of<BT>(j));
#pragma unroll
          for (int m = 0; m < TILES; m++) product16(state[m][j], operand[m], columns), product16(state[m][j + 1], operand[m], columns + 2);
        }
      }
    }
    if (GROUPED && !SUMS) group_wait<0>();
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
    for (int f = 0; f < F * (LRPE && SUMS); f++) {
      const float2 two = angles[(2 * F + f) * THREADS];
      const float before = base_cos[f];
      base_cos[f] = before * two.x - base_sin[f] * two.y, base_sin[f] = base_sin[f] * two.x + before * two.y;
    }
    if (UNITS) continue;
#pragma unroll
    for (int f = 0; f < F; f++) {
      const float faded = BACKWARD ? exp2_of((next_leaves[f] - enters[f]) * LOG2E) : fade(leaves[f], next_enters[f]);
      factor_cos[f] = faded, factor_sin[f] = 0.f;
      if (LRPE && !SUMS) {
        const float2 two = angles[(2 * F + f) * THREADS];
        factor_cos[f] *= two.x, factor_sin[f] = two.y * faded;
      }
      enters[f] = next_enters[f], leaves[f] = next_leaves[f];
    }
    if (SUMS) {
      rescale(state, factor_cos);
    } else {
      turn(state, factor_cos, factor_sin);
    }
  }

  if (GROUPED && SUMS) group_wait<0>();
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
    factor_cos[f] = faded, factor_sin[f] = 0.f;
    if (!LRPE) continue;
    float cos = base_cos[f], sin = base_sin[f];
    if (!BACKWARD) {
      const float2 past = {turns[rest * 2 * D + f * 8], turns[(rest * 2 + 1) * D + f * 8]};
      cos = base_cos[f] * past.x - base_sin[f] * past.y, sin = base_sin[f] * past.x + base_cos[f] * past.y;
    }
    factor_cos[f] = faded * cos, factor_sin[f] = faded * sin;
  }
  if (SUMS || !BACKWARD) turn(state, factor_cos, factor_sin);
  move<false>(state, after + target * STATE + feature * V + 2 * t);
}
