// The state of a chain of the causal scan (causal_chain.cu) in the registers of a block of threads, and what is done to it.
//
// A warp holds OWN features of the state, with LRPE both halves, and all value features. A product's left operand is made in the
// registers in which the product wants it. Lanes are those of short_scan.cuh: (g, t) = (lane / 4, lane % 4), and with LRPE a
// tile of 16 rows is 8 cosines, then 8 sines, so that both halves of a feature belong to one lane and states turn without an
// exchange.

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

// Complex numbers: cosine and sine.
DEVICE float2 pair_of(float x, float y) {
  float2 two;
  two.x = x, two.y = y;
  return two;
}
DEVICE float2 scaled(float2 x, float by) { return pair_of(x.x * by, x.y * by); }
DEVICE float2 product(float2 x, float2 y) { return pair_of(x.x * y.x - x.y * y.y, x.y * y.x + x.x * y.y); }

// From the table of turns, from the lane's first feature on: by so many tokens, of its feature f.
DEVICE float2 turn_by(const float* turns, int tokens, int f) { return pair_of(turns[tokens * 2 * D + f * 8], turns[(tokens * 2 + 1) * D + f * 8]); }

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
DEVICE void turn(State& state, const float2* by) {
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
          real = before * by[f].x + imag * by[f].y;
          imag = imag * by[f].x - before * by[f].y;
        } else {
          real *= by[f].x;
        }
      }
}

// The same by real factors, most of the time 1.
DEVICE void rescale(State& state, const float2* by) {
  bool changes = false;
#pragma unroll
  for (int f = 0; f < F; f++) changes |= by[f].x != 1.f;
  if (!some(changes)) return;
#pragma unroll
  for (int f = 0; f < F; f++)
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) pair(state, f, h, j)[0] *= by[f].x, pair(state, f, h, j)[1] *= by[f].x;
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
        if (LOAD) two[0] = at->x, two[1] = at->y;
        else *at = pair_of(two[0], two[1]);
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

// The product's left operand of 16 tokens: their keys' weights (to be added to `added`, too), or queries, and with LRPE both
// halves of them. `run`: of the lane's next two tokens, goes on by 16.
DEVICE void weigh(u32 (*operand)[4], const u32* r, const float* unit, float2 (*run)[2], const float2* step, float* added) {
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
        x[f][e] = BACKWARD ? one : exp2_of((one - unit[f]) * LOG2E);  // 1 where it is the unit, however large
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
          up[e] = x[f][e] * run[f][e % 2].x, down[e] = x[f][e] * run[f][e % 2].y;
          run[f][e % 2] = product(run[f][e % 2], step[f]);
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
}

// The state += operand @ rows of 16 tokens' values.
DEVICE void multiply(State& state, u32 (*operand)[4], const u16* rows, const Spots& spots) {
  if constexpr (GROUPED) {
#pragma unroll
    for (int m = 0; m < TILES; m++) hold<COLUMN_TILES>(state[m]), hold(operand[m]);
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

// Before the state is touched again. All warps of a group wait at once.
DEVICE void finish(State& state) {
  if constexpr (GROUPED) {
    group_wait<0>();
#pragma unroll
    for (int m = 0; m < TILES; m++) hold<COLUMN_TILES>(state[m]);
  }
}
