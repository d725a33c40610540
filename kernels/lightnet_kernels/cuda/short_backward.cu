// Backward pass: dG and p of each sequence on chip, gradients of q, then of k and v; theta's, a row a sequence and head. With PART 1
// dG's sums are a piece's, and theta's gradient a row a piece, of either part.

constexpr int FIRST = larger(RING, WARPS * 2 * TOKENS * WIDE);
constexpr int BYTES = 2 * (FIRST + 2 * STATE) + 4 * D * (2 + WARPS + (PLAIN ? 2 : 0));
constexpr int PAIRS = (COLUMN_TILES + 1) / 2;

// All columns of a warp's tokens as left operands.
DEVICE void load_left(u32 (*left)[PAIRS][4], const u16* slot, int lane) {
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const u16* rows = slot + (m * 16 + (lane & 15)) * WIDE + j * 16;
      if (2 * j + 1 < COLUMN_TILES) load_tiles4(left[m][j], rows + (lane >> 4) * 8);
      else load_tiles2(left[m][j], rows);
    }
}

// left @ (rows 0..15 of `rows`)^T: gradients of these (doubled) features, two tiles of 8.
DEVICE void back_products(float (*grads)[2][4], u32 (*left)[PAIRS][4], const u16* rows, int lane) {
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int e = 0; e < 4; e++) grads[m][0][e] = grads[m][1][e] = 0.f;
  rows += (lane & 7) * RIGHT;
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    u32 right[4];
    if (2 * j + 1 < COLUMN_TILES) {
      load_tiles4(right, rows + (lane >> 4) * 8 * RIGHT + j * 16 + (lane >> 3 & 1) * 8);
#pragma unroll
      for (int m = 0; m < TILES; m++)
        product16(grads[m][0], left[m][j], right), product16(grads[m][1], left[m][j], right + 2);
    } else {
      load_tiles2(right, rows + (lane >> 3 & 1) * 8 * RIGHT + j * 16);
#pragma unroll
      for (int m = 0; m < TILES; m++)
        product8(grads[m][0], left[m][j], right), product8(grads[m][1], left[m][j], right + 1);
    }
  }
}

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
short_backward(const u16* query, const u16* key, const u16* value, const u16* grad, u16* grad_query, u16* grad_key,
               u16* grad_value, const float* peaks, const float* masses, const u16* states, float* torques,
               float* sums_of_pieces, const u16* grad_states, const float* pressures, const int* theta, const int* places, STRIDES(query), STRIDES(key), STRIDES(value), STRIDES(grad),
               STRIDES(grad_query), STRIDES(grad_key), STRIDES(grad_value), i64 places_b, i64 heads, i64 all_tokens,
               i64 splits, i64 length) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Piece piece(heads, all_tokens, splits, length);
  const int tokens = piece.tokens, origin = piece.first;
  const i64 vector = piece.sequence * D, own_vector = (i64)blockIdx.x * D;
  u16* ring = memory;
  u16* state = memory + FIRST;
  u16* grad_state = state + STATE;
  float* unit = (float*)(grad_state + STATE);  // log2 of sum exp(k)
  float* pressure = unit + D;
  float* parts = pressure + D;
  float2* steps = (float2*)(parts + WARPS * D);
  query += piece.batch * query_b + piece.head * query_h + origin * query_t;
  key += piece.batch * key_b + piece.head * key_h + origin * key_t;
  value += piece.batch * value_b + piece.head * value_h + origin * value_t;
  grad += piece.batch * grad_b + piece.head * grad_h + origin * grad_t;
  grad_query += piece.batch * grad_query_b + piece.head * grad_query_h + origin * grad_query_t;
  grad_key += piece.batch * grad_key_b + piece.head * grad_key_h + origin * grad_key_t;
  grad_value += piece.batch * grad_value_b + piece.head * grad_value_h + origin * grad_value_t;
  if (LRPE) theta += piece.head * D;
  if (AXES) places += piece.batch * places_b + origin * AXES;
  fill_steps(steps, theta);
  states += vector * (HALVES * V);
  if (PART != 2) fetch_state(state, states);
  else fetch_state(grad_state, grad_states + vector * (HALVES * V));
  for (int feature = threadIdx.x; feature < D; feature += THREADS) {
    const float mass = masses[vector + feature];
    unit[feature] = peaks[vector + feature] * LOG2E + (mass > 0.f ? log2_of(mass) : 0.f);
    if (PART == 2) pressure[feature] = pressures[vector + feature];
  }
  if (PART == 2) arrived<0>();
  if (PART != 2) {
    float sums[OWN][COLUMN_TILES][4], factor[OWN][GROUPS], none[OWN][GROUPS];
    collect<false>(sums, none, factor, ring, query, grad, query_t, grad_t, theta, places, origin, tokens, warp, lane);
    if (PART == 1) keep_sums(sums_of_pieces + own_vector * (HALVES * V), sums, warp, lane);
#pragma unroll
    for (int m = 0; PART == 0 && m < OWN; m++) {
      const int i = warp + WARPS * m;
      factor[m][0] = factor[m][GROUPS - 1] = 1.f;
      if (i >= ROW_TILES) continue;
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++) {
          const u32 x = *(const u32*)(state + (i * 16 + h * 8 + g) * RIGHT + j * 8 + 2 * t);
          sum[h] += low(x) * sums[m][j][h * 2] + high(x) * sums[m][j][h * 2 + 1];
        }
      if (LRPE) sum[0] += sum[1];
#pragma unroll
      for (int f = 0; f < GROUPS; f++) {
        sum[f] += exchanged(sum[f], 1);
        sum[f] += exchanged(sum[f], 2);
        const int feature = i * 8 * GROUPS + f * 8 + g;
        if (t == 0 && feature < D) pressure[feature] = sum[f];
      }
    }
    if (PART == 0) place_state(grad_state, sums, factor, warp, lane);
  }
  __syncthreads();

  u16* left_slot = ring + warp * 2 * TOKENS * WIDE;
  u16* right_slot = left_slot + TOKENS * WIDE;
  float torque[LRPE ? ROW_TILES : 1][2];
