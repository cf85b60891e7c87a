// Metal's language for a C++ compiler, as far as kernels here use it. One lane is one fibre; see
// runtime.cpp. Kept small: GCC reads it, precompiled, before every kernel.
#pragma once
// C's alone: libstdc++'s are six times as long.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <string.h>

#include "runtime.h"

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef emu_uint3 uint3;

#define device
#define constant
#define thread
#define threadgroup
#define METAL_FUNC inline

// ---- Small floats: stored in 16 bits, computed in float, rounded to nearest even

inline float emu_float(uint bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint emu_bits(float x) {
  uint bits;
  memcpy(&bits, &x, 4);
  return bits;
}

struct bfloat {
  ushort bits;
  bfloat() = default;
  bfloat(float x) {
    uint b = emu_bits(x);
    bits = x != x ? (b >> 16) | 64 : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  }
  operator float() const { return emu_float((uint)bits << 16); }
};

struct half {
  ushort bits;
  half() = default;
  half(float x) {
    uint b = emu_bits(x), sign = (b >> 16) & 0x8000;
    b &= 0x7fffffff;
    if (b > 0x7f800000) {
      bits = sign | 0x7e00;
    } else if (b >= 0x477ff000) {
      bits = sign | 0x7c00;
    } else if (b < 0x38800000) {
      // Subnormal: adding one half puts the rounded mantissa into the lowest bits.
      bits = sign | (emu_bits(emu_float(b) + 0.5f) - 0x3f000000);
    } else {
      bits = sign | ((b - 0x38000000 + 0xfff + ((b >> 13) & 1)) >> 13);
    }
  }
  operator float() const {
    uint sign = (uint)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return emu_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) {
      float x = rest * 5.9604644775390625e-8f;
      return sign ? -x : x;
    }
    return emu_float(sign | ((rest << 13) + 0x38000000));
  }
};
typedef bfloat bfloat16_t;
typedef half float16_t;

#define EMU_SAME_TYPE(T, OP) \
  inline T operator OP(T a, T b) { return T((float)a OP(float) b); }
#define EMU_MIXED(T, OP) \
  inline float operator OP(T a, float b) { return (float)a OP b; } \
  inline float operator OP(float a, T b) { return a OP(float) b; }
#define EMU_SMALL(T) \
  EMU_SAME_TYPE(T, +) EMU_SAME_TYPE(T, -) EMU_SAME_TYPE(T, *) EMU_SAME_TYPE(T, /) \
  inline T operator-(T a) { return T(-(float)a); } \
  inline T& operator+=(T& a, T b) { return a = a + b; } \
  inline T& operator-=(T& a, T b) { return a = a - b; } \
  inline T& operator*=(T& a, T b) { return a = a * b; } \
  EMU_MIXED(T, +) EMU_MIXED(T, -) EMU_MIXED(T, *) EMU_MIXED(T, /)
EMU_SMALL(half)
EMU_SMALL(bfloat)

template <typename T>
constexpr int emu_is_real = 0;
template <>
constexpr int emu_is_real<float> = 1;
template <>
constexpr int emu_is_real<half> = 1;
template <>
constexpr int emu_is_real<bfloat> = 1;

template <typename To, typename From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

// ---- Barriers and simdgroups

