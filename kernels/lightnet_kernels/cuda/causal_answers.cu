// The gradients of keys and values of a block of 64 tokens: triton_backward's key_grads and value_grads in one, but for their exact
// form; their buffers. One block of threads (four warps, 16 tokens each) a block and head, 64 features at a time.
//
// Given by the compiler: LRPE; D and V, widths; GROUPED, whether four warps multiply together (sm_90 alone); BLOCKS on a
// multiprocessor; WARPS, 4.

constexpr int WINDOW = 4;  // blocks
// Tiles of later keys and of what is read at them, where values are first.
constexpr int NEXT = 2 * (D / 64 - 1) > V / 64 ? 2 * (D / 64 - 1) : V / 64;
constexpr int TURNED = LRPE ? 2 : V / 64;  // tiles of what is read, turned; in the end of values' gradients
constexpr int BYTES = 2 * TILE * (NEXT + V / 64 + 3 + HALVES * V / 64 + TURNED) + LRPE * WARPS * 64 * 4;

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
causal_answers(const u16* key, const u16* value, const u16* grad, const u16* x, const u16* later, u16* grad_key, u16* grad_value,
               const int* table, const float* turns, const u16* kv, const float* leave, const int* flag, const float* pressure,
               float* torque, STRIDES(key), STRIDES(value), STRIDES(grad), STRIDES(x), STRIDES(later), STRIDES(grad_key),
               STRIDES(grad_value), i64 blocks, i64 heads) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, first = warp * 16;
  const i64 block = blockIdx.x % (u32)blocks, head = blockIdx.x / (u32)blocks, at = block * heads + head;
  if (flag[at]) return;
  const int *fields = table + block * 4, length = fields[2], place = fields[3];
  const i64 row = fields[0], token = fields[1];
  HERE(key), HERE(value), HERE(grad), HERE(x), HERE(later), HERE(grad_key), HERE(grad_value);
  turns += head * (BT + 1) * (2 * D);
  kv += at * (HALVES * D * V);
  leave += at * D, pressure += at * D, torque += at * D;

  u16 *values = memory, *next = values, *grads = values + NEXT * TILE, *keys = grads + V / 64 * TILE, *read = keys + TILE;
  u16 *taken = read + TILE, *state = taken + TILE, *up = state + HALVES * V / 64 * TILE, *down = up + TILE;
  float* sums = (float*)(up + TURNED * TILE);  // [WARPS, 64]
  fetch<V>(values, value, value_t, length), fetch<V>(grads, grad, grad_t, length);
  commit();
  fetch<64>(keys, key, key_t, length), fetch<64>(read, x, x_t, length);
  commit();
  fetch_state(state, kv, 0);
  commit();

  // pairs [r, t] = <value_r, grad_t>, t not before r, as a left operand.
  u32 own[V / 16][4], pairs[4][4];
  float out[V / 64][8][4], scores[8][4];
  arrived<2>();
  if (GROUPED) copies_fence();
  __syncthreads();
  pairs_of<true>(pairs, own, values, grads, first, lane);
  if (D > 64) {
    __syncthreads();  // nobody reads values any more
#pragma unroll
    for (int part = 1; part < D / 64; part++) {
      fetch<64>(next + (2 * part - 2) * TILE, key + part * 64, key_t, length);
      fetch<64>(next + (2 * part - 1) * TILE, x + part * 64, x_t, length);
    }
  }
  commit();
  zero(scores);
#pragma unroll
  for (int i = 0; i < V / 64; i++) zero(out[i]);

