// Outputs of a block of 64 tokens: triton_forward's kernel of that name but for its exact form, whose buffers these are. One block
// of threads (four warps, 16 tokens each) a block and head, 64 features at a time.
//
// Given by the compiler: LRPE, SILU; D and V, widths; BLOCKS on a multiprocessor; WARPS, 4. For sm_90 alone.

constexpr int PARTS = D / 64, TURNS = LRPE ? 2 : 0;  // tiles of cosines and sines, and of turned weights
// Values are where the first part's keys and queries were.
constexpr int BYTES = 2 * TILE * (PARTS * (2 + TURNS) + HALVES * V / 64 + TURNS + (PARTS > 1 ? 0 : V / 64)) + 8 * D;
static_assert(V <= 128);

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_outputs(const u16* query, const u16* key, const u16* value, u16* output, const int* table, const u16* cosines,
               const u16* sines, const u16* kv, const float* enter, const float* mass, const int* flag, STRIDES(query),
               STRIDES(key), STRIDES(value), STRIDES(output), i64 heads) {
  BLOCK_AND_HEAD
  HERE(query), HERE(key), HERE(value), HERE(output);
  cosines += head * BT * D, sines += head * BT * D, kv += at * (HALVES * D * V);

  u16 *pairs = memory, *turns = pairs + PARTS * 2 * TILE, *state = turns + PARTS * TURNS * TILE;  // keys and queries, a part's
  u16 *up = state + HALVES * V / 64 * TILE, *down = up + TILE, *rest = up + TURNS * TILE, *values = PARTS > 1 ? pairs : rest;
  float *enters = (float*)(rest + (PARTS > 1 ? 0 : V / 64) * TILE), *masses = enters + D;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    u16* here = pairs + part * 2 * TILE;
    fetch<64>(here, key + part * 64, key_t, length), fetch<64>(here + TILE, query + part * 64, query_t, length);
    if (LRPE) fetch_turns(turns + part * 2 * TILE, cosines, sines, part);
    if (!part) {
      fetch_vectors(enters, enter + at * D, mass + at * D);
      commit();
      fetch_state(state, kv, 0);
      commit();
    }
  }
  if (PARTS == 1) fetch<V>(values, value, value_t, length);
  commit();
  float out[V / 64][8][4], scores[8][4];
  zero(scores);
#pragma unroll
  for (int i = 0; i < V / 64; i++) zero(out[i]);

#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    u16 *keys = pairs + part * 2 * TILE, *angles = turns + part * 2 * TILE;
    if (part) {
      arrived<2>();  // the state and values may be on their way
      __syncwarp();
    } else {
      arrived<2>();
      __syncthreads();
    }
    put_weights(keys, up, down, angles, enters + part * 64, first, length, lane);
    copies_fence();
    __syncthreads();
    float total[8][4];
    sum_tokens<false>(total, keys, first, lane);
    ended(total);

    u32 real[4][4], imag[4][4];  // of what is read, as a left operand
    const float* earlier = masses + part * 64 + t * 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 two[4], c[4], s[4];
      load_left(two, keys + TILE, first, 2 * k, lane);
      if (LRPE) load_left(c, angles, first, 2 * k, lane), load_left(s, angles + TILE, first, 2 * k, lane);
#pragma unroll
      for (int i = 0; i < 4; i++) {  // tokens g, g + 8, features 8 on and the same
        const float2 before = *(const float2*)(earlier + k * 16 + i / 2 * 8);
        const float* sum = total[2 * k + i / 2] + i % 2 * 2;
        float x = low(two[i]), y = high(two[i]);
        if (SILU) {
          x *= inverse((1.f + exp2_of(-LOG2E * x)) * (sum[0] + before.x)), y *= inverse((1.f + exp2_of(-LOG2E * y)) * (sum[1] + before.y));
        } else {
          x *= inverse(sum[0] + before.x), y *= inverse(sum[1] + before.y);
        }
        if (LRPE) {
          real[k][i] = packed(x * half_low(c[i]), y * half_high(c[i])), imag[k][i] = packed(x * half_low(s[i]), y * half_high(s[i]));
        } else {
          real[k][i] = packed(x, y);
        }
      }
    }
    arrived<1>();  // the state; the last group is later tiles or values
    copies_fence();
    __syncthreads();
    read_state(scores, out, real, imag, state, LRPE ? up : keys, down, lane);
    __syncthreads();  // state and weights are free
    if (part + 1 < PARTS) {
      fetch_state(state, kv, part + 1);
      commit();
      if (!part) fetch<V>(values, value, value_t, length);
      commit();
    }
  }

  arrived<0>();
  copies_fence();
  __syncthreads();
  add_values<false>(out, scores, values, first, lane);
  write_out(output, output_t, state, out, first, length, lane);  // nobody reads the state since the last part
}