#pragma unroll
  for (int i = 0; i < (LRPE ? ROW_TILES : 1); i++) torque[i][0] = torque[i][1] = 0.f;

  // Of tokens `start` ..: x [TILES * 16, D] and y [.., V] to the warp's slots, y into registers.
  auto load = [&](u32(*left)[PAIRS][4], const u16* x, i64 x_t, const u16* y, i64 y_t, int start) {
    fetch<TOKENS, D, WIDE, 32>(left_slot, x + start * x_t, x_t, tokens - start, lane);
    fetch<TOKENS, V, WIDE, 32>(right_slot, y + start * y_t, y_t, tokens - start, lane);
    commit();
    arrived<0>();
    __syncwarp();
    load_left(left, right_slot, lane);
  };

#pragma unroll 1
  for (int start = warp * TOKENS; PART != 2 && start < tokens; start += WARPS * TOKENS) {
    const Places<2 * TILES> at(places, origin, start + g, tokens);
    u32 left[TILES][PAIRS][4];
    load(left, query, query_t, grad, grad_t, start);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      float grads[TILES][2][4];
      back_products(grads, left, state + i * 16 * RIGHT, lane);
#pragma unroll
      for (int f = 0; f < GROUPS; f++) {
        const int feature = i * 8 * GROUPS + f * 8 + 2 * t;
        if (i * 8 * GROUPS + f * 8 >= D) continue;
        float cos[2][2 * TILES], sin[2][2 * TILES];
        if (LRPE) {
#pragma unroll
          for (int e = 0; e < 2; e++) at.turns((u32)theta[feature + e], feature + e, steps, cos[e], sin[e]);
        }
#pragma unroll
        for (int h = 0; h < 2 * TILES; h++) {
          u32* slot = (u32*)(left_slot + (h * 8 + g) * WIDE + feature);
          const u32 x = *slot;
          float result[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float q = e ? high(x) : low(x), gate = SILU ? sigmoid(q) : 1.f;
            float moved = grads[h / 2][f][h % 2 * 2 + e];
            if (LRPE) {
              const float c = cos[e][h], s = sin[e][h], other = grads[h / 2][1][h % 2 * 2 + e];
              torque[i][e] += (float)at.of(feature + e, h) * (q * gate) * (c * other - s * moved);
              moved = moved * c + other * s;
            }
            result[e] = SILU ? moved * gate * (1.f + q * (1.f - gate)) : moved;
          }
          *slot = packed(result[0], result[1]);
        }
      }
    }
    __syncwarp();
    put<TOKENS, D, WIDE, 32>(grad_query + start * grad_query_t, left_slot, grad_query_t, tokens - start, lane);
    __syncwarp();
  }

