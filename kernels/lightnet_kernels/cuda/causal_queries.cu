// What the queries of a block of 64 tokens ask, and their gradient: triton_backward's query_grads but for its exact form, whose
// buffers these are. One block of threads (four warps, 16 tokens each) a block and head, 64 features at a time.
//
// Given by the compiler: LRPE, SILU; D and V, widths; GROUPED, whether four warps multiply together (sm_90 alone); BLOCKS on a
// multiprocessor; WARPS, 4.

constexpr int WINDOW = 4;  // blocks
// Tiles of later keys and queries, where values are first.
constexpr int NEXT = 2 * (D / 64 - 1) > V / 64 ? 2 * (D / 64 - 1) : V / 64;
constexpr int BYTES = 2 * TILE * (V / 64 + NEXT + 2 + HALVES * V / 64 + 3) + LRPE * WARPS * 64 * 4;

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_queries(const u16* query, const u16* key, const u16* value, const u16* grad, u16* grad_query, u16* x, u16* later,
               const int* table, const float* turns, const u16* kv, const float* enter, const float* mass, const int* flag,
               float* pressure, float* torque, STRIDES(query), STRIDES(key), STRIDES(value), STRIDES(grad), STRIDES(grad_query),
               STRIDES(x), STRIDES(later), i64 blocks, i64 heads) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, first = warp * 16;
  const i64 block = blockIdx.x % (u32)blocks, head = blockIdx.x / (u32)blocks, at = block * heads + head;
  if (flag[at]) return;
  const int *fields = table + block * 4, length = fields[2], place = fields[3];
  const i64 row = fields[0], token = fields[1];
  HERE(query), HERE(key), HERE(value), HERE(grad), HERE(x), HERE(grad_query), HERE(later);
  turns += head * (BT + 1) * (2 * D);
  kv += at * (HALVES * D * V);
  enter += at * D, mass += at * D, pressure += at * D, torque += at * D;

  u16 *grads = memory, *values = grads + V / 64 * TILE, *next = values, *keys = values + NEXT * TILE, *queries = keys + TILE;
  u16 *state = queries + TILE, *weights = state + HALVES * V / 64 * TILE, *up = weights + TILE, *down = up + TILE;
  float* sums = (float*)(weights + 3 * TILE);  // [WARPS, 64]
  fetch<V>(grads, grad, grad_t, length), fetch<V>(values, value, value_t, length);
  commit();
  fetch<64>(keys, key, key_t, length), fetch<64>(queries, query, query_t, length);
  commit();
  fetch_state(state, kv, 0);
  commit();

  // pairs [t, r] = <grad_t, value_r>, r not after t, as a left operand.
  u32 upstream[V / 16][4], pairs[4][4];
  arrived<2>();
  if (GROUPED) copies_fence();
  __syncthreads();
  pairs_of<false>(pairs, upstream, grads, values, first, lane);
  if (D > 64) {
    __syncthreads();  // nobody reads values any more
#pragma unroll
    for (int part = 1; part < D / 64; part++) {
      fetch<64>(next + (2 * part - 2) * TILE, key + part * 64, key_t, length);
      fetch<64>(next + (2 * part - 1) * TILE, query + part * 64, query_t, length);
    }
  }
  commit();

#pragma unroll 1
  for (int part = 0; part < D / 64; part++) {
    u16* here_keys = part ? next + (2 * part - 2) * TILE : keys;
    const u16* here_queries = part ? next + (2 * part - 1) * TILE : queries;
    if (part) arrived<0>();
    else arrived<2>();
    __syncthreads();
    put_weights(weights, up, down, here_keys, enter + part * 64, turns + part * 64, length);
    if (!part) arrived<1>();
    if (GROUPED) copies_fence();
    __syncthreads();

    float real[8][4], imag[8][4], total[8][4];
    u32 before[4][4];
    zero(real), zero(total);
    if (LRPE) zero(imag);
#pragma unroll
    for (int k = 0; k < 4; k++) ones<false>(before[k], first, k * 16, lane);
    begin(real), begin(total);
    if (LRPE) begin(imag);
    if (GROUPED) hold_all<V / 16>(upstream), hold_all<4>(pairs), hold_all<4>(before), group_fence();
    ask_state(real, imag, upstream, pairs, state, LRPE ? up : weights, down, lane);
#pragma unroll
    for (int k = 0; k < 4; k++) times_rows(total, before[k], weights, k * 16, lane);
    started();
    ended<0>(real), ended<0>(total);
    if (LRPE) ended<0>(imag);
    __syncthreads();  // state and weights are free
    if (part + 1 < D / 64) fetch_state(state, kv, part + 1);
    commit();

    const float* angles = turns + part * 64 + t * 2;
    const float lag = (float)(first + g + place % WINDOW * BT);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 q[4], made[3][4];  // asked / s, phi / s, the gradient
      load_left(q, here_queries, first, j, lane);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = part * 64 + (j + i) * 8 + t * 2;
        const float2 earlier = *(const float2*)(mass + column);
        float turned[2] = {0.f, 0.f};
#pragma unroll
        for (int h = 0; h < 2; h++) {  // tokens g, g + 8
          const int r = first + g + h * 8;
          float2 cosines, sines;
          if (LRPE) {
            cosines = *(const float2*)(angles + r * 2 * D + (j + i) * 8), sines = *(const float2*)(angles + (r * 2 + 1) * D + (j + i) * 8);
          }
          float asked[2], read[2], slope[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float scale = inverse(total[j + i][2 * h + e] + (e ? earlier.y : earlier.x));
            const float one = e ? high(q[2 * i + h]) : low(q[2 * i + h]), re = real[j + i][2 * h + e];
            const float gate = SILU ? inverse(1.f + exp2_of(-LOG2E * one)) : 1.f, phi = one * gate;
            read[e] = phi * scale;
            float asks = re;
            if (LRPE) {
              const float im = imag[j + i][2 * h + e], c = e ? cosines.y : cosines.x, s = e ? sines.y : sines.x;
              asks = re * c + im * s;
              turned[e] += read[e] * (im * c - re * s) * (lag + h * 8);
            }
            asks *= scale;
            asked[e] = read[e] * asks;
            slope[e] = SILU ? asks * (gate + phi * (1.f - gate)) : asks;
          }
          made[0][2 * i + h] = packed(asked[0], asked[1]);
          made[1][2 * i + h] = packed(read[0], read[1]);
          made[2][2 * i + h] = packed(slope[0], slope[1]);
        }
        if (LRPE) put_sums(sums + warp * 64, turned, (j + i) * 8, lane);
      }
      store_result(weights, made[0], first, j, lane);
      store_result(up, made[1], first, j, lane);
      store_result(down, made[2], first, j, lane);
    }
    if (GROUPED) copies_fence();
    __syncthreads();
    sum_tokens<true>(total, weights, first, lane);
    write_rows(x + part * 64, x_t, up, first, length, lane);
    write_rows(grad_query + part * 64, grad_query_t, down, first, length, lane);
    if (LRPE) write_sums(torque + part * 64, sums);
    ended<0>(total);
    if (first + g == 0) {
#pragma unroll
      for (int j = 0; j < 8; j++) *(float2*)(pressure + part * 64 + j * 8 + t * 2) = *(float2*)total[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) store_packed(here_keys, total, first, j, lane);
    __syncwarp();
    write_rows(later + part * 64, later_t, here_keys, first, length, lane);
  }
}
