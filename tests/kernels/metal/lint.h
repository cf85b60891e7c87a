// Metal's language and its library for clang's C++ for OpenCL: declarations only, of what kernels here
// and MLX's prelude use. Address spaces are real here.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#define coherent(scope)
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

namespace metal {
template <typename T, int N> struct vec;
template <typename T> struct vec<T, 2> {
  T x, y;
  constexpr vec(T x, T y) : x(x), y(y) {}
};
template <typename T> struct vec<T, 3> {
  T x, y, z;
  constexpr vec(T x, T y, T z) : x(x), y(y), z(z) {}
};
}  // namespace metal

// Types that Metal knows without a header. Each name is a macro for one with a scope, so that nothing
// else can be called so.
namespace lint {
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;

// Metal converts bfloat to wider floats unasked, and nothing to bfloat. Two of them make a third.
struct bfloat {
  ushort bits;
  bfloat() = default;
  constexpr bfloat(const bfloat& x) = default;
  constexpr bfloat(const constant bfloat& x) : bits(x.bits) {}
  constexpr explicit bfloat(float x) : bits(__builtin_bit_cast(uint, x) >> 16) {}
  constexpr operator float() const { return __builtin_bit_cast(float, (uint)bits << 16); }
  explicit operator bool() const = delete;
};
constexpr bfloat operator-(bfloat a) { return bfloat(-(float)a); }
constexpr bfloat operator+(bfloat a, bfloat b) { return bfloat((float)a + (float)b); }
constexpr bfloat operator-(bfloat a, bfloat b) { return bfloat((float)a - (float)b); }
constexpr bfloat operator*(bfloat a, bfloat b) { return bfloat((float)a * (float)b); }
constexpr bfloat operator/(bfloat a, bfloat b) { return bfloat((float)a / (float)b); }

typedef metal::vec<uint, 2> uint2;
typedef metal::vec<uint, 3> uint3;
class atomic_uint {
  uint value;
};
}  // namespace lint
#define uint lint::uint
#define ushort lint::ushort
#define uchar lint::uchar
#define ulong lint::ulong
#define size_t lint::size_t
#define int8_t lint::int8_t
#define int16_t lint::int16_t
#define int32_t lint::int32_t
#define int64_t lint::int64_t
#define uint8_t lint::uint8_t
#define uint16_t lint::uint16_t
#define uint32_t lint::uint32_t
#define uint64_t lint::uint64_t
#define uint2 lint::uint2
#define uint3 lint::uint3
#define bfloat lint::bfloat
#define atomic_uint lint::atomic_uint

// Qualifiers of functions.
#define kernel __attribute__((annotate("kernel")))
#define vertex __attribute__((annotate("vertex")))
#define fragment __attribute__((annotate("fragment")))

