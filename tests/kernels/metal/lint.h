// Metal's language, its library and MLX's prelude for clang's C++ for OpenCL: declarations only, of
// what kernels here use. Address spaces are real here.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#define coherent(scope)
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

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
typedef unsigned int uint3 __attribute__((ext_vector_type(3)));

// Metal converts bfloat to wider floats unasked, and nothing to bfloat.
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float x);
  operator float() const;
  explicit operator bool() const = delete;
};
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
#define uint3 lint::uint3
#define bfloat lint::bfloat
#define atomic_uint lint::atomic_uint
typedef bfloat bfloat16_t;
typedef half float16_t;

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
template <typename T> T simd_shuffle(T x, uint lane);
template <typename T> T simd_broadcast(T x, uint lane);
template <typename T> T simd_shuffle_xor(T x, uint mask);
template <typename T> T simd_shuffle_up(T x, uint by);
template <typename T> T simd_shuffle_down(T x, uint by);
template <typename T> T simd_sum(T x);
template <typename T> T simd_max(T x);
template <typename T> T simd_min(T x);
template <typename T> T simd_prefix_inclusive_sum(T x);
template <typename T> T simd_prefix_exclusive_sum(T x);
bool simd_any(bool x);
bool simd_all(bool x);

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

// Metal and MLX's prelude have these for 16-bit floats, and round what they return. Kernels here want
// float.
#define LINT_SMALL(T) \
  T exp(T x) = delete; \
  T exp2(T x) = delete; \
  T log(T x) = delete; \
  T log2(T x) = delete; \
  T sin(T x) = delete; \
  T cos(T x) = delete; \
  T tanh(T x) = delete; \
  T sqrt(T x) = delete; \
  T rsqrt(T x) = delete;
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
  float rsqrt(float x); \
  LINT_SMALL(half) LINT_SMALL(bfloat)
namespace metal {
LINT_MATHS
namespace precise {
LINT_MATHS
}
namespace fast {
LINT_MATHS
}
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
}  // namespace metal
using namespace metal;
