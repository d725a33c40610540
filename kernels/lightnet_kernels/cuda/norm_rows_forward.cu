// y, x + residual and the inverse roots [T, GROUPS].

constexpr int BYTES = 4 * WARPS * SCRATCH;

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
norm_rows_forward(const u16* x, const u16* residual, const u16* gate, const u16* weight, const u16* bias, u16* y, u16* total,
                  float* scale, i64 x_t, i64 residual_t, i64 gate_t, i64 tokens, i64 blocks, i64 eps_bits) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float* scratch = (float*)memory + warp * SCRATCH;
  const float eps = float_of((u32)eps_bits);
  Chunk weights[EACH], biases[EACH];
  if (WEIGHT) read(weights, weight, lane);
  if (BIAS) read(biases, bias, lane);
#pragma unroll 1
  for (i64 token = (i64)blockIdx.x * WARPS + warp; token < tokens; token += blocks * WARPS) {
    Chunk given[EACH], other[EACH];
    read(given, x + token * x_t, lane);
    if (RESIDUAL) read(other, residual + token * residual_t, lane);
    if (GATE) read(other, gate + token * gate_t, lane);
    float value[EACH][8], root[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
#pragma unroll
      for (int e = 0; e < 8; e++) value[i][e] = given[i][e] + (RESIDUAL ? other[i][e] : 0.f);
      if (RESIDUAL) {  // the norm is that of the sum as stored
        write(total + token * W, i, lane, value[i]);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const u32 both = packed(value[i][e], value[i][e + 1]);
          value[i][e] = low(both), value[i][e + 1] = high(both);
        }
      }
    }
    if (LAYER) centre(value, scratch, lane);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      root[i] = 0.f;
#pragma unroll
      for (int e = 0; e < 8; e++) root[i] += value[i][e] * value[i][e];
    }
    over_groups(root, scratch, lane);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      root[i] = inverse_root(root[i] * (1.f / WIDTH) + eps);
      const int chunk = lane + 32 * i;
      if (there(i, lane) && chunk % PER == 0) scale[token * GROUPS + chunk / PER] = root[i];
      float result[8];
#pragma unroll
      for (int e = 0; e < 8; e++) {
        result[e] = value[i][e] * root[i];
        if (WEIGHT) result[e] *= weights[i][e];
        if (BIAS) result[e] += biases[i][e];
        if (GATE) result[e] *= sigmoid(other[i][e]);
      }
      write(y + token * W, i, lane, result);
    }
  }
}
