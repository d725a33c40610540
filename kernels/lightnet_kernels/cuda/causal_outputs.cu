// Outputs of a block of 64 tokens: triton_forward's kernel of that name but for its exact form, whose buffers these are. One block
// of threads (four warps, 16 tokens each) a block and head, 64 features at a time.
//
// Given by the compiler: LRPE, SILU; D and V, widths; GROUPED, whether four warps multiply together (sm_90 alone); BLOCKS on a
// multiprocessor; WARPS, 4.

constexpr int NEXT = 2 * (D / 64 - 1);  // tiles of later keys and queries
constexpr int BYTES = 2 * TILE * (V / 64 + NEXT + 2 + HALVES * V / 64 + (LRPE ? 3 : 1));

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_outputs(const u16* query, const u16* key, const u16* value, u16* output, const int* table, const float* turns,
               const u16* kv, const float* enter, const float* mass, const int* flag, STRIDES(query), STRIDES(key),
               STRIDES(value), STRIDES(output), i64 blocks, i64 heads) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, first = warp * 16;
  const i64 block = blockIdx.x % (u32)blocks, head = blockIdx.x / (u32)blocks, at = block * heads + head;
  if (flag[at]) return;
  const int *fields = table + block * 4, length = fields[2];
  const i64 row = fields[0], token = fields[1];
  HERE(query), HERE(key), HERE(value), HERE(output);
  turns += head * (BT + 1) * (2 * D);
  kv += at * (HALVES * D * V);
  enter += at * D, mass += at * D;

  u16 *values = memory, *next = values + V / 64 * TILE, *keys = next + NEXT * TILE, *queries = keys + TILE;
  u16 *state = queries + TILE, *weights = state + HALVES * V / 64 * TILE, *up = weights + TILE, *down = up + TILE;
  fetch<64>(keys, key, key_t, length), fetch<64>(queries, query, query_t, length);
  commit();
  fetch_state(state, kv, 0);
  commit();
#pragma unroll
  for (int part = 1; part < D / 64; part++) {
    fetch<64>(next + (2 * part - 2) * TILE, key + part * 64, key_t, length);
    fetch<64>(next + (2 * part - 1) * TILE, query + part * 64, query_t, length);
  }
  fetch<V>(values, value, value_t, length);
  commit();
  float out[V / 64][8][4], scores[8][4];
  zero(scores);
#pragma unroll
  for (int i = 0; i < V / 64; i++) zero(out[i]);

#pragma unroll 1
  for (int part = 0; part < D / 64; part++) {
    const u16 *here_keys = part ? next + (2 * part - 2) * TILE : keys, *here_queries = part ? next + (2 * part - 1) * TILE : queries;
    if (part) arrived<1>();  // the state may be on its way
    else arrived<2>();
    __syncthreads();
    put_weights(weights, up, down, here_keys, enter + part * 64, turns + part * 64, length);
    if (GROUPED) copies_fence();
    __syncthreads();
    float total[8][4];
    sum_tokens<false>(total, weights, first, lane);
    ended<0>(total);

    u32 cosines[4][4], sines[4][4];  // of what is read, as a left operand
    const float *angles = turns + part * 64 + t * 2, *earlier = mass + part * 64 + t * 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 two[4];
      load_left(two, here_queries, first, 2 * k, lane);
#pragma unroll
      for (int i = 0; i < 4; i++) {  // tokens g, g + 8, features 8 on and the same
        const int r = first + g + i % 2 * 8, column = k * 16 + i / 2 * 8;
        const float2 before = *(const float2*)(earlier + column);
        const float* sum = total[2 * k + i / 2] + i % 2 * 2;
        float x = low(two[i]), y = high(two[i]);
        if (SILU) {
          x *= inverse((1.f + exp2_of(-LOG2E * x)) * (sum[0] + before.x)), y *= inverse((1.f + exp2_of(-LOG2E * y)) * (sum[1] + before.y));
        } else {
          x *= inverse(sum[0] + before.x), y *= inverse(sum[1] + before.y);
        }
        if (LRPE) {
          const float2 c = *(const float2*)(angles + r * 2 * D + column), s = *(const float2*)(angles + (r * 2 + 1) * D + column);
          cosines[k][i] = packed(x * c.x, y * c.y), sines[k][i] = packed(x * s.x, y * s.y);
        } else {
          cosines[k][i] = packed(x, y);
        }
      }
    }
    if (part) arrived<0>();
    else arrived<1>();
    if (GROUPED) copies_fence();
    __syncthreads();
    read_state(scores, out, cosines, sines, state, LRPE ? up : weights, down, lane);
    __syncthreads();  // state and weights are free
    if (part + 1 < D / 64) fetch_state(state, kv, part + 1);
    commit();
  }

  arrived<0>();
  if (GROUPED) copies_fence();
  __syncthreads();
  add_values<false>(out, scores, values, first, lane);
  write_out(output, output_t, state, out, first, length, lane);  // nobody reads the state since the last part
}
