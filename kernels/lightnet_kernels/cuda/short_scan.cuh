// The bidirectional scan of short sequences (model-spec 1 and 2): a block of threads does one sequence of one head, and the
// state stays on chip. Parts of both passes.
//
// Products are the warp's own, 16 x 8 x 16, so that widths need only be multiples of 8: 72 features take no padding, where
// tiles of powers of two do the work of 128. All that is done to a key or query is done in the registers in which the
// product wants it. A lane is (g, t) = (lane / 4, lane % 4); of a product's left operand [16, 16] it holds rows g, g + 8 and
// columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9, of the right one [16, 8] these rows and column g, of the result rows g, g + 8 and
// columns 2 t, 2 t + 1.
//
// With LRPE the tile of 16 doubled features has the cosines of 8 features in its upper half, their sines in the lower: both
// belong to one lane. In memory a state is [cosines of all features; sines].
//
// Few long sequences are cut into pieces, a block each: `splits` of `length` tokens a sequence. Then a pass is two kernels, by PART:
// 1 sums up (and, of the backward pass, does the queries), 2 goes on from the sums of all pieces, which Triton's kernels merge;
// 0: both, of a whole sequence.
//
// Given by the compiler: PART; D and V, widths; LRPE, SILU; AXES of the coordinates (0: a token's place in its sequence);
// WARPS of a block, BLOCKS on a multiprocessor; BK tokens and STAGES of the pipeline; TILES of 16 tokens that a warp does at
// a time where it goes by tokens.

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float NOTHING = -3e38f;  // unit of no keys
constexpr float AHEAD = 16.f;      // a weight may reach 2^16 before the unit moves

constexpr bool PLAIN = LRPE && AXES == 0;          // places 8 tokens apart have angles 8 theta apart
constexpr int HALVES = LRPE ? 2 : 1;
constexpr int GROUPS = LRPE ? 1 : 2;               // of 8 features in a tile of 16 rows
constexpr int ROW_TILES = (D * HALVES + 15) / 16;  // of the state
constexpr int COLUMN_TILES = V / 8;
constexpr int OWN = (ROW_TILES + WARPS - 1) / WARPS;  // row tiles of a warp: warp, warp + WARPS, ..
constexpr int THREADS = 32 * WARPS;
constexpr int TOKENS = 16 * TILES;

// Rows in shared memory are an odd multiple of 16 bytes long: eight of them lie in different banks.
DEVICE constexpr int stride_of(int width) { return width % 16 == 0 ? width + 8 : width; }
constexpr int LEFT = stride_of(D), RIGHT = stride_of(V), WIDE = LEFT > RIGHT ? LEFT : RIGHT;
constexpr int SLOT = BK * (LEFT + RIGHT);
constexpr int RING = STAGES * SLOT;
constexpr int STATE = ROW_TILES * 16 * RIGHT;
DEVICE constexpr int larger(int x, int y) { return x > y ? x : y; }

#define STRIDES(x) i64 x##_b, i64 x##_t, i64 x##_h

// What of its tensors a block works on.
struct Piece {
  int head, first, tokens;
  i64 batch, sequence;  // sequence: of all sequences and heads

  DEVICE Piece(i64 heads, i64 all, i64 splits, i64 length) {
    const u32 piece = blockIdx.x / (u32)heads;
    head = blockIdx.x % (u32)heads;
    batch = piece / (u32)splits;
    first = (int)(piece % (u32)splits * length);
    tokens = (int)(all - first < length ? all - first : length);
    sequence = batch * heads + head;
  }
};

// Row of the state in memory, -1: padding.
DEVICE int row_in_memory(int row) {
  if (LRPE) return row / 16 * 8 + row % 8 + (row % 16 < 8 ? 0 : D);
  return row < D ? row : -1;
}

// cos and sin of an angle in 2^-32 turns.
DEVICE void turn(u32 angle, float& cos, float& sin) {
  // As a float from 1 to 2 turns, half a turn on: less work than a conversion.
  float x = float_of(((angle >> 9) ^ 0x400000u) | 0x3f800000u) * 6.283185307f - 9.424777961f;
  cos = cos_of(x);
  sin = sin_of(x);
}