struct mem_flags {
  enum { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
};
inline void threadgroup_barrier(int flags, int site = __builtin_LINE()) {
  emu_threadgroup_barrier(flags, site);
}
inline void simdgroup_barrier(int flags, int site = __builtin_LINE()) {
  emu_simdgroup_barrier(flags, site);
}

template <typename T>
struct emu_lanes {
  const unsigned char* slots;
  T operator[](uint lane) const {
    T x;
    __builtin_memcpy(&x, slots + 16 * (lane & 31), sizeof(T));
    return x;
  }
};
template <typename T>
inline emu_lanes<T> emu_share(T x, int site) {
  static_assert(sizeof(T) <= 16, "a lane shares 16 bytes at most");
  return {emu_exchange(&x, sizeof(T), site)};
}

#define EMU_SITE int site = __builtin_LINE()
template <typename T>
inline T simd_shuffle(T x, uint lane, EMU_SITE) {
  return emu_share(x, site)[lane];
}
template <typename T>
inline T simd_broadcast(T x, uint lane, EMU_SITE) {
  return emu_share(x, site)[lane];
}
template <typename T>
inline T simd_shuffle_xor(T x, uint mask, EMU_SITE) {
  return emu_share(x, site)[emu_lane() ^ mask];
}
template <typename T>
inline T simd_shuffle_up(T x, uint by, EMU_SITE) {
  auto all = emu_share(x, site);
  return emu_lane() >= by ? all[emu_lane() - by] : x;
}
template <typename T>
inline T simd_shuffle_down(T x, uint by, EMU_SITE) {
  auto all = emu_share(x, site);
  return emu_lane() + by < 32 ? all[emu_lane() + by] : x;
}

namespace metal {
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
template <typename T>
inline T max(T a, T b) { return a < b ? b : a; }
template <typename T>
inline T min(T a, T b) { return b < a ? b : a; }
}  // namespace metal

// Butterflies with ascending strides: every lane gets the same bits.
template <typename T, typename F>
inline T emu_reduce(T x, int site, F join) {
  auto all = emu_share(x, site);
  T lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = all[i];
  for (int stride = 1; stride < 32; stride <<= 1) {
    for (int i = 0; i < 32; i += 2 * stride) lanes[i] = join(lanes[i], lanes[i + stride]);
  }
  return lanes[0];
}
template <typename T>
inline T simd_sum(T x, EMU_SITE) {
  return emu_reduce(x, site, [](T a, T b) { return T(a + b); });
}
template <typename T>
inline T simd_max(T x, EMU_SITE) {
  return emu_reduce(x, site, [](T a, T b) { return metal::max(a, b); });
}
template <typename T>
inline T simd_min(T x, EMU_SITE) {
  return emu_reduce(x, site, [](T a, T b) { return metal::min(a, b); });
}
inline bool simd_any(bool x, EMU_SITE) {
  return emu_reduce<uint>(x, site, [](uint a, uint b) { return a | b; });
}
inline bool simd_all(bool x, EMU_SITE) {
  return emu_reduce<uint>(x, site, [](uint a, uint b) { return a & b; });
}
template <typename T>
inline T simd_prefix_inclusive_sum(T x, EMU_SITE) {
  auto all = emu_share(x, site);
  T sum = all[0];
  for (uint i = 1; i <= emu_lane(); ++i) sum = T(sum + all[i]);
  return sum;
}
template <typename T>
inline T simd_prefix_exclusive_sum(T x, EMU_SITE) {
  auto all = emu_share(x, site);
  T sum = T(0);
  for (uint i = 0; i < emu_lane(); ++i) sum = T(sum + all[i]);
  return sum;
}

// ---- Counters: whoever reads or sets one is apart from those that add, by a barrier

enum memory_order { memory_order_relaxed };
struct atomic_uint {
  uint value;
};
inline uint atomic_fetch_add_explicit(atomic_uint* p, uint by, memory_order) {
  return emu_atomic_add(&p->value, by);
}
inline uint atomic_load_explicit(const atomic_uint* p, memory_order) { return p->value; }
inline void atomic_store_explicit(atomic_uint* p, uint x, memory_order) { p->value = x; }

// ---- Matrices of 8 x 8: a lane holds two neighbours of a row

struct simdgroup_float8x8 {
  float e[2];
  float* thread_elements() { return e; }
};
inline void simdgroup_multiply_accumulate(
    simdgroup_float8x8& d, simdgroup_float8x8 a, simdgroup_float8x8 b, simdgroup_float8x8 c,
    EMU_SITE) {
  emu_multiply_accumulate(c.e, a.e, b.e, site);
  d = c;
}

// GCC may split a pack into its elements: its alignment is checked here.
template <typename T, int N>
struct pack;
template <int N, typename T>
inline pack<T, N> load_pack(const T* p) {
  emu_check_pack(p, N * sizeof(T));
  return *(const pack<T, N>*)p;
}
template <typename T, int N>
inline void store_pack(T* p, pack<T, N> values) {
  emu_check_pack(p, N * sizeof(T));
  *(pack<T, N>*)p = values;
}
template <typename P>
inline void check_rows(P p, int ld) {
  emu_check_rows(p, (long)ld * (long)sizeof(*p));
}

// ---- Mathematics

#define EMU_MATHS \
  inline float exp(float x) { return expf(x); } \
  inline float exp2(float x) { return exp2f(x); } \
  inline float log(float x) { return logf(x); } \
  inline float log2(float x) { return log2f(x); } \
  inline float sin(float x) { return sinf(x); } \
  inline float cos(float x) { return cosf(x); } \
  inline float tanh(float x) { return tanhf(x); } \
  inline float pow(float x, float y) { return powf(x, y); } \
  inline float sqrt(float x) { return sqrtf(x); } \
  inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
namespace metal {
EMU_MATHS
namespace precise {
EMU_MATHS
}
namespace fast {
EMU_MATHS
}
inline float floor(float x) { return floorf(x); }
inline float ceil(float x) { return ceilf(x); }
inline float rint(float x) { return rintf(x); }
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float abs(float x) { return fabsf(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return fabsf(x) == INFINITY; }
inline uint popcount(uint x) { return __builtin_popcount(x); }
inline uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
template <typename T>
inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T>
inline T select(T no, T yes, bool which) { return which ? yes : no; }
}  // namespace metal
