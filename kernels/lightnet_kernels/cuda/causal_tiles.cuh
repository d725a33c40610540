// Tiles of 64 rows and 64 columns in shared memory, and products with them, for the kernels of the causal scan's blocks.
//
// A product's left operand is in registers (`a`, 16 columns of the warp's 16 rows as in product16), its result too; four warps
// multiply together, and nothing is there before `ended`.

constexpr float LOG2E = 1.4426950408889634f;
constexpr int BT = 64, TILE = BT * 64, THREADS = 32 * WARPS, HALVES = LRPE ? 2 : 1;

#define STRIDES(x) i64 x##_b, i64 x##_t, i64 x##_h
// A kernel's beginning: the lane's place (g, t) in a product and its warp's first row; the block and head of these threads, their
// number `at`, and of the block batch row, first token, tokens and place in its sequence. Blocks in the exact form end here.
#define BLOCK_AND_HEAD                                                                                                   \
  SHARED_MEMORY                                                                                                          \
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, first = warp * 16;            \
  const i64 at = blockIdx.x, block = blockIdx.x / (u32)heads, head = blockIdx.x % (u32)heads;                            \
  const int exact = flag[at];                                                                                            \
  const uint4 fields = *(const uint4*)(table + block * 4);                                                               \
  if (exact) return;                                                                                                     \
  const i64 row = fields.x, token = fields.y;                                                                            \
  const int length = fields.z, place = fields.w;
// A tensor from the block's first token and head on.
#define HERE(x) x += row * x##_b + token * x##_t + head * x##_h

// Where 16 bytes of a tile's row lie: those of eight rows that are read at once in different banks.
DEVICE int spot(int row, int chunk) { return row * 64 + ((chunk ^ (row & 7)) << 3); }

// 16 rows and 16 columns of a tile from the even chunk `chunk` on, those of the warp's rows `first`: as a left operand, or as results
// lie.
DEVICE int left_spot(int first, int chunk, int lane) { return (first + (lane & 15)) * 64 + ((lane >> 4 ^ lane & 7) << 3 ^ chunk << 3); }
DEVICE void load_left(u32* r, const u16* tile, int first, int chunk, int lane) { load_tiles4(r, tile + left_spot(first, chunk, lane)); }
DEVICE void store_result(u16* tile, const u32* r, int first, int chunk, int lane) {
  store_tiles4(tile + left_spot(first, chunk, lane), r);
}

// c [64, 64] += a [64, 16] tile[16 rows from `row` on, 64 columns]
DEVICE void times_rows(float (*c)[4], u32* a, const u16* tile, int row) { group_product<64, BT>(c, a, tile, row); }

// c [64, 64] += a [64, 16] (tile[64 rows, 16 columns from `column` on])^T
DEVICE void times_columns(float (*c)[4], u32* a, const u16* tile, int column) { group_product_turned<64>(c, a, tile, column); }

// Registers of left operands that products are about to read, after which they may begin.
template <int COUNT> DEVICE void hold_all(u32 (*a)[4]) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) hold(a[k]);
}

DEVICE void begin(float (*c)[4]) { hold<8>(c); }
DEVICE void ended(float (*c)[4]) { group_wait<0>(), hold<8>(c); }

// Left operands: ones where a token of the warp's rows is not before (LATER: not after) one of 64 columns.
template <bool LATER> DEVICE void ones(u32 (*a)[4], int first, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = (lane >> 2) + i % 2 * 8, at = (lane & 3) * 2 + i / 2 * 8;
    const bool one = LATER ? at >= row : at <= row, two = LATER ? at + 1 >= row : at + 1 <= row;
    const u32 both = (one ? 0x3f80u : 0u) | (two ? 0x3f800000u : 0u);  // in the columns of its own tokens
#pragma unroll
    for (int k = 0; k < 4; k++) a[k][i] = k * 16 == first ? both : (LATER ? k * 16 > first : k * 16 < first) ? 0x3f803f80u : 0u;
  }
}

DEVICE void zero(float (*c)[4]) {
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) c[j][e] = 0.f;
}

// Of [64, 64] of tokens, the warp's rows from `first` on: 0 where the column's token is not before the row's, or (LATER) after.
template <bool LATER> DEVICE void mask(float (*c)[4], int first, int lane) {
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = first + (lane >> 2) + e / 2 * 8, column = j * 8 + (lane & 3) * 2 + e % 2;
      if (LATER ? column < row : column > row) c[j][e] = 0.f;
    }
}

// A result as a left operand.
DEVICE void as_left(u32 (*a)[4], const float (*c)[4]) {
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[k][i] = packed(c[2 * k + i / 2][i % 2 * 2], c[2 * k + i / 2][i % 2 * 2 + 1]);
}