struct mem_flags {
  enum { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
};
void threadgroup_barrier(int flags);
void simdgroup_barrier(int flags);

template <typename To, typename From> To as_type(From x);

// What a counter holds is read and set by functions alone.
enum memory_order { memory_order_relaxed };
uint atomic_fetch_add_explicit(volatile threadgroup atomic_uint* p, uint by, memory_order order);
uint atomic_load_explicit(const volatile threadgroup atomic_uint* p, memory_order order);
void atomic_store_explicit(volatile threadgroup atomic_uint* p, uint x, memory_order order);

struct simdgroup_float8x8 {
  float e[2];
  thread float* thread_elements() thread;
};
void simdgroup_multiply_accumulate(
    thread simdgroup_float8x8& d, simdgroup_float8x8 a, simdgroup_float8x8 b,
    simdgroup_float8x8 c);

#define LINT_EVERYWHERE(FUNCTIONS) \
  namespace metal { \
  FUNCTIONS \
  namespace precise { FUNCTIONS } \
  namespace fast { FUNCTIONS } \
  }
#define LINT_MATHS \
  float exp(float x); \
  float exp2(float x); \
  float log(float x); \
  float log2(float x); \
  float sin(float x); \
  float cos(float x); \
  float tanh(float x); \
  float pow(float x, float y); \
  float sqrt(float x); \
  float rsqrt(float x);
LINT_EVERYWHERE(LINT_MATHS)
// Metal has these for half and MLX's prelude for bfloat, and they round what they return. Kernels here
// want float.
#define LINT_ROUNDS __attribute__((unavailable("it rounds to 16 bits")))
#define LINT_ROUNDED(T) \
  LINT_ROUNDS T exp(T x); \
  LINT_ROUNDS T exp2(T x); \
  LINT_ROUNDS T log(T x); \
  LINT_ROUNDS T log2(T x); \
  LINT_ROUNDS T sin(T x); \
  LINT_ROUNDS T cos(T x); \
  LINT_ROUNDS T tanh(T x); \
  LINT_ROUNDS T sqrt(T x); \
  LINT_ROUNDS T rsqrt(T x);
LINT_EVERYWHERE(LINT_ROUNDED(half) LINT_ROUNDED(bfloat))

namespace metal {
// Of memory that the host shares. A fence's order is no atomic's.
enum thread_scope { thread_scope_thread };
enum fence_order { memory_order_seq_cst };
void atomic_thread_fence(int flags, fence_order order, thread_scope scope);
float floor(float x);
float ceil(float x);
float rint(float x);
float fma(float a, float b, float c);
float abs(float x);
int abs(int x);
bool isnan(float x);
bool isinf(float x);
uint popcount(uint x);
uint clz(uint x);
float max(float a, float b);
float min(float a, float b);
template <typename T> T max(T a, T b);
template <typename T> T min(T a, T b);
template <typename T> T clamp(T x, T low, T high);
template <typename T> T select(T no, T yes, bool which);
float atan2(float y, float x);
float fabs(float x);
float fmax(float a, float b);
float fmin(float a, float b);

template <bool, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <typename T, typename U> constexpr constant bool is_same_v = __is_same(T, U);
template <typename T, typename U>
constexpr constant bool is_convertible_v = __is_convertible(T, U);

template <typename T> struct numeric_limits {
  static constexpr T max() { return T(0); }
  static constexpr T min() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};

#define __METAL_FAST_MATH__ 1
#define __METAL_MAYBE_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 1

struct os_log {
  constexpr os_log(constant char* subsystem, constant char* category) constant {}
  template <typename... Args> void log_debug(constant char* format, Args... args) const constant;
};

// Between lanes: numbers of 32 bits and less. MLX's prelude has more.
template <typename T> constexpr constant bool lint_lanes =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, int> || is_same_v<T, uint> ||
    is_same_v<T, short> || is_same_v<T, ushort> || is_same_v<T, char> || is_same_v<T, uchar> ||
    is_same_v<T, uint2>;
template <typename T> using lint_lane = enable_if_t<lint_lanes<T>, T>;
template <typename T> lint_lane<T> simd_shuffle(T x, ushort lane);
template <typename T> lint_lane<T> simd_broadcast(T x, ushort lane);
template <typename T> lint_lane<T> simd_shuffle_xor(T x, ushort mask);
template <typename T> lint_lane<T> simd_shuffle_up(T x, ushort by);
template <typename T> lint_lane<T> simd_shuffle_down(T x, ushort by);
template <typename T> lint_lane<T> simd_shuffle_and_fill_up(T x, T filling, ushort by);
template <typename T> lint_lane<T> simd_sum(T x);
template <typename T> lint_lane<T> simd_max(T x);
template <typename T> lint_lane<T> simd_min(T x);
template <typename T> lint_lane<T> simd_prefix_inclusive_sum(T x);
template <typename T> lint_lane<T> simd_prefix_exclusive_sum(T x);
bool simd_any(bool x);
bool simd_all(bool x);
}  // namespace metal
