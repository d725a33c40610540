// What a warp does in one instruction: matrix products and loads of their operands, copies to shared memory, exchanges
// between lanes, the special functions. tests/unit/kernels/lanes.h does the same on a CPU.
typedef unsigned int u32;
typedef unsigned short u16;  // holds a bfloat16
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY extern __shared__ __align__(1024) u16 memory[];
#define INFINITE __int_as_float(0x7f800000)

DEVICE u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }

// Four or two tiles of 8 x 8 bfloat16, a row's address by each lane; with _t each tile transposed.
#define LOAD_TILES(name, form)                                                                                        \
  DEVICE void name##4(u32* r, const void* row) {                                                                      \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0,%1,%2,%3}, [%4];"                              \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");              \
  }                                                                                                                   \
  DEVICE void name##2(u32* r, const void* row) {                                                                      \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" form ".shared.b16 {%0,%1}, [%2];"                                    \
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");                                      \
  }
LOAD_TILES(load_tiles, "")
LOAD_TILES(load_turned, ".trans")

// The same to shared memory, of sm_90 and later.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
DEVICE void store_tiles4(void* row, const u32* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3]) : "memory");
}
#endif

// c [16, 8] += a [16, 16 or 8] b [.., 8]
DEVICE void product16(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void product8(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// The products of four warps together, of sm_90 alone: c [16, N] += a [16, 16] b [16, N], a warp its own rows of a and c, in the
// registers of product16; b in shared memory, panels of 64 columns and PANEL rows, in each row of 128 bytes the chunk of 16
// bytes i at i ^ row % 8, panels at multiples of 1024 bytes, from row `row` on. They go on behind the threads' backs, which fence what they
// wrote (registers; copies to shared memory) and wait before they touch a, b or c.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FOUR(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 1), FOUR(c, i + 2), FOUR(c, i + 3)
template <int N, int PANEL> DEVICE void group_product(float (*c)[4], const u32* a, const u16* b, int row = 0) {
  const unsigned long long place = 1ull << 62 | 64ull << 32 | (u32)(PANEL * 8 << 16) | (shared_address(b) >> 4) + row * 8;
  if constexpr (N == 128)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
                 "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                 "{%64,%65,%66,%67}, %68, p, 1, 1, 1;}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(place), "r"(1));
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(place), "r"(1));
}
// The same with b^T: c [16, N] += a [16, 16] (b [N, 16 columns from `column` on])^T, b one panel of 64 columns.
template <int N> DEVICE void group_product_turned(float (*c)[4], const u32* a, const u16* b, int column) {
  static_assert(N == 64);
  const unsigned long long place = 1ull << 62 | 64ull << 32 | 1u << 16 | (shared_address(b) >> 4) + column / 8;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
               : SIXTEEN(c, 0), SIXTEEN(c, 4)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(place), "r"(1));
}
// Registers that the compiler must have ready here, and not before.
template <int COUNT> DEVICE void hold(float (*c)[4]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : FOUR(c, i)::"memory");
}
DEVICE void hold(u32* a) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory"); }
DEVICE void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
DEVICE void copies_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else  // never called
template <int N, int PANEL> DEVICE void group_product(float (*)[4], const u32*, const u16*, int = 0) {}
template <int N> DEVICE void group_product_turned(float (*)[4], const u32*, const u16*, int) {}
template <int COUNT> DEVICE void hold(float (*)[4]) {}
DEVICE void hold(u32*) {}
DEVICE void group_fence() {}
DEVICE void group_commit() {}
template <int LEFT> DEVICE void group_wait() {}
DEVICE void copies_fence() {}
#endif

// 16 bytes to shared memory behind the threads' backs, or zeros.
DEVICE void copy16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

#define FUNCTION(name, instruction)                         \
  DEVICE float name(float x) {                              \
    float y;                                                \
    asm(instruction ".f32 %0, %1;" : "=f"(y) : "f"(x));     \
    return y;                                               \
  }
FUNCTION(exp2_of, "ex2.approx.ftz")
FUNCTION(log2_of, "lg2.approx.ftz")
FUNCTION(inverse, "rcp.approx.ftz")
FUNCTION(inverse_root, "rsqrt.approx.ftz")
FUNCTION(cos_of, "cos.approx.ftz")
FUNCTION(sin_of, "sin.approx.ftz")

DEVICE u32 packed(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
// The larger ones of two pairs of bfloat16.
DEVICE u32 larger2(u32 x, u32 y) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE float low(u32 x) { return float_of(x << 16); }
DEVICE float high(u32 x) { return float_of(x & 0xffff0000u); }
// Of two float16.
DEVICE float half_low(u32 x) {
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x));
  return y;
}
DEVICE float half_high(u32 x) {
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x));
  return y;
}
DEVICE float exchanged(float x, int distance) { return __shfl_xor_sync(0xffffffffu, x, distance); }
DEVICE bool some(bool x) { return __any_sync(0xffffffffu, x); }
