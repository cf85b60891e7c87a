// Metal's language for CUDA's compiler: what is left to say after source.py has taken address
// spaces away. Only the definitions that a kernel uses are sent. It comes after
// <cuda_fp16.h> and <cuda_bf16.h>. Simdgroups are warps; all 32 lanes must be live.
// Tiles need sm_80.

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
using bfloat = __nv_bfloat16;
using bfloat16_t = __nv_bfloat16;
using float16_t = __half;
#define METAL_FUNC inline
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)

// ---- Mixed arithmetic is float, as in Metal (CUDA finds it ambiguous)

template <typename H> struct is_small { };
template <> struct is_small<__half> { using type = float; };
template <> struct is_small<__nv_bfloat16> { using type = float; };
#define MOEFLUX_MIXED(OP) \
template <typename H> inline typename is_small<H>::type operator OP(H a, float b) { return float(a) OP b; } \
template <typename H> inline typename is_small<H>::type operator OP(float a, H b) { return a OP float(b); }
MOEFLUX_MIXED(+);
MOEFLUX_MIXED(-);
MOEFLUX_MIXED(*);
MOEFLUX_MIXED(/);

template <typename To, typename From> inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

// ---- Barriers

struct mem_flags { enum { mem_none = 0, mem_device = 1, mem_threadgroup = 2 }; };
inline void threadgroup_barrier(int) { __syncthreads(); }
inline void simdgroup_barrier(int) { __syncwarp(); }

// ---- Counters in threadgroup memory

typedef uint atomic_uint;
#define memory_order_relaxed 0
inline uint atomic_fetch_add_explicit(atomic_uint* p, uint by, int) { return atomicAdd(p, by); }
inline uint atomic_load_explicit(const atomic_uint* p, int) { return *p; }
inline void atomic_store_explicit(atomic_uint* p, uint x, int) { *p = x; }

// ---- Simdgroups

#define MOEFLUX_ALL 0xffffffffu
template <typename T> inline T simd_shuffle(T x, uint lane) { return __shfl_sync(MOEFLUX_ALL, x, lane); }
template <typename T> inline T simd_broadcast(T x, uint lane) { return __shfl_sync(MOEFLUX_ALL, x, lane); }
template <typename T> inline T simd_shuffle_xor(T x, uint mask) { return __shfl_xor_sync(MOEFLUX_ALL, x, mask); }
template <typename T> inline T simd_shuffle_up(T x, uint by) { return __shfl_up_sync(MOEFLUX_ALL, x, by); }
template <typename T> inline T simd_shuffle_down(T x, uint by) { return __shfl_down_sync(MOEFLUX_ALL, x, by); }
inline bool simd_any(bool x) { return __any_sync(MOEFLUX_ALL, x); }
inline bool simd_all(bool x) { return __all_sync(MOEFLUX_ALL, x); }
template <typename T> inline T simd_sum(T x) {
  for (int mask = 1; mask < 32; mask <<= 1) x = x + simd_shuffle_xor(x, mask);
  return x;
}
// NaN loses against a number, as in Metal.
template <typename T> inline T simd_max(T x) {
  for (int mask = 1; mask < 32; mask <<= 1) x = metal::max(x, simd_shuffle_xor(x, mask));
  return x;
}
template <typename T> inline T simd_min(T x) {
  for (int mask = 1; mask < 32; mask <<= 1) x = metal::min(x, simd_shuffle_xor(x, mask));
  return x;
}
inline uint simd_max(uint x) { return __reduce_max_sync(MOEFLUX_ALL, x); }
inline uint simd_min(uint x) { return __reduce_min_sync(MOEFLUX_ALL, x); }
inline uint lane_id() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
template <typename T> inline T simd_prefix_inclusive_sum(T x) {
  for (uint by = 1; by < 32; by <<= 1) {
    T below = simd_shuffle_up(x, by);
    if (lane_id() >= by) x = x + below;
  }
  return x;
}
template <typename T> inline T simd_prefix_exclusive_sum(T x) {
  T below = simd_shuffle_up(simd_prefix_inclusive_sum(x), 1);
  return lane_id() == 0 ? T(0) : below;
}

