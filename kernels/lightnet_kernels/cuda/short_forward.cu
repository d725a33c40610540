// Forward pass: maximum (as far as units go), mass and G of each sequence, and the outputs. With PART 1 `sums` are a piece's, in
// its own units.

constexpr int FIRST = larger(RING, STATE);
constexpr int BYTES = 2 * (FIRST + WARPS * 2 * TOKENS * WIDE) + (PLAIN ? 8 * D : 0);

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
short_forward(const u16* query, const u16* key, const u16* value, u16* output, float* peaks, float* masses, u16* states,
              float* sums_of_pieces, const int* theta, const int* places, STRIDES(query), STRIDES(key), STRIDES(value), STRIDES(output),
              i64 places_b, i64 heads, i64 all_tokens, i64 splits, i64 length) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Piece piece(heads, all_tokens, splits, length);
  const int tokens = piece.tokens, origin = piece.first;
  const i64 vector = (i64)blockIdx.x * D;
  u16* ring = memory;
  u16* state = memory;  // takes the ring's place
  u16* slots = memory + FIRST + warp * 2 * TOKENS * WIDE;
  float2* steps = (float2*)(memory + FIRST + WARPS * 2 * TOKENS * WIDE);
  query += piece.batch * query_b + piece.head * query_h + origin * query_t;
  key += piece.batch * key_b + piece.head * key_h + origin * key_t;
  value += piece.batch * value_b + piece.head * value_h + origin * value_t;
  output += piece.batch * output_b + piece.head * output_h + origin * output_t;
  if (LRPE) theta += piece.head * D;
  if (AXES) places += piece.batch * places_b + origin * AXES;
  states += piece.sequence * D * (HALVES * V);
  fill_steps(steps, theta);
  if (PART != 1 && warp * TOKENS < tokens)
    fetch<TOKENS, D, WIDE, 32>(slots, query + warp * TOKENS * query_t, query_t, tokens - warp * TOKENS, lane);
  commit();
  if (PART != 2) {
    float sums[OWN][COLUMN_TILES][4], unit[OWN][GROUPS], mass[OWN][GROUPS];
    collect<true>(sums, unit, mass, ring, key, value, key_t, value_t, theta, places, origin, tokens, warp, lane);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < OWN; m++)
#pragma unroll
      for (int f = 0; f < GROUPS; f++) {
        const int feature = (warp + WARPS * m) * 8 * GROUPS + f * 8 + g;
        if (feature < D && t == 0) {
          peaks[vector + feature] = unit[m][f] * LN2;
          masses[vector + feature] = mass[m][f];
        }
        mass[m][f] = mass[m][f] > 0.f ? 1.f / mass[m][f] : 0.f;
      }
    if (PART == 1) keep_sums(sums_of_pieces + vector * (HALVES * V), sums, warp, lane);
    else place_state(state, sums, mass, warp, lane);
  } else {
    fetch_state(state, states);
    arrived<0>();
  }
  if (PART == 1) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; PART == 0 && i < (ROW_TILES * 16 * COLUMN_TILES + THREADS - 1) / THREADS; i++) {
    const int at = threadIdx.x + i * THREADS, row = at / COLUMN_TILES, col = at % COLUMN_TILES * 8;
    const int to = row < ROW_TILES * 16 ? row_in_memory(row) : -1;
    if (to >= 0) *(uint4*)(states + to * V + col) = *(const uint4*)(state + row * RIGHT + col);
  }

  bool second = false;  // which of its two slots a warp works in
#pragma unroll 1
  for (int start = warp * TOKENS; start < tokens; start += WARPS * TOKENS, second = !second) {
    u16* slot = slots + second * TOKENS * WIDE;
    const int next = start + WARPS * TOKENS;
    if (next < tokens)
      fetch<TOKENS, D, WIDE, 32>(slots + !second * TOKENS * WIDE, query + next * query_t, query_t, tokens - next, lane);
    commit();
    arrived<1>();
    __syncwarp();
    const Places<2 * TILES> at(places, origin, start + g, tokens);
    float sums[TILES][COLUMN_TILES][4];
    clear<TILES>(sums);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      u32 operand[TILES][4];
      float cos[2][2 * TILES], sin[2][2 * TILES];
      if (LRPE) {
#pragma unroll
        for (int e = 0; e < 2; e++)
          at.turns((u32)theta[i * 8 + 2 * t + e], i * 8 + 2 * t + e, steps, cos[e], sin[e]);
      }
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        const u16* rows = slot + (m * 16 + (lane & 15)) * WIDE + i * 8 * GROUPS;
        u32 r[4] = {0, 0, 0, 0};
        if (GROUPS == 2 && i * 16 + 8 < D) load_tiles4(r, rows + (lane >> 4) * 8);
        else load_tiles2(r, rows);
#pragma unroll
        for (int h = 0; h < 2 * GROUPS; h++) {
          const float one = activated(low(r[h])), two = activated(high(r[h]));
          if (LRPE) {
            operand[m][h] = packed(one * cos[0][m * 2 + h], two * cos[1][m * 2 + h]);
            operand[m][h + 2] = packed(one * sin[0][m * 2 + h], two * sin[1][m * 2 + h]);
          } else {
            operand[m][h] = packed(one, two);
          }
        }
      }
      add_products<TILES>(sums, operand, state + i * 16 * RIGHT, TILES, lane);
    }
    __syncwarp();
    place_results(slot, sums, lane);
    __syncwarp();
    put<TOKENS, V, WIDE, 32>(output + start * output_t, slot, output_t, tokens - start, lane);
    __syncwarp();
  }
}
