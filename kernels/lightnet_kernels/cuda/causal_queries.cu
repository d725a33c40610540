// What the queries of a block of 64 tokens ask, and their gradient: triton_backward's query_grads but for its exact form, whose
// buffers these are. One block of threads (four warps, 16 tokens each) a block and head, 64 features at a time.
// Those of one block's heads run together: their rows are neighbours in memory.
//
// Given by the compiler: LRPE, SILU; D and V, widths; BLOCKS on a multiprocessor; WARPS, 4. For sm_90 alone.

constexpr int WINDOW = 4;  // blocks
constexpr int PARTS = D / 64, TURNS = LRPE ? 2 : 0;
// Tiles of values, later keys and queries; of upstream gradients, later cosines and sines.
constexpr int VALUES = 2 * (PARTS - 1) > V / 64 ? 2 * (PARTS - 1) : V / 64, GRADS = TURNS * (PARTS - 1) > V / 64 ? TURNS * (PARTS - 1) : V / 64;
constexpr int BYTES = 2 * TILE * (VALUES + GRADS + 2 + TURNS + HALVES * V / 64 + HALVES) + 8 * D;

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_queries(const u16* query, const u16* key, const u16* value, const u16* grad, u16* grad_query, u16* x, u16* later,
               const int* table, const u16* cosines, const u16* sines, const u16* kv, const float* enter, const float* mass,
               const int* flag, float* pressure, float* torque, STRIDES(query), STRIDES(key), STRIDES(value), STRIDES(grad),
               STRIDES(grad_query), STRIDES(x), STRIDES(later), i64 heads) {
  BLOCK_AND_HEAD
  HERE(query), HERE(key), HERE(value), HERE(grad), HERE(x), HERE(grad_query), HERE(later);
  cosines += head * BT * D, sines += head * BT * D, kv += at * (HALVES * D * V);
  pressure += at * D, torque += at * D;

  u16 *values = memory, *grads = values + VALUES * TILE, *own = grads + GRADS * TILE, *turns = own + 2 * TILE;
  u16 *state = turns + TURNS * TILE, *up = state + HALVES * V / 64 * TILE, *down = up + TILE;
  float *enters = (float*)(up + HALVES * TILE), *masses = enters + D, *sums = (float*)down;  // [WARPS, 64]
  fetch<V>(grads, grad, grad_t, length), fetch<V>(values, value, value_t, length);
  commit();
  fetch<64>(own, key, key_t, length), fetch<64>(own + TILE, query, query_t, length);
  if (LRPE) fetch_turns(turns, cosines, sines, 0);
  fetch_vectors(enters, enter + at * D, mass + at * D);
  commit();
  fetch_state(state, kv, 0);
  commit();

  // pairs [t, r] = <grad_t, value_r>, r not after t, as a left operand.
  u32 upstream[V / 16][4], pairs[4][4];
  arrived<2>();
  copies_fence();
  __syncthreads();
  pairs_of<false>(pairs, upstream, grads, values, first, lane);
  if (PARTS > 1) {
    __syncthreads();  // nobody reads values any more
#pragma unroll
    for (int part = 1; part < PARTS; part++) {
      u16* here = values + (2 * part - 2) * TILE;
      fetch<64>(here, key + part * 64, key_t, length), fetch<64>(here + TILE, query + part * 64, query_t, length);
      if (LRPE) fetch_turns(grads + (2 * part - 2) * TILE, cosines, sines, part);
    }
  }
  commit();

#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    u16 *keys = part ? values + (2 * part - 2) * TILE : own, *queries = keys + TILE, *angles = part ? grads + (2 * part - 2) * TILE : turns;
    if (part) arrived<1>();  // the state may be on its way
    else arrived<2>();
    __syncthreads();
    put_weights(keys, up, down, angles, enters + part * 64, first, length, lane);
    if (part) arrived<0>();
    else arrived<1>();
    copies_fence();
    __syncthreads();

    float real[8][4], imag[8][4], total[8][4];
    u32 before[4][4];
    zero(real), zero(total);
    if (LRPE) zero(imag);
    ones<false>(before, first, lane);
    begin(real), begin(total);
    if (LRPE) begin(imag);
    hold_all<V / 16>(upstream), hold_all<4>(pairs), hold_all<4>(before), group_fence();
    ask_state(real, imag, upstream, pairs, state, LRPE ? up : keys, down, lane);
#pragma unroll
    for (int k = 0; k < 4; k++) times_rows(total, before[k], keys, k * 16);
    group_commit();
    ended(real), ended(total);
    if (LRPE) ended(imag);
    __syncthreads();  // state and weights are free
    if (part + 1 < PARTS) fetch_state(state, kv, part + 1);
    commit();

    const float* earlier = masses + part * 64 + t * 2;
    const float lag = (float)(first + g + place % WINDOW * BT);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 q[4], c[4], s[4], made[3][4];  // asked / s, phi / s, the gradient
      float turned[2][2] = {};
      load_left(q, queries, first, j, lane);
      if (LRPE) load_left(c, angles, first, j, lane), load_left(s, angles + TILE, first, j, lane);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 past = *(const float2*)(earlier + (j + i) * 8);
#pragma unroll
        for (int h = 0; h < 2; h++) {  // tokens g, g + 8
          float asked[2], read[2], slope[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float scale = inverse(total[j + i][2 * h + e] + (e ? past.y : past.x));
            const float one = e ? high(q[2 * i + h]) : low(q[2 * i + h]), re = real[j + i][2 * h + e];
            const float gate = SILU ? inverse(1.f + exp2_of(-LOG2E * one)) : 1.f, phi = one * gate;
            read[e] = phi * scale;
            float asks = re;
            if (LRPE) {
              const float im = imag[j + i][2 * h + e], cosine = e ? half_high(c[2 * i + h]) : half_low(c[2 * i + h]);
              const float sine = e ? half_high(s[2 * i + h]) : half_low(s[2 * i + h]);
              asks = re * cosine + im * sine;
              turned[i][e] += read[e] * (im * cosine - re * sine) * (lag + h * 8);
            }
            asks *= scale;
            asked[e] = read[e] * asks;
            slope[e] = SILU ? asks * (gate + phi * (1.f - gate)) : asks;
          }
          made[0][2 * i + h] = packed(asked[0], asked[1]);
          made[1][2 * i + h] = packed(read[0], read[1]);
          made[2][2 * i + h] = packed(slope[0], slope[1]);
        }
      }
      if (LRPE) put_sums(sums + warp * 64, turned, j * 8, lane);
      store_result(keys, made[0], first, j, lane);
      store_result(queries, made[1], first, j, lane);
      store_result(up, made[2], first, j, lane);
    }
    copies_fence();
    __syncthreads();
    sum_tokens<true>(total, keys, first, lane);
    write_rows(x + part * 64, x_t, queries, first, length, lane);
    write_rows(grad_query + part * 64, grad_query_t, up, first, length, lane);
    if (LRPE) write_sums(torque + part * 64, sums);
    ended(total);
    if (first + g == 0) {
#pragma unroll
      for (int j = 0; j < 8; j++) *(float2*)(pressure + part * 64 + j * 8 + t * 2) = *(float2*)total[j];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j += 2) store_packed(up, total, first, j, lane);
    __syncwarp();
    write_rows(later + part * 64, later_t, up, first, length, lane);
  }
}