// ---- Mathematics

namespace metal { inline float exp(float x) { return ::expf(x); } }
namespace metal { inline float exp2(float x) { return ::exp2f(x); } }
namespace metal { inline float log(float x) { return ::logf(x); } }
namespace metal { inline float log2(float x) { return ::log2f(x); } }
namespace metal { inline float sin(float x) { return ::sinf(x); } }
namespace metal { inline float cos(float x) { return ::cosf(x); } }
namespace metal { inline float tanh(float x) { return ::tanhf(x); } }
namespace metal { inline float pow(float x, float y) { return ::powf(x, y); } }
namespace metal { inline float sqrt(float x) { return ::sqrtf(x); } }
namespace metal { inline float rsqrt(float x) { return ::rsqrtf(x); } }
namespace metal { inline float floor(float x) { return ::floorf(x); } }
namespace metal { inline float ceil(float x) { return ::ceilf(x); } }
namespace metal { inline float rint(float x) { return ::rintf(x); } }
namespace metal { inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); } }
namespace metal { inline bool isnan(float x) { return x != x; } }
namespace metal { inline bool isinf(float x) { return ::fabsf(x) == __int_as_float(0x7f800000); } }
namespace metal { inline float abs(float x) { return ::fabsf(x); } inline int abs(int x) { return x < 0 ? -x : x; } }
namespace metal { inline float max(float a, float b) { return ::fmaxf(a, b); } template <typename T> inline T max(T a, T b) { return a < b ? b : a; } }
namespace metal { inline float min(float a, float b) { return ::fminf(a, b); } template <typename T> inline T min(T a, T b) { return b < a ? b : a; } }
namespace metal { template <typename T> inline T clamp(T x, T low, T high) { return metal::min(metal::max(x, low), high); } }
namespace metal { template <typename T> inline T select(T no, T yes, bool which) { return which ? yes : no; } }
namespace metal { inline uint popcount(uint x) { return __popc(x); } }
namespace metal { inline uint clz(uint x) { return __clz(x); } }
namespace metal::precise { inline float exp(float x) { return ::expf(x); } }
namespace metal::precise { inline float exp2(float x) { return ::exp2f(x); } }
namespace metal::precise { inline float log(float x) { return ::logf(x); } }
namespace metal::precise { inline float log2(float x) { return ::log2f(x); } }
namespace metal::precise { inline float sin(float x) { return ::sinf(x); } }
namespace metal::precise { inline float cos(float x) { return ::cosf(x); } }
namespace metal::precise { inline float tanh(float x) { return ::tanhf(x); } }
namespace metal::precise { inline float pow(float x, float y) { return ::powf(x, y); } }
namespace metal::precise { inline float sqrt(float x) { return ::sqrtf(x); } }
namespace metal::precise { inline float rsqrt(float x) { return 1.0f / ::sqrtf(x); } }
namespace metal::fast { inline float exp(float x) { return __expf(x); } }
namespace metal::fast { inline float exp2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; } }
namespace metal::fast { inline float log(float x) { return __logf(x); } }
namespace metal::fast { inline float log2(float x) { return __log2f(x); } }
namespace metal::fast { inline float sin(float x) { return __sinf(x); } }
namespace metal::fast { inline float cos(float x) { return __cosf(x); } }
namespace metal::fast { inline float rsqrt(float x) { return ::rsqrtf(x); } }

// Hints: what is read once does not displace what was there; the line at p comes closer.
template <int N, typename T> inline pack<T, N> load_once(const T* p) {
  if constexpr (N * sizeof(T) == 16) {
    pack<T, N> x;
    uint* e = (uint*)x.at;
    asm("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3]) : "l"(p));
    return x;
  } else {
    return load_pack<N>(p);
  }
}
inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
inline float reciprocal(float x) { return __fdividef(1.0f, x); }
inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }

// ---- Tiles: mma.sync m16n8k16. Shared memory is read with ldmatrix, other memory in pairs.

template <typename A, typename B> struct same { enum { value = 0 }; };
template <typename A> struct same<A, A> { enum { value = 1 }; };
template <typename T, typename U> inline constexpr bool is_wide() { return sizeof(T) == 2 && same<T, U>::value; }
template <typename T> inline uint pair_at(const T* p) { return *(const uint*)p; }
inline uint shared_address(const void* p) { return uint(__cvta_generic_to_shared(p)); }
#define MOEFLUX_LDMATRIX_4(form) asm volatile("ldmatrix.sync.aligned.m8n8.x4" form ".shared.b16 {%0,%1,%2,%3}, [%4];" \
  : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3]) : "r"(at) : "memory")
#define MOEFLUX_LDMATRIX_2(form) asm volatile("ldmatrix.sync.aligned.m8n8.x2" form ".shared.b16 {%0,%1}, [%2];" \
  : "=r"(e[0]), "=r"(e[1]) : "r"(at) : "memory")

inline void narrow(float* to, float x, float y) { to[0] = x; to[1] = y; }
inline void narrow(__half* to, float x, float y) { *(__half2*)to = __floats2half2_rn(x, y); }
inline void narrow(__nv_bfloat16* to, float x, float y) { *(__nv_bfloat162*)to = __floats2bfloat162_rn(x, y); }

template <typename T, typename U> inline void load_a(tile_a<T>& a, const U* p, int ld, uint lane) {
  if constexpr (is_wide<T, U>()) {
    uint* e = (uint*)a.e;
    if (__isShared(p)) {
      uint at = shared_address(p + (lane & 15) * ld + (lane >> 4) * 8);
      MOEFLUX_LDMATRIX_4("");
    } else {
      for (int i = 0; i < 4; ++i) e[i] = pair_at(p + a.row(2 * i, lane) * ld + a.col(2 * i, lane));
    }
  } else {
    for (int i = 0; i < 8; ++i) a.e[i] = T(p[a.row(i, lane) * ld + a.col(i, lane)]);
  }
}
template <typename T, typename U> inline void load_a_t(tile_a<T>& a, const U* p, int ld, uint lane) {
  if (is_wide<T, U>() && __isShared(p)) {
    uint* e = (uint*)a.e;
    uint at = shared_address(p + ((lane & 7) + (lane >> 4) * 8) * ld + (lane & 8));
    MOEFLUX_LDMATRIX_4(".trans");
  } else {
    for (int i = 0; i < 8; ++i) a.e[i] = T(p[a.col(i, lane) * ld + a.row(i, lane)]);
  }
}
template <typename T, typename U> inline void load_b(tile_b<T>& b, const U* p, int ld, uint lane) {
  if (is_wide<T, U>() && __isShared(p)) {
    uint* e = (uint*)b.e;
    uint at = shared_address(p + (lane & 15) * ld);
    MOEFLUX_LDMATRIX_2(".trans");
  } else {
    for (int i = 0; i < 4; ++i) b.e[i] = T(p[b.row(i, lane) * ld + b.col(i, lane)]);
  }
}
template <typename T, typename U> inline void load_b_t(tile_b<T>& b, const U* p, int ld, uint lane) {
  if constexpr (is_wide<T, U>()) {
    uint* e = (uint*)b.e;
    if (__isShared(p)) {
      uint at = shared_address(p + (lane & 7) * ld + (lane & 8));
      MOEFLUX_LDMATRIX_2("");
    } else {
      for (int i = 0; i < 2; ++i) e[i] = pair_at(p + b.col(2 * i, lane) * ld + b.row(2 * i, lane));
    }
  } else {
    for (int i = 0; i < 4; ++i) b.e[i] = T(p[b.col(i, lane) * ld + b.row(i, lane)]);
  }
}

