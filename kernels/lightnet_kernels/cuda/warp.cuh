// What a warp does in one instruction: matrix products and loads of their operands, copies to shared memory, exchanges
// between lanes, the special functions. tests/unit/kernels/lanes.h does the same on a CPU.
typedef unsigned int u32;
typedef unsigned short u16;  // holds a bfloat16
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define SHARED_MEMORY extern __shared__ __align__(16) u16 memory[];
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
DEVICE float exchanged(float x, int distance) { return __shfl_xor_sync(0xffffffffu, x, distance); }
DEVICE bool some(bool x) { return __any_sync(0xffffffffu, x); }