#pragma unroll 1
  for (int start = warp * TOKENS; PART != 1 && start < tokens; start += WARPS * TOKENS) {
    const Places<2 * TILES> at(places, origin, start + g, tokens);
    u32 left[TILES][PAIRS][4];
    load(left, key, key_t, value, value_t, start);
    float sums[TILES][COLUMN_TILES][4];
    clear<TILES>(sums);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      float grads[TILES][2][4];
      u32 weights[TILES][4] = {};
      back_products(grads, left, grad_state + i * 16 * RIGHT, lane);
#pragma unroll
      for (int f = 0; f < GROUPS; f++) {
        const int feature = i * 8 * GROUPS + f * 8 + 2 * t;
        if (i * 8 * GROUPS + f * 8 >= D) continue;
        float cos[2][2 * TILES], sin[2][2 * TILES];
        if (LRPE) {
#pragma unroll
          for (int e = 0; e < 2; e++) at.turns((u32)theta[feature + e], feature + e, steps, cos[e], sin[e]);
        }
#pragma unroll
        for (int h = 0; h < 2 * TILES; h++) {
          u32* slot = (u32*)(left_slot + (h * 8 + g) * WIDE + feature);
          const u32 x = *slot;
          const bool there = start + h * 8 + g < tokens;
          float result[2], up[2], down[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float weight = there ? exp2_of((e ? high(x) : low(x)) * LOG2E - unit[feature + e]) : 0.f;
            float moved = grads[h / 2][f][h % 2 * 2 + e];
            up[e] = weight;
            if (LRPE) {
              const float c = cos[e][h], s = sin[e][h], other = grads[h / 2][1][h % 2 * 2 + e];
              torque[i][e] += (float)at.of(feature + e, h) * weight * (c * other - s * moved);
              moved = moved * c + other * s;
              up[e] = weight * c, down[e] = weight * s;
            }
            result[e] = weight * (moved - pressure[feature + e]);
          }
          *slot = packed(result[0], result[1]);
          weights[h / 2][f * 2 + h % 2] = packed(up[0], up[1]);
          if (LRPE) weights[h / 2][2 + h % 2] = packed(down[0], down[1]);
        }
      }
      add_products<TILES>(sums, weights, grad_state + i * 16 * RIGHT, TILES, lane);
    }
    __syncwarp();
    place_results(right_slot, sums, lane);
    __syncwarp();
    put<TOKENS, D, WIDE, 32>(grad_key + start * grad_key_t, left_slot, grad_key_t, tokens - start, lane);
    put<TOKENS, V, WIDE, 32>(grad_value + start * grad_value_t, right_slot, grad_value_t, tokens - start, lane);
    __syncwarp();
  }

  if (!LRPE) return;
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float x = torque[LRPE ? i : 0][e];
      x += exchanged(x, 4);
      x += exchanged(x, 8);
      x += exchanged(x, 16);
      if (g == 0) parts[warp * D + i * 8 + 2 * t + e] = x;
    }
  __syncthreads();
  for (int feature = threadIdx.x; feature < D; feature += THREADS) {
    float x = 0.f;
    for (int part = 0; part < WARPS; part++) x += parts[part * D + feature];
    torques[own_vector + feature] = x;
  }
}
