// Metal's language for clang's C++ for OpenCL: declarations only. Address spaces are real here.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

typedef __SIZE_TYPE__ size_t;
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef half float16_t;

struct bfloat {
  ushort bits;
  bfloat() = default;
  bfloat(float x);
  operator float() const;
};
typedef bfloat bfloat16_t;

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

struct simdgroup_float8x8 {
  float e[2];
  thread float* thread_elements() thread;
};
void simdgroup_multiply_accumulate(
    thread simdgroup_float8x8& d, simdgroup_float8x8 a, simdgroup_float8x8 b,
    simdgroup_float8x8 c);

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
namespace metal {
LINT_MATHS
namespace precise {
LINT_MATHS
}
namespace fast {
LINT_MATHS
}
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