// Coordinates of tokens first, first + 8, ..
template <int COUNT> struct Places {
  int at[AXES ? AXES : 1][COUNT];

  DEVICE Places(const int* table, int origin, int first, int tokens) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int token = first + 8 * i;
      at[0][i] = origin + token;
#pragma unroll
      for (int axis = 0; axis < AXES; axis++) at[axis][i] = table[(token < tokens ? token : tokens - 1) * AXES + axis];
    }
  }

  DEVICE int of(int feature, int i) const {
    int place = at[0][i];
#pragma unroll
    for (int axis = 1; axis < AXES; axis++)
      if (feature >= axis * (D / (AXES ? AXES : 1))) place = at[axis][i];
    return place;
  }

  // cos and sin of a feature; step: those of 8 tokens.
  DEVICE void turns(u32 theta, int feature, const float2* steps, float* cos, float* sin) const {
    const float2 step = PLAIN ? steps[feature] : float2();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (PLAIN && i) {
        cos[i] = cos[i - 1] * step.x - sin[i - 1] * step.y;
        sin[i] = sin[i - 1] * step.x + cos[i - 1] * step.y;
      } else {
        turn(theta * (u32)of(feature, i), cos[i], sin[i]);
      }
    }
  }
};

DEVICE void fill_steps(float2* steps, const int* theta) {
  if (PLAIN)
    for (int feature = threadIdx.x; feature < D; feature += THREADS) {
      float2 step;
      turn((u32)theta[feature] * 8u, step.x, step.y);
      steps[feature] = step;
    }
}

DEVICE float sigmoid(float x) { return inverse(1.f + exp2_of(-LOG2E * x)); }
DEVICE float activated(float x) { return SILU ? x * sigmoid(x) : x; }

// Rows [ROWS, WIDTH] from memory by COUNT threads; from row `there` on 0.
template <int ROWS, int WIDTH, int STRIDE, int COUNT>
DEVICE void fetch(u16* to, const u16* from, i64 stride, int there, int thread) {
  constexpr int CHUNKS = WIDTH / 8, ALL = ROWS * CHUNKS;
#pragma unroll
  for (int i = 0; i < (ALL + COUNT - 1) / COUNT; i++) {
    const int at = thread + i * COUNT, row = at / CHUNKS, col = at % CHUNKS * 8;
    if (ALL % COUNT == 0 || at < ALL) copy16(to + row * STRIDE + col, from + (row < there ? row : 0) * stride + col, row < there);
  }
}

template <int ROWS, int WIDTH, int STRIDE, int COUNT>
DEVICE void put(u16* to, const u16* from, i64 stride, int there, int thread) {
  constexpr int CHUNKS = WIDTH / 8, ALL = ROWS * CHUNKS;
#pragma unroll
  for (int i = 0; i < (ALL + COUNT - 1) / COUNT; i++) {
    const int at = thread + i * COUNT, row = at / CHUNKS, col = at % CHUNKS * 8;
    if (at < ALL && row < there) *(uint4*)(to + row * stride + col) = *(const uint4*)(from + row * STRIDE + col);
  }
}

template <int COUNT> DEVICE void clear(float (*sums)[COLUMN_TILES][4]) {
#pragma unroll
  for (int m = 0; m < COUNT; m++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[m][j][e] = 0.f;
}

// sums[m] += left[m] @ rows 0..15 of `rows`, all columns.
template <int COUNT>
DEVICE void add_products(float (*sums)[COLUMN_TILES][4], u32 (*left)[4], const u16* rows, int count, int lane) {
  rows += (lane & 15) * RIGHT;
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j += 2) {
    const bool two = j + 1 < COLUMN_TILES;
    u32 right[4];
    if (two) load_turned4(right, rows + (j + (lane >> 4)) * 8);
    else load_turned2(right, rows + j * 8);
#pragma unroll
    for (int m = 0; m < COUNT; m++)
      if (m < count) {
        product16(sums[m][j], left[m], right);
        if (two) product16(sums[m][j + 1], left[m], right + 2);
      }
  }
}

