// The gradients of keys and values of a block of 64 tokens: triton_backward's key_grads and value_grads in one, but for their exact
// form; their buffers. One block of threads (four warps, 16 tokens each) a block and head, 64 features at a time.
// Those of one block's heads run together: their rows are neighbours in memory.
//
// Given by the compiler: LRPE; D and V, widths; BLOCKS on a multiprocessor; WARPS, 4. For sm_90 alone.

constexpr int WINDOW = 4;  // blocks
constexpr int PARTS = D / 64, TURNS = LRPE ? 2 : 0;
constexpr int VALUES = 2 * (PARTS - 1) > V / 64 ? 2 * (PARTS - 1) : V / 64;  // tiles, of later keys and of what is read at them, too
constexpr int BYTES = 2 * TILE * (VALUES + V / 64 + 3 + TURNS + HALVES * V / 64 + HALVES - 1) + 8 * D;

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_answers(const u16* key, const u16* value, const u16* grad, const u16* x, const u16* later, u16* grad_key, u16* grad_value,
               const int* table, const u16* cosines, const u16* sines, const u16* kv, const float* leave, const int* flag,
               const float* pressure, float* torque, STRIDES(key), STRIDES(value), STRIDES(grad), STRIDES(x), STRIDES(later),
               STRIDES(grad_key), STRIDES(grad_value), i64 heads) {
  BLOCK_AND_HEAD
  HERE(key), HERE(value), HERE(grad), HERE(x), HERE(later), HERE(grad_key), HERE(grad_value);
  cosines += head * BT * D, sines += head * BT * D, kv += at * (HALVES * D * V), torque += at * D;

  u16 *values = memory, *grads = values + VALUES * TILE, *now = grads + V / 64 * TILE, *taken = now + 2 * TILE;
  u16 *turns = taken + TILE, *state = turns + TURNS * TILE, *down = state + HALVES * V / 64 * TILE;
  float *leaves = (float*)(down + (HALVES - 1) * TILE), *pressures = leaves + D, *sums = (float*)down;  // [WARPS, 64]
  fetch<V>(values, value, value_t, length), fetch<V>(grads, grad, grad_t, length);
  commit();
  fetch<64>(now, key, key_t, length), fetch<64>(now + TILE, x, x_t, length), fetch<64>(taken, later, later_t, length);
  if (LRPE) fetch_turns(turns, cosines, sines, 0);
  fetch_vectors(leaves, leave + at * D, pressure + at * D);
  commit();
  fetch_state(state, kv, 0);
  commit();

  // pairs [r, t] = <value_r, grad_t>, t not before r, as a left operand.
  u32 own[V / 16][4], pairs[4][4];
  float out[V / 64][8][4], scores[8][4];
  arrived<2>();
  copies_fence();
  __syncthreads();
  pairs_of<true>(pairs, own, values, grads, first, lane);
  if (PARTS > 1) {
    __syncthreads();  // nobody reads values any more
#pragma unroll
    for (int part = 1; part < PARTS; part++) {
      u16* here = values + (2 * part - 2) * TILE;
      fetch<64>(here, key + part * 64, key_t, length), fetch<64>(here + TILE, x + part * 64, x_t, length);
    }
  }
  commit();
  zero(scores);
#pragma unroll
  for (int i = 0; i < V / 64; i++) zero(out[i]);

#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    u16 *keys = part ? values + (2 * part - 2) * TILE : now, *read = keys + TILE;  // what is read is turned in its place
    if (part) arrived<0>();
    else arrived<2>();
    __syncthreads();
    const float* unit = leaves + part * 64 + t * 2;
    u32 cosine[4][4], sine[4][4];  // of weights, as a left operand
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 two[4], reads[4], c[4], s[4];
      load_left(two, keys, first, 2 * k, lane);
      if (LRPE) {
        load_left(reads, read, first, 2 * k, lane);
        load_left(c, turns, first, 2 * k, lane), load_left(s, turns + TILE, first, 2 * k, lane);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {  // tokens g, g + 8, features 8 on and the same
        const float2 units = *(const float2*)(unit + k * 16 + i / 2 * 8);
        float a = exp2_of((low(two[i]) - units.x) * LOG2E), b = exp2_of((high(two[i]) - units.y) * LOG2E);
        if (first + g + i % 2 * 8 >= length) a = b = 0.f;
        if (LRPE) {
          const float cos0 = half_low(c[i]), cos1 = half_high(c[i]), sin0 = half_low(s[i]), sin1 = half_high(s[i]);
          cosine[k][i] = packed(a * cos0, b * cos1), sine[k][i] = packed(a * sin0, b * sin1);
          c[i] = packed(low(reads[i]) * cos0, high(reads[i]) * cos1), s[i] = packed(low(reads[i]) * sin0, high(reads[i]) * sin1);
        } else {
          cosine[k][i] = packed(a, b);
        }
      }
      if (LRPE) store_result(read, c, first, 2 * k, lane), store_result(down, s, first, 2 * k, lane);
    }
    if (part) arrived<0>();
    else arrived<1>();  // later keys may be on their way
    copies_fence();
    __syncthreads();

    read_state(scores, out, cosine, sine, state, read, down, lane);

    float real[8][4], imag[8][4];
    zero(real);
    if (LRPE) zero(imag);
    begin(real);
    if (LRPE) begin(imag);
    hold_all<V / 16>(own), hold_all<4>(pairs), group_fence();
    ask_state(real, imag, own, pairs, state, read, down, lane);
    group_commit();
    ended(real);
    if (LRPE) ended(imag);
    __syncthreads();  // the state is free
    if (part + 1 < PARTS) fetch_state(state, kv, part + 1);
    commit();

    const float* pressed = pressures + part * 64 + t * 2;
    const float lag = (float)(first + g + place % WINDOW * BT);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 two[4], after[4], c[4], s[4], made[4];
      float moved[2][2] = {};
      load_left(two, keys, first, j, lane);
      load_left(after, taken, first, j, lane);
      if (LRPE) load_left(c, turns, first, j, lane), load_left(s, turns + TILE, first, j, lane);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 units = *(const float2*)(unit + (j + i) * 8), all = *(const float2*)(pressed + (j + i) * 8);
#pragma unroll
        for (int h = 0; h < 2; h++) {  // tokens g, g + 8
          float slope[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float one = e ? high(two[2 * i + h]) : low(two[2 * i + h]), re = real[j + i][2 * h + e];
            const float weight = exp2_of((one - (e ? units.y : units.x)) * LOG2E);
            float asked = re;
            if (LRPE) {
              const float im = imag[j + i][2 * h + e], cosine = e ? half_high(c[2 * i + h]) : half_low(c[2 * i + h]);
              const float sine = e ? half_high(s[2 * i + h]) : half_low(s[2 * i + h]);
              asked = re * cosine + im * sine;
              if (first + g + h * 8 < length) moved[i][e] += weight * (im * cosine - re * sine) * (lag + h * 8);
            }
            slope[e] = weight * (asked - (e ? high(after[2 * i + h]) : low(after[2 * i + h])) - (e ? all.y : all.x));
          }
          made[2 * i + h] = packed(slope[0], slope[1]);
        }
      }
      if (LRPE) put_sums(sums + warp * 64, moved, j * 8, lane);
      store_result(keys, made, first, j, lane);
    }
    __syncwarp();
    if (part + 1 < PARTS) {  // the warp's own rows, which it has read
      fetch<64>(taken, later + (part + 1) * 64, later_t, length);
      if (LRPE) fetch_turns(turns, cosines, sines, part + 1);
    }
    commit();
    write_rows(grad_key + part * 64, grad_key_t, keys, first, length, lane);
    if (LRPE) {
      __syncthreads();
      write_sums(torque + part * 64, sums);
    }
  }

  add_values<true>(out, scores, grads, first, lane);
  write_out(grad_value, grad_value_t, state, out, first, length, lane);  // nobody reads what is asked since the last part
}