// 16 columns of a result from tile of columns j on, to a tile.
DEVICE void store_packed(u16* tile, const float (*c)[4], int first, int j, int lane) {
  u32 r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = packed(c[j + i / 2][i % 2 * 2], c[j + i / 2][i % 2 * 2 + 1]);
  store_result(tile, r, first, j, lane);
}

// WIDTH columns of a block's rows from memory, tile after tile; from row `there` on 0. Each warp its own 16 rows.
template <int WIDTH> DEVICE void fetch(u16* to, const u16* from, i64 stride, int there) {
  constexpr int CHUNKS = WIDTH / 8, ROWS = 32 / CHUNKS;  // at a time
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + lane / CHUNKS, chunk = lane % CHUNKS;
  const int at = row * 64 + ((chunk % 8 ^ lane / CHUNKS) << 3);
  to += chunk / 8 * TILE, from += row * stride + chunk * 8, there -= row;
#pragma unroll
  for (int i = 0; i < 16 / ROWS; i++)
    copy16(to + (at ^ (i * ROWS & 7) << 3) + i * ROWS * 64, from + (u32)stride * (i64)(i * ROWS), i * ROWS < there);
}

// Two vectors of D float32, one after the other.
DEVICE void fetch_vectors(float* to, const float* one, const float* two) {
  const int chunk = threadIdx.x % (D / 4) * 4;
  if (threadIdx.x < D / 2) copy16(to + (threadIdx.x < D / 4 ? 0 : D) + chunk, (threadIdx.x < D / 4 ? one : two) + chunk, true);
}

// Cosines and sines (float16, [H, 64, D]) of 64 features, a tile each.
DEVICE void fetch_turns(u16* to, const u16* cosines, const u16* sines, int part) {
  fetch<64>(to, cosines + part * 64, D, BT), fetch<64>(to + TILE, sines + part * 64, D, BT);
}

// The warp's 16 rows of a tile to memory; those from `there` on are left out.
DEVICE void write_rows(u16* to, i64 stride, const u16* tile, int first, int there, int lane) {
  const int row = first + (lane >> 3), chunk = lane & 7, at = row * 64 + ((chunk ^ lane >> 3) << 3);
  to += row * stride + chunk * 8, there -= row;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i * 4 < there) *(uint4*)(to + (u32)stride * (i64)(i * 4)) = *(const uint4*)(tile + (at ^ (i & 1) << 5) + i * 256);
}

// A warp's keys of a tile become their weights, in their place; with LRPE also turned by their tokens: cosines to `up`, sines to
// `down`. From row `there` on 0.
DEVICE void put_weights(u16* keys, u16* up, u16* down, const u16* turns, const float* unit, int first, int there, int lane) {
  unit += (lane & 3) * 2;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 two[4], c[4], s[4];
    load_left(two, keys, first, 2 * k, lane);
    if (LRPE) load_left(c, turns, first, 2 * k, lane), load_left(s, turns + TILE, first, 2 * k, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {  // tokens g, g + 8, features 8 on and the same
      const float2 units = *(const float2*)(unit + k * 16 + i / 2 * 8);
      float a = exp2_of((low(two[i]) - units.x) * LOG2E), b = exp2_of((high(two[i]) - units.y) * LOG2E);
      if (first + (lane >> 2) + i % 2 * 8 >= there) a = b = 0.f;
      two[i] = packed(a, b);
      if (LRPE) {
        const u32 cosines = c[i], sines = s[i];
        c[i] = packed(a * half_low(cosines), b * half_high(cosines)), s[i] = packed(a * half_low(sines), b * half_high(sines));
      }
    }
    store_result(keys, two, first, 2 * k, lane);
    if (LRPE) store_result(up, c, first, 2 * k, lane), store_result(down, s, first, 2 * k, lane);
  }
}

// c [64, 64] = sums over tokens of a tile of weights: up to each token, or (LATER) from it on.
template <bool LATER> DEVICE void sum_tokens(float (*c)[4], const u16* weights, int first, int lane) {
  u32 a[4][4];
  zero(c);
  ones<LATER>(a, first, lane);
  begin(c);
  hold_all<4>(a), group_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) times_rows(c, a[k], weights, k * 16);
  group_commit();
}

// 64 features from part * 64 on of a block's state or of what is asked of it, a tile of rows for 64 value features.
DEVICE void fetch_state(u16* state, const u16* kv, int part) {
#pragma unroll
  for (int h = 0; h < HALVES; h++) fetch<V>(state + h * (V / 64) * TILE, kv + (h * D + part * 64) * V, V, 64);
}

