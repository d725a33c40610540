// Norms (model-spec 4) of rows of W = GROUPS x WIDTH features, a warp a row, each tensor read and written once: for widths that
// are no powers of two, of which Triton's tiles would take a third to a half in vain.
//
// A lane has every 32nd chunk of 8 features of a row, so that a warp reads and writes 512 bytes side by side, and its share of
// the weights' gradients stays in registers from row to row.
//
// Given by the compiler: WIDTH of a group and GROUPS (heads; 1: one norm over the row); LAYER, RESIDUAL, GATE, WEIGHT, BIAS as
// in `triton_norms`; WARPS of a block, BLOCKS on a multiprocessor.

constexpr float LOG2E = 1.4426950408889634f;
constexpr int W = GROUPS * WIDTH, CHUNKS = W / 8;
constexpr int EACH = (CHUNKS + 31) / 32;               // chunks of a lane
constexpr int PER = WIDTH / 8, STEP = PER | 1;         // chunks of a group; odd: groups lie in different banks
constexpr int SCRATCH = GROUPS == 1 ? 0 : GROUPS * STEP + GROUPS;  // floats of a warp
constexpr int THREADS = 32 * WARPS;

struct Chunk {
  u32 at[4];
  DEVICE float operator[](int e) const { return e % 2 ? high(at[e / 2]) : low(at[e / 2]); }
};

DEVICE bool there(int i, int lane) { return CHUNKS % 32 == 0 || lane + 32 * i < CHUNKS; }

// A row's chunks of this lane, zeros beyond its end.
DEVICE void read(Chunk* to, const u16* row, int lane) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    uint4 x = {0, 0, 0, 0};
    if (there(i, lane)) x = *(const uint4*)(row + (lane + 32 * i) * 8);
    to[i].at[0] = x.x, to[i].at[1] = x.y, to[i].at[2] = x.z, to[i].at[3] = x.w;
  }
}

DEVICE void write(u16* row, int i, int lane, const float* x) {
  if (!there(i, lane)) return;
  uint4 y;
  y.x = packed(x[0], x[1]), y.y = packed(x[2], x[3]), y.z = packed(x[4], x[5]), y.w = packed(x[6], x[7]);
  *(uint4*)(row + (lane + 32 * i) * 8) = y;
}

// Of sums over each chunk, those over each chunk's group, in one order; `scratch` is the warp's.
DEVICE void over_groups(float* sums, float* scratch, int lane) {
  if (GROUPS == 1) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += there(i, lane) ? sums[i] : 0.f;
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += exchanged(sum, distance);
#pragma unroll
    for (int i = 0; i < EACH; i++) sums[i] = sum;
    return;
  }
  float* totals = scratch + GROUPS * STEP;
  __syncwarp();  // all have read what the last call left
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int chunk = lane + 32 * i;
    if (there(i, lane)) scratch[chunk / PER * STEP + chunk % PER] = sums[i];
  }
  __syncwarp();
  for (int group = lane; group < GROUPS; group += 32) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < PER; j++) sum += scratch[group * STEP + j];
    totals[group] = sum;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < EACH; i++) sums[i] = there(i, lane) ? totals[(lane + 32 * i) / PER] : 0.f;
}

// A number of each chunk's group, [GROUPS] of a row.
DEVICE void read_groups(float* to, const float* row, int lane) {
#pragma unroll
  for (int i = 0; i < EACH; i++) to[i] = there(i, lane) ? row[(lane + 32 * i) / PER] : 0.f;
}

// x less its group's mean.
DEVICE void centre(float (*x)[8], float* scratch, int lane) {
  float mean[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    mean[i] = 0.f;
#pragma unroll
    for (int e = 0; e < 8; e++) mean[i] += x[i][e];
  }
  over_groups(mean, scratch, lane);
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int e = 0; e < 8; e++) x[i][e] -= mean[i] * (1.f / WIDTH);
}

DEVICE float sigmoid(float x) { return inverse(1.f + exp2_of(-LOG2E * x)); }