#pragma unroll 1
  for (int part = 0; part < D / 64; part++) {
    u16 *here_keys = part ? next + (2 * part - 2) * TILE : keys, *here_read = part ? next + (2 * part - 1) * TILE : read;
    if (part) arrived<0>();
    else arrived<2>();
    __syncthreads();
    fetch<64>(taken, later + part * 64, later_t, length);
    commit();
    const float *unit = leave + part * 64 + t * 2, *angles = turns + part * 64 + t * 2;
    u32 cosines[4][4], sines[4][4];  // of weights, as a left operand
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 two[4], reads[4];
      load_left(two, here_keys, first, 2 * k, lane);
      if (LRPE) load_left(reads, here_read, first, 2 * k, lane);
      u32 read_up[4], read_down[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {  // tokens g, g + 8, features 8 on and the same
        const int r = first + g + i % 2 * 8, column = k * 16 + i / 2 * 8;
        const float2 units = *(const float2*)(unit + column);
        float a = exp2_of((low(two[i]) - units.x) * LOG2E), b = exp2_of((high(two[i]) - units.y) * LOG2E);
        if (r >= length) a = b = 0.f;
        if (LRPE) {
          const float2 c = *(const float2*)(angles + r * 2 * D + column), s = *(const float2*)(angles + (r * 2 + 1) * D + column);
          cosines[k][i] = packed(a * c.x, b * c.y), sines[k][i] = packed(a * s.x, b * s.y);
          read_up[i] = packed(low(reads[i]) * c.x, high(reads[i]) * c.y), read_down[i] = packed(low(reads[i]) * s.x, high(reads[i]) * s.y);
        } else {
          cosines[k][i] = packed(a, b);
        }
      }
      if (LRPE) store_result(up, read_up, first, 2 * k, lane), store_result(down, read_down, first, 2 * k, lane);
    }
    arrived<0>();
    if (GROUPED) copies_fence();
    __syncthreads();

    read_state(scores, out, cosines, sines, state, LRPE ? up : here_read, down, lane);

    float real[8][4], imag[8][4];
    zero(real);
    if (LRPE) zero(imag);
    begin(real);
    if (LRPE) begin(imag);
    if (GROUPED) hold_all<V / 16>(own), hold_all<4>(pairs), group_fence();
    ask_state(real, imag, own, pairs, state, LRPE ? up : here_read, down, lane);
    started();
    ended<0>(real);
    if (LRPE) ended<0>(imag);
    __syncthreads();  // the state is free
    if (part + 1 < D / 64) fetch_state(state, kv, part + 1);
    commit();

    const float* pressures = pressure + part * 64 + t * 2;
    const float lag = (float)(first + g + place % WINDOW * BT);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      u32 two[4], after[4], made[4];
      load_left(two, here_keys, first, j, lane);
      load_left(after, taken, first, j, lane);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = (j + i) * 8;
        const float2 units = *(const float2*)(unit + column), all = *(const float2*)(pressures + column);
        float moved[2] = {0.f, 0.f};
#pragma unroll
        for (int h = 0; h < 2; h++) {  // tokens g, g + 8
          const int r = first + g + h * 8;
          float2 c, s;
          if (LRPE) c = *(const float2*)(angles + r * 2 * D + column), s = *(const float2*)(angles + (r * 2 + 1) * D + column);
          float slope[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float one = e ? high(two[2 * i + h]) : low(two[2 * i + h]), re = real[j + i][2 * h + e];
            const float weight = exp2_of((one - (e ? units.y : units.x)) * LOG2E);
            float asked = re;
            if (LRPE) {
              const float im = imag[j + i][2 * h + e], cosine = e ? c.y : c.x, sine = e ? s.y : s.x;
              asked = re * cosine + im * sine;
              if (r < length) moved[e] += weight * (im * cosine - re * sine) * (lag + h * 8);
            }
            slope[e] = weight * (asked - (e ? high(after[2 * i + h]) : low(after[2 * i + h])) - (e ? all.y : all.x));
          }
          made[2 * i + h] = packed(slope[0], slope[1]);
        }
        if (LRPE) put_sums(sums + warp * 64, moved, column, lane);
      }
      __syncwarp();
      store_result(here_keys, made, first, j, lane);
    }
    __syncwarp();
    write_rows(grad_key + part * 64, grad_key_t, here_keys, first, length, lane);
    if (LRPE) {
      __syncthreads();
      write_sums(torque + part * 64, sums);
    }
  }

  add_values<true>(out, scores, grads, first, lane);
  __syncthreads();  // what was read, turned, is free
  write_out(grad_value, grad_value_t, up, out, first, length, lane);
}