// Sums over the sequence's tokens: left~^T right, left being exp(left - unit) with WEIGHTS, else phi(left); a warp's own
// row tiles. Units (a feature each, in powers of 2) and masses with WEIGHTS.
template <bool WEIGHTS>
DEVICE void collect(float (*sums)[COLUMN_TILES][4], float (*unit)[GROUPS], float (*mass)[GROUPS], u16* ring,
                    const u16* left, const u16* right, i64 left_t, i64 right_t, const int* theta, const int* places,
                    int origin, int tokens, int warp, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const int count = (ROW_TILES - warp + WARPS - 1) / WARPS;  // of the warp's tiles that exist
  float cos[OWN][2], sin[OWN][2], step_cos[OWN], step_sin[OWN];  // of tokens 2 t, 2 t + 1, then 8 further on, ..
  u32 angle[OWN];
  int axis[OWN];
  clear<OWN>(sums);
#pragma unroll
  for (int m = 0; m < OWN; m++) {
#pragma unroll
    for (int f = 0; f < GROUPS; f++) unit[m][f] = NOTHING, mass[m][f] = 0.f;
    if (!LRPE) continue;
    const int feature = (warp + WARPS * m) * 8 + g;
    angle[m] = m < count ? (u32)theta[feature] : 0u;
    axis[m] = AXES && m < count ? feature / (D / (AXES ? AXES : 1)) : 0;
    if (!PLAIN) continue;
#pragma unroll
    for (int e = 0; e < 2; e++) turn(angle[m] * (u32)(origin + 2 * t + e), cos[m][e], sin[m][e]);
    turn(angle[m] * 8u, step_cos[m], step_sin[m]);
  }

  auto load = [&](int block) {
    if (block * BK < tokens) {
      u16* slot = ring + block % STAGES * SLOT;
      fetch<BK, D, LEFT, THREADS>(slot, left + block * BK * left_t, left_t, tokens - block * BK, threadIdx.x);
      fetch<BK, V, RIGHT, THREADS>(slot + BK * LEFT, right + block * BK * right_t, right_t, tokens - block * BK, threadIdx.x);
    }
    commit();
  };
#pragma unroll
  for (int block = 0; block < STAGES - 1; block++) load(block);
#pragma unroll 1
  for (int block = 0; block * BK < tokens; block++) {
    arrived<STAGES - 2>();
    __syncthreads();
    load(block + STAGES - 1);
#pragma unroll 1
    for (int k = 0; k < BK && block * BK + k < tokens; k += 16) {
      const int start = block * BK + k;  // 16 tokens
      const u16* keys = ring + block % STAGES * SLOT + k * LEFT;
      float x[OWN][GROUPS][4], top = NOTHING;
#pragma unroll
      for (int m = 0; m < OWN; m++) {
        const u16* at = keys + (lane & 15) * LEFT + (warp + WARPS * m) * 8 * GROUPS;
        u32 r[4] = {0, 0, 0, 0};
        if (m < count) {
          if (GROUPS == 2 && (warp + WARPS * m) * 16 + 8 < D) load_turned4(r, at + (lane >> 4) * 8);
          else load_turned2(r, at);
        }
#pragma unroll
        for (int f = 0; f < GROUPS; f++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float value = e % 2 ? high(r[f * 2 + e / 2]) : low(r[f * 2 + e / 2]);
            if (WEIGHTS) {
              if (start + 16 > tokens && start + 2 * t + e % 2 + e / 2 * 8 >= tokens) value = -INFINITE;
              value = value * LOG2E - unit[m][f];
              if (m < count && (warp + WARPS * m) * 8 * GROUPS + f * 8 < D) top = fmaxf(top, value);
            } else {
              value = activated(value);
            }
            x[m][f][e] = value;
          }
      }
      if (WEIGHTS && some(top > AHEAD)) {  // units move to the maximum; keys are read anew, to lose none beside a unit
#pragma unroll
        for (int m = 0; m < OWN; m++)
#pragma unroll
          for (int f = 0; f < GROUPS; f++) {
            const int group = (warp + WARPS * m) * 8 * GROUPS + f * 8;
            if (m >= count || group >= D) continue;
            float now = unit[m][f];
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int token = 2 * t + e % 2 + e / 2 * 8;
              x[m][f][e] = start + token < tokens ? low(keys[token * LEFT + group + g]) * LOG2E : -INFINITE;
              now = fmaxf(now, x[m][f][e]);
            }
            now = fmaxf(now, exchanged(now, 1));
            now = fmaxf(now, exchanged(now, 2));
            const float scale = exp2_of(unit[m][f] - now);
            unit[m][f] = now;
            mass[m][f] *= scale;
#pragma unroll
            for (int e = 0; e < 4; e++) {
              x[m][f][e] -= now;
              if (GROUPS == 2 && e / 2 != f) continue;
#pragma unroll
              for (int j = 0; j < COLUMN_TILES; j++) sums[m][j][e] *= scale;
            }
          }
      }
      u32 operand[OWN][4];
#pragma unroll
      for (int m = 0; m < OWN; m++) {
        if (WEIGHTS) {
#pragma unroll
          for (int f = 0; f < GROUPS; f++) {
            const bool exists = LRPE || (warp + WARPS * m) * 16 + f * 8 < D;
#pragma unroll
            for (int e = 0; e < 4; e++) {
              x[m][f][e] = exists ? exp2_of(x[m][f][e]) : 0.f;
              mass[m][f] += x[m][f][e];
            }
          }
        }
        if (LRPE) {
          float up[4], down[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float c, s;
            if (PLAIN) {
              c = cos[m][e % 2], s = sin[m][e % 2];
              cos[m][e % 2] = c * step_cos[m] - s * step_sin[m];
              sin[m][e % 2] = s * step_cos[m] + c * step_sin[m];
            } else {
              const int token = start + 2 * t + e % 2 + e / 2 * 8;
              turn(angle[m] * (u32)places[(token < tokens ? token : tokens - 1) * AXES + axis[m]], c, s);
            }
            up[e] = x[m][0][e] * c, down[e] = x[m][0][e] * s;
          }
          operand[m][0] = packed(up[0], up[1]), operand[m][1] = packed(down[0], down[1]);
          operand[m][2] = packed(up[2], up[3]), operand[m][3] = packed(down[2], down[3]);
        } else {
#pragma unroll
          for (int f = 0; f < GROUPS; f++)
            operand[m][f] = packed(x[m][f][0], x[m][f][1]), operand[m][f + 2] = packed(x[m][f][2], x[m][f][3]);
        }
      }
      add_products<OWN>(sums, operand, ring + block % STAGES * SLOT + BK * LEFT + k * RIGHT, count, lane);
    }
  }