// Products of the rows of two [64, V] as a left operand, of columns not after the row (LATER: not before); `left` keeps the first ones.
template <bool LATER> DEVICE void pairs_of(u32 (*pairs)[4], u32 (*left)[4], const u16* rows, const u16* columns, int first, int lane) {
  float c[8][4];
  zero(c);
#pragma unroll
  for (int k = 0; k < V / 16; k++) load_left(left[k], rows + k / 4 * TILE, first, k % 4 * 2, lane);
  begin(c);
  hold_all<V / 16>(left), group_fence();
#pragma unroll
  for (int k = 0; k < V / 16; k++) times_columns(c, left[k], columns + k / 4 * TILE, k % 4 * 16);
  group_commit();
  ended(c);
  mask<LATER>(c, first, lane);
  as_left(pairs, c);
}

// real, imag [64, 64] += left [64, V] state^T + pairs [64, 64] times up, down.
DEVICE void ask_state(float (*real)[4], float (*imag)[4], u32 (*left)[4], u32 (*pairs)[4], const u16* state, const u16* up, const u16* down, int lane) {
#pragma unroll
  for (int k = 0; k < V / 16; k++) {
    times_columns(real, left[k], state + k / 4 * TILE, k % 4 * 16);
    if (LRPE) times_columns(imag, left[k], state + (V / 64 + k / 4) * TILE, k % 4 * 16);
  }
#pragma unroll
  for (int k = 0; k < 4; k++) {
    times_rows(real, pairs[k], up, k * 16);
    if (LRPE) times_rows(imag, pairs[k], down, k * 16);
  }
}

// What the warp's tokens read by 64 features (cosines, sines): scores += of the tokens of up, down; out += of the state.
DEVICE void read_state(float (*scores)[4], float (*out)[8][4], u32 (*cosines)[4], u32 (*sines)[4], const u16* state, const u16* up, const u16* down, int lane) {
  begin(scores);
#pragma unroll
  for (int i = 0; i < V / 64; i++) begin(out[i]);
  hold_all<4>(cosines);
  if (LRPE) hold_all<4>(sines);
  group_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) {
    times_columns(scores, cosines[k], up, k * 16);
    if (LRPE) times_columns(scores, sines[k], down, k * 16);
#pragma unroll
    for (int i = 0; i < V / 64; i++) {
      times_rows(out[i], cosines[k], state + i * TILE, k * 16);
      if (LRPE) times_rows(out[i], sines[k], state + (V / 64 + i) * TILE, k * 16);
    }
  }
  group_commit();
  ended(scores);
#pragma unroll
  for (int i = 0; i < V / 64; i++) ended(out[i]);
}

// out += scores [64, 64] times [64, V], of columns not after the row (LATER: not before).
template <bool LATER> DEVICE void add_values(float (*out)[8][4], float (*scores)[4], const u16* values, int first, int lane) {
  u32 left[4][4];
  mask<LATER>(scores, first, lane);
  as_left(left, scores);
#pragma unroll
  for (int i = 0; i < V / 64; i++) begin(out[i]);
  hold_all<4>(left), group_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < V / 64; i++) times_rows(out[i], left[k], values + i * TILE, k * 16);
  group_commit();
#pragma unroll
  for (int i = 0; i < V / 64; i++) ended(out[i]);
}

// The warp's rows of [64, V] to memory, by way of tiles that nobody else reads.
DEVICE void write_out(u16* to, i64 stride, u16* tiles, const float (*out)[8][4], int first, int there, int lane) {
#pragma unroll
  for (int i = 0; i < V / 64; i++) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) store_packed(tiles + i * TILE, out[i], first, j, lane);
    __syncwarp();
    write_rows(to + i * 64, stride, tiles + i * TILE, first, there, lane);
  }
}

// Sums over tokens of 64 features, [WARPS, 64]: the warp's, of a lane's features two at `column`, two at column + 8.
DEVICE void put_sums(float* sums, const float (*four)[2], int column, int lane) {
  const bool later = lane & 16, odd = lane & 8;  // what the lane ends with
  float two[2];
#pragma unroll
  for (int e = 0; e < 2; e++) two[e] = (later ? four[1][e] : four[0][e]) + exchanged(later ? four[0][e] : four[1][e], 16);
  float sum = (odd ? two[1] : two[0]) + exchanged(odd ? two[0] : two[1], 8);
  sum += exchanged(sum, 4);
  if (!(lane & 4)) sums[column + later * 8 + (lane & 3) * 2 + odd] = sum;
}
DEVICE void write_sums(float* to, const float* sums) {
  if (threadIdx.x >= 64) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += sums[i * 64 + threadIdx.x];
  to[threadIdx.x] = sum;
}