#define MOEFLUX_MMA_16(type) asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
  : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
inline void mma_16(float* c, const uint* a, const uint* b, __half) { MOEFLUX_MMA_16("f16"); }
inline void mma_16(float* c, const uint* a, const uint* b, __nv_bfloat16) { MOEFLUX_MMA_16("bf16"); }

// Three TF32 products: x = high + low, low low is dropped. Inside a tile the order of k is free,
// so that elements lie as in the 16-bit form. Tensor cores cut their sums off instead of rounding
// them: each product of 8 columns begins at zero, and the sum over products is rounded here.
inline uint tf32(float x) {
  uint y;
  asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
inline void mma_tf32(float* c, const uint* a, const uint* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
inline void mma_float(float* c, const float* a, const float* b) {
  uint high[6], low[6];
  for (int k = 0; k < 2; ++k) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < 6; ++i) {
      float x = i < 4 ? a[4 * k + i] : b[2 * k + i - 4];
      high[i] = tf32(x);
      low[i] = tf32(x - __uint_as_float(high[i]));
    }
    mma_tf32(sum, low, high + 4);
    mma_tf32(sum, high, low + 4);
    mma_tf32(sum, high, high + 4);
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  }
}
template <typename T> inline void mma(tile_c& c, const tile_a<T>& a, const tile_b<T>& b) {
  if constexpr (same<T, float>::value) {
    mma_float(c.e, a.e, b.e);
  } else {
    mma_16(c.e, (const uint*)a.e, (const uint*)b.e, T());
  }
}

// ---- Affine words of 2 or 4 bits as 16-bit floats, two at a time. With the exponent of `base` in
// front, a number q is base + q, exactly.

template <typename T> struct pair_of { };
template <> struct pair_of<__half> { using type = __half2; enum { base = 0x6400 }; };
template <> struct pair_of<__nv_bfloat16> { using type = __nv_bfloat162; enum { base = 0x4300 }; };
template <int BITS, typename T> inline void spread_pairs(T* to, uint word, T scale, T bias) {
  using pair = typename pair_of<T>::type;
  const uint base = pair_of<T>::base * 0x10001u, mask = ((1u << BITS) - 1) * 0x10001u;
  pair scales{scale, scale}, biases{bias, bias};
  uint previous = 0;
  for (int i = 0; i < 16 / BITS; ++i) {
    uint bits = (word >> (i * BITS)) & mask | base;
    pair q = __hfma2(__hsub2(as_type<pair>(bits), as_type<pair>(base)), scales, biases);
    uint own = as_type<uint>(q);
    if (i % 2) {
      ((uint*)to)[i / 2] = __byte_perm(previous, own, 0x5410);
      ((uint*)to)[i / 2 + 8 / BITS] = __byte_perm(previous, own, 0x7632);
    }
    previous = own;
  }
}
// Numbers 0 and 4 of a word of 4-bit numbers.
template <typename T> inline uint spread_pair(uint word, T scale, T bias) {
  using pair = typename pair_of<T>::type;
  const uint base = pair_of<T>::base * 0x10001u;
  pair q = __hsub2(as_type<pair>(word & 0x000f000fu | base), as_type<pair>(base));
  return as_type<uint>(__hfma2(q, pair{scale, scale}, pair{bias, bias}));
}

// ---- IQ4_NL and IQ4_XS: four bytes below 16 choose from a table of 16 bytes

inline uint in_table(uint word) {
  const uint pairs = word | word >> 4, at = (pairs & 0xff | pairs >> 8 & 0xff00) & 0x7777u;
  const uint lower = __byte_perm(0x3f2d1801u, 0x766a5d4fu, at);
  const uint upper = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, at), high = (word >> 3 & 0x01010101u) * 255u;
  return lower & ~high | upper & high;
}