#pragma unroll
  for (int m = 0; m < OWN; m++)
#pragma unroll
    for (int f = 0; f < GROUPS; f++) {
      mass[m][f] += exchanged(mass[m][f], 1);
      mass[m][f] += exchanged(mass[m][f], 2);
    }
}

// The sums of a piece to memory, float32.
DEVICE void keep_sums(float* to, float (*sums)[COLUMN_TILES][4], int warp, int lane) {
#pragma unroll
  for (int m = 0; m < OWN; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = (warp + WARPS * m) * 16 + h * 8 + (lane >> 2), there = row < ROW_TILES * 16 ? row_in_memory(row) : -1;
      if (there < 0) continue;
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) {
        float2 two;
        two.x = sums[m][j][h * 2], two.y = sums[m][j][h * 2 + 1];
        *(float2*)(to + there * V + j * 8 + 2 * (lane & 3)) = two;
      }
    }
}

// A state of bfloat16 from memory to the chip, behind the threads' backs.
DEVICE void fetch_state(u16* to, const u16* from) {
#pragma unroll
  for (int i = 0; i < (ROW_TILES * 16 * COLUMN_TILES + THREADS - 1) / THREADS; i++) {
    const int at = threadIdx.x + i * THREADS, row = at / COLUMN_TILES, col = at % COLUMN_TILES * 8;
    if (row >= ROW_TILES * 16) continue;
    const int there = row_in_memory(row);
    copy16(to + row * RIGHT + col, from + (there < 0 ? 0 : there) * V + col, there >= 0);
  }
  commit();
}

// The sums times a factor a feature as the state on chip, bfloat16.
DEVICE void place_state(u16* state, float (*sums)[COLUMN_TILES][4], float (*factor)[GROUPS], int warp, int lane) {
#pragma unroll
  for (int m = 0; m < OWN; m++)
    if (warp + WARPS * m < ROW_TILES) {
      u16* row = state + ((warp + WARPS * m) * 16 + (lane >> 2)) * RIGHT + 2 * (lane & 3);
      const float up = factor[m][0], down = factor[m][GROUPS - 1];
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) {
        *(u32*)(row + j * 8) = packed(sums[m][j][0] * up, sums[m][j][1] * up);
        *(u32*)(row + 8 * RIGHT + j * 8) = packed(sums[m][j][2] * down, sums[m][j][3] * down);
      }
    }
}

// Results of a warp's tokens, bfloat16, to its slot.
DEVICE void place_results(u16* slot, float (*sums)[COLUMN_TILES][4], int lane) {
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      u16* at = slot + (m * 16 + (lane >> 2)) * WIDE + j * 8 + 2 * (lane & 3);
      *(u32*)at = packed(sums[m][j][0], sums[m][j][1]);
      *(u32*)(at + 8 * WIDE) = packed(sums[m][j][2], sums[m][j][3]);
    }
}
