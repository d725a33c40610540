// warp.cuh on a CPU: a thread a lane, in step where lanes exchange. For tests of the kernels without a card.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define DEVICE inline
#define __global__
#define __device__
#define __launch_bounds__(...)
#define SHARED_MEMORY u16* memory = block->memory;
#define INFINITE INFINITY

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};

struct Warp {
  std::barrier<> meet{32};
  u32 box[32][8];
};
struct Block {
  Block(int warps, u16* memory) : warps(warps), meet(32 * warps), memory(memory) {}
  std::vector<Warp> warps;
  std::barrier<> meet;
  u16* memory;
};
struct Index {
  u32 x;
};
static thread_local Index threadIdx, blockIdx;
static thread_local Block* block;
static thread_local Warp* own;
static thread_local int lane_, g_, t_;

inline void __syncthreads() { block->meet.arrive_and_wait(); }
inline void __syncwarp() { own->meet.arrive_and_wait(); }

inline float float_of(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline float low(u32 x) { return float_of(x << 16); }
inline float high(u32 x) { return float_of(x & 0xffff0000u); }
inline float of_half(u32 x) {
  const int power = x >> 10 & 31, rest = x & 1023;
  const float y = power ? ldexpf(1024 + rest, power - 25) : ldexpf(rest, -24);
  return x & 0x8000 ? -y : y;
}
inline float half_low(u32 x) { return of_half(x & 0xffff); }
inline float half_high(u32 x) { return of_half(x >> 16); }
inline u32 rounded(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return std::isnan(x) ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 packed(float low, float high) { return rounded(low) | rounded(high) << 16; }

inline u32 larger2(u32 x, u32 y) { return rounded(fmaxf(low(x), low(y))) | rounded(fmaxf(high(x), high(y))) << 16; }

inline void aligned(const void* x) {
  if ((uintptr_t)x % 16) fprintf(stderr, "an address that is no multiple of 16\n"), abort();
}
inline void tiles(u32* r, const void* row, int count, bool turned) {
  aligned(row);
  if (lane_ < 8 * count) memcpy(own->box[lane_], row, 16);
  __syncwarp();
  for (int i = 0; i < count; i++) {
    auto at = [&](int row, int col) -> u32 { return ((u16*)own->box[i * 8 + row])[col]; };
    r[i] = turned ? at(2 * t_, g_) | at(2 * t_ + 1, g_) << 16 : at(g_, 2 * t_) | at(g_, 2 * t_ + 1) << 16;
  }
  __syncwarp();
}
inline void load_tiles4(u32* r, const void* row) { tiles(r, row, 4, false); }
inline void load_tiles2(u32* r, const void* row) { tiles(r, row, 2, false); }
inline void load_turned4(u32* r, const void* row) { tiles(r, row, 4, true); }
inline void load_turned2(u32* r, const void* row) { tiles(r, row, 2, true); }

inline void store_tiles4(void* row, const u32* r) {
  aligned(row);
  memcpy(own->box[lane_], &row, sizeof row);
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    u16* to;
    memcpy(&to, own->box[i * 8 + g_], sizeof to);
    memcpy(to + 2 * t_, r + i, 4);
  }
  __syncwarp();
}

inline void product(float* c, const u32* a, const u32* b, int halves) {
  memcpy(own->box[lane_], a, 8 * halves);
  memcpy(own->box[lane_] + 4, b, 4 * halves);
  __syncwarp();
  for (int e = 0; e < 4; e++)
    for (int k = 0; k < 8 * halves; k++) {
      const u32 left = own->box[g_ * 4 + k % 8 / 2][k / 8 * 2 + e / 2], right = own->box[(2 * t_ + e % 2) * 4 + k % 8 / 2][4 + k / 8];
      c[e] += (k % 2 ? high(left) : low(left)) * (k % 2 ? high(right) : low(right));
    }
  __syncwarp();
}
inline void product16(float* c, const u32* a, const u32* b) { product(c, a, b, 2); }
inline void product8(float* c, const u32* a, const u32* b) { product(c, a, b, 1); }

// Products of four warps are done when they are waited for, no sooner: who touches the result before, or overwrites what they
// read, is found out.
static thread_local std::vector<std::vector<std::function<void()>>> groups(1);

template <int N, int PANEL> void group_product_now(float (*c)[4], const u32* a, const u16* b) {
  for (int j = 0; j < N / 8; j++) {
    u32 right[2];
    for (int half = 0; half < 2; half++) {
      const u16* at = b + j / 8 * PANEL * 64 + g_ % 8;
      auto row = [&](int k) -> u32 { return at[k * 64 + ((j % 8 ^ (k & 7)) << 3)]; };
      right[half] = row(2 * t_ + 8 * half) | row(2 * t_ + 1 + 8 * half) << 16;
    }
    product16(c[j], a, right);
  }
}
template <int COUNT> void hold(float (*)[4]) {}
inline void hold(u32*) {}
template <int N, int PANEL> void group_product(float (*c)[4], const u32* a, const u16* b, int row = 0) {
  const std::vector<u32> left(a, a + 4);
  groups.back().push_back([=] { group_product_now<N, PANEL>(c, left.data(), b + row * 64); });
}
template <int N> void group_product_turned(float (*c)[4], const u32* a, const u16* b, int column) {
  const std::vector<u32> left(a, a + 4);
  groups.back().push_back([=] {
    for (int j = 0; j < N / 8; j++) {
      u32 right[2];
      for (int half = 0; half < 2; half++) {
        const u16* at = b + (8 * j + g_) * 64 + ((column / 8 + half ^ g_) << 3) + 2 * t_;
        right[half] = at[0] | (u32)at[1] << 16;
      }
      product16(c[j], left.data(), right);
    }
  });
}
inline void group_fence() {}
inline void group_commit() { groups.emplace_back(); }
template <int LEFT> void group_wait() {
  while (groups.size() > LEFT + 1) {
    for (auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}
inline void copies_fence() {}

// Copies are there when they are waited for, no sooner.
static thread_local std::vector<std::vector<std::function<void()>>> copies(1);

inline void copy16(void* to, const void* from, bool there) {
  aligned(to), aligned(from);
  copies.back().push_back([=] { there ? memcpy(to, from, 16) : memset(to, 0, 16); });
}
inline void commit() { copies.emplace_back(); }
template <int LEFT> void arrived() {
  while (copies.size() > LEFT + 1) {
    for (auto& copy : copies.front()) copy();
    copies.erase(copies.begin());
  }
}

inline float exp2_of(float x) { return exp2f(x); }
inline float log2_of(float x) { return log2f(x); }
inline float inverse(float x) { return 1 / x; }
inline float inverse_root(float x) { return 1 / sqrtf(x); }
inline float cos_of(float x) { return cosf(x); }
inline float sin_of(float x) { return sinf(x); }

inline float exchanged(float x, int distance) {
  memcpy(own->box[lane_], &x, 4);
  __syncwarp();
  float y;
  memcpy(&y, own->box[lane_ ^ distance], 4);
  __syncwarp();
  return y;
}
inline bool some(bool x) {
  own->box[lane_][0] = x;
  __syncwarp();
  bool y = false;
  for (auto& from : own->box) y |= from[0] != 0;
  __syncwarp();
  return y;
}

// Runs a kernel's blocks one after the other, each in shared memory full of NaN.
inline void run(int blocks, int warps, int bytes, const std::function<void()>& kernel) {
  for (int number = 0; number < blocks; number++) {
    std::vector<uint4> memory(bytes / 16 + 1, uint4{0x7fc07fc0, 0x7fc07fc0, 0x7fc07fc0, 0x7fc07fc0});
    Block here(warps, (u16*)memory.data());
    std::vector<std::thread> threads;
    for (u32 i = 0; i < 32u * warps; i++)
      threads.emplace_back([&, i] {
        threadIdx.x = i, blockIdx.x = number;
        block = &here, own = &here.warps[i / 32], lane_ = i % 32, g_ = lane_ / 4, t_ = lane_ % 4;
        kernel();
      });
    for (auto& thread : threads) thread.join();
  }
}
