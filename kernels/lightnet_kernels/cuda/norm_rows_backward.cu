// Gradients of x (with that of the sum, if it has one), of the gate, and a block's parts of the weights' [2, blocks, W].

constexpr int SUMS = WEIGHT ? W : 0;
constexpr int BYTES = 4 * (WARPS * SCRATCH + (BIAS ? 2 : 1) * SUMS);

extern "C" __device__ int shared_bytes = BYTES;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
norm_rows_backward(const u16* x, const u16* gate, const u16* weight, const u16* bias, const float* scale, const u16* grad,
                   const u16* grad_sum, u16* grad_x, u16* grad_gate, float* grad_weight, float* grad_bias, i64 x_t, i64 gate_t,
                   i64 grad_t, i64 grad_sum_t, i64 tokens, i64 blocks) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float* scratch = (float*)memory + warp * SCRATCH;
  float* sums = (float*)memory + WARPS * SCRATCH;
  Chunk weights[EACH], biases[EACH];
  if (WEIGHT) read(weights, weight, lane);
  if (BIAS) read(biases, bias, lane);
  float weight_sum[EACH][8], bias_sum[EACH][8];
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int e = 0; e < 8; e++) weight_sum[i][e] = bias_sum[i][e] = 0.f;
#pragma unroll 1
  for (i64 token = (i64)blockIdx.x * WARPS + warp; token < tokens; token += blocks * WARPS) {
    Chunk given[EACH], upstream[EACH], further[EACH];
    float root[EACH], value[EACH][8], inner[EACH][8];
    read(given, x + token * x_t, lane);
    read(upstream, grad + token * grad_t, lane);
    if (GATE) read(further, gate + token * gate_t, lane);
    if (RESIDUAL) read(further, grad_sum + token * grad_sum_t, lane);
    read_groups(root, scale + token * GROUPS, lane);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int e = 0; e < 8; e++) value[i][e] = given[i][e];
    if (LAYER) centre(value, scratch, lane);
    float along[EACH], mean[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      along[i] = mean[i] = 0.f;
      float of_gate[8];
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const float normed = value[i][e] * root[i];
        float up = upstream[i][e];
        if (GATE) {
          const float open = sigmoid(further[i][e]);
          const float y = (WEIGHT ? normed * weights[i][e] : normed) + (BIAS ? biases[i][e] : 0.f);
          of_gate[e] = up * y * open * (1.f - open);
          up *= open;
        }
        if (WEIGHT) {
          weight_sum[i][e] += up * normed;
          if (BIAS) bias_sum[i][e] += up;
          up *= weights[i][e];
        }
        along[i] += up * normed, mean[i] += up;
        value[i][e] = normed, inner[i][e] = up;
      }
      if (GATE) write(grad_gate + token * W, i, lane, of_gate);
    }
    over_groups(along, scratch, lane);
    if (LAYER) over_groups(mean, scratch, lane);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      float result[8];
#pragma unroll
      for (int e = 0; e < 8; e++) {
        float one = inner[i][e] - value[i][e] * (along[i] * (1.f / WIDTH));
        if (LAYER) one -= mean[i] * (1.f / WIDTH);
        one *= root[i];
        result[e] = RESIDUAL ? one + further[i][e] : one;
      }
      write(grad_x + token * W, i, lane, result);
    }
  }
  if (!WEIGHT) return;
#pragma unroll 1
  for (int turn = 0; turn < WARPS; turn++) {  // in one order
    __syncthreads();
    if (turn != warp) continue;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!there(i, lane)) continue;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const int col = (lane + 32 * i) * 8 + e;
        sums[col] = weight_sum[i][e] + (turn ? sums[col] : 0.f);
        if (BIAS) sums[SUMS + col] = bias_sum[i][e] + (turn ? sums[SUMS + col] : 0.f);
      }
    }
  }
  __syncthreads();
  for (int col = threadIdx.x; col < W; col += THREADS) {
    grad_weight[(i64)blockIdx.x * W + col] = sums[col];
    if (BIAS) grad_bias[(i64)blockIdx.x * W + col] = sums[SUMS + col];
  }
}
