// What several kernels share. Every function is `inline` and names the address space of every
// pointer; a lane is thread_index_in_simdgroup.

// ---- Wide accesses

// N neighbours; 16 bytes at most are one access.
template <typename T, int N>
struct alignas(N * sizeof(T)) pack {
  T at[N];
};

// p is aligned to the size of the pack.
template <int N, typename T>
inline pack<T, N> load_pack(const device T* p) {
  return *(const device pack<T, N>*)p;
}
template <int N, typename T>
inline pack<T, N> load_pack(const threadgroup T* p) {
  return *(const threadgroup pack<T, N>*)p;
}
template <typename T, int N>
inline void store_pack(device T* p, pack<T, N> values) {
  *(device pack<T, N>*)p = values;
}
template <typename T, int N>
inline void store_pack(threadgroup T* p, pack<T, N> values) {
  *(threadgroup pack<T, N>*)p = values;
}

// ---- Affine numbers of BITS bits in words of 32, the lowest first; BITS = 0: floats

template <int BITS>
inline constexpr int per_word() {
  return BITS == 0 ? 1 : 32 / (BITS == 0 ? 1 : BITS);
}

// The bits of the i-th number of a word where they are, or 16 places lower.
template <int BITS, typename W>
inline uint bits_at(W word, int i) {
  uint bits = uint(word);
  if (i * BITS >= 16) {
    bits >>= 16;
  }
  return bits & (((1u << BITS) - 1) << (i * BITS % 16));
}

// The i-th number of a word, minus `less`. As the low bits of a float's mantissa it is read
// without a conversion, which many GPUs do at a fraction of their speed.
template <int BITS, typename W>
inline float number(W word, int i, float less) {
  if (BITS == 0) {
    return float(word);
  }
  const float unit = float(1 << i * BITS % 16);
  return metal::fma(
      as_type<float>(bits_at<BITS>(word, i) | 0x4b000000u), 1.0f / unit, -8388608.0f / unit - less);
}

#ifdef MOEFLUX_CUDA
// The i-th number of a word, times 2^(i * BITS % 16 - 149): a float that Metal takes for zero.
template <int BITS, typename W>
inline float bare_number(W word, int i) {
  return as_type<float>(bits_at<BITS>(word, i));
}
#endif

// ---- MXFP4: words of eight E2M1 numbers, with a scale of one byte (E8M0) for 32 neighbours

template <typename S>
inline constexpr bool are_bytes() {
  return sizeof(S) == 1;
}

// The eight numbers of a word times 2^-14: of halves they are the highest bits, those below the
// normal ones too.
inline void tiny_numbers(thread float* to, uint word) {
  for (int i = 0; i < 4; ++i) {
    const uint two = word >> 4 * i;
    const uint halves = ((two << 9) & 0x0e000e00u) | ((two << 12) & 0x80008000u);
    to[i] = float(as_type<half>(ushort(halves)));
    to[i + 4] = float(as_type<half>(ushort(halves >> 16)));
  }
}

// What tiny numbers are multiplied with: 2^14 and the scale, 2^(byte - 127). The smallest scale is no
// normal float, which Metal may take for zero.
inline float of_tiny(uint byte) {
  return byte == 0 ? as_type<float>(14u << 23) : as_type<float>(byte << 23) * 16384.0f;
}

// ---- Elementwise

// a b, rounded before it is added to anything: compilers may fuse a product with a sum.
#ifndef MOEFLUX_CUDA
inline float rounded_product(float a, float b) {
#pragma METAL fp contract(off)
  return a * b;
}
#endif

// 1 / x, two units in the last place off at most. On CUDA it is in the dialect: there a division has
// branches, which keep the loads behind it from starting.
#ifndef MOEFLUX_CUDA
inline float reciprocal(float x) {
  return 1.0f / x;
}
#endif
inline float sigmoid(float x) {
  return reciprocal(1.0f + metal::precise::exp(-x));
}
inline float silu(float x) {
  return x * sigmoid(x);
}

// What comes of an expert's gate and up: silu(gate) up; with an ALPHA and no LIMIT gelu(gate) up, by
// gelu's approximation 0.5 (1 + tanh z) = sigmoid(2 z); or, with a LIMIT above 0, of a gate of LIMIT
// at most and an up between -LIMIT and LIMIT, (up + 1) gate sigmoid(ALPHA gate). ALPHA and LIMIT are
// the bits of floats; of gelu ALPHA is 2 sqrt(2 / pi).
template <uint ALPHA, uint LIMIT>
inline float activated(float gate, float up) {
  if (LIMIT == 0 && ALPHA == 0) {
    return silu(gate) * up;
  }
  if (LIMIT == 0) {
    const float cubic = gate + 0.044715f * gate * gate * gate;
    return gate * sigmoid(as_type<float>(ALPHA) * cubic) * up;
  }
  const float limit = as_type<float>(LIMIT);
  gate = metal::min(gate, limit);
  up = metal::min(metal::max(up, -limit), limit);
  return (up + 1.0f) * (gate * sigmoid(as_type<float>(ALPHA) * gate));
}

// Whether an element of a mask is set. Metal converts bfloat to float without being asked, but not to
// bool: a mask that nothing reads may be of any type.
template <typename T>
inline bool is_set(T x) {
  return bool(float(x));
}

// ---- Matrix tiles of one simdgroup: c (16 x 8, float) += a (16 x 16) b (16 x 8)
//
// Each lane holds a few elements of a tile; row() and col() say which, and nothing else may.
// a: M x K, b: K x N. Tiles are loaded from rows of `ld` elements that start at multiples of 16
// bytes; the transposed forms take a source stored K x M or N x K. Products of half and bfloat
// are exact and summed in float; products of float lose at most 2^-20 of their size.

#ifdef MOEFLUX_CUDA
inline int fragment_row(uint lane) {
  return lane >> 2;
}
inline int fragment_col(uint lane) {
  return (lane & 3) << 1;
}
#else
inline int fragment_row(uint lane) {
  return ((lane >> 2) & 4) + ((lane >> 1) & 3);
}
inline int fragment_col(uint lane) {
  return ((lane >> 1) & 4) + ((lane & 1) << 1);
}
#endif

template <typename T>
struct tile_a {
  alignas(4) T e[8];
  inline int size() const { return 8; }
  inline thread T& operator[](int i) { return e[i]; }
  inline int row(int i, uint lane) const { return fragment_row(lane) + 8 * ((i >> 1) & 1); }
  inline int col(int i, uint lane) const { return fragment_col(lane) + (i & 1) + 8 * (i >> 2); }
};

template <typename T>
struct tile_b {
  alignas(4) T e[4];
  inline int size() const { return 4; }
  inline thread T& operator[](int i) { return e[i]; }
#ifdef MOEFLUX_CUDA
  inline int row(int i, uint lane) const { return fragment_col(lane) + (i & 1) + 8 * (i >> 1); }
  inline int col(int i, uint lane) const { return fragment_row(lane); }
#else
  inline int row(int i, uint lane) const { return fragment_row(lane) + 8 * (i >> 1); }
  inline int col(int i, uint lane) const { return fragment_col(lane) + (i & 1); }
#endif
};

struct tile_c {
  float e[4];
  inline int size() const { return 4; }
  inline thread float& operator[](int i) { return e[i]; }
  inline int row(int i, uint lane) const { return fragment_row(lane) + 8 * (i >> 1); }
  inline int col(int i, uint lane) const { return fragment_col(lane) + (i & 1); }
};

inline void fill(thread tile_c& c, float value) {
  for (int i = 0; i < 4; ++i) {
    c.e[i] = value;
  }
}

// p[row * ld + col]
template <typename P>
inline void store(const thread tile_c& c, P p, int ld, uint lane) {
  for (int i = 0; i < 4; ++i) {
    p[c.row(i, lane) * ld + c.col(i, lane)] = c.e[i];
  }
}

// Two at once: on CUDA that is one instruction, and one by one a slow one each.
#ifndef MOEFLUX_CUDA
template <typename T>
inline void narrow(thread T* to, float x, float y) {
  to[0] = T(x);
  to[1] = T(y);
}
#endif

// Two neighbouring results, columns 0 to 7 and 8 to 15, as the left side of the next product.
template <typename T>
inline tile_a<T> to_a(const thread tile_c& left, const thread tile_c& right) {
  tile_a<T> a;
  for (int i = 0; i < 4; i += 2) {
    narrow(a.e + i, left.e[i], left.e[i + 1]);
    narrow(a.e + i + 4, right.e[i], right.e[i + 1]);
  }
  return a;
}

// Over the 4 lanes that hold a row of a tile: row_sum(c[0] + c[1]) is the sum of its 8 columns.
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
#ifdef MOEFLUX_CUDA
  return x + simd_shuffle_xor(x, 2);
#else
  return x + simd_shuffle_xor(x, 8);
#endif
}
// Over the 8 lanes that hold a column of a tile.
inline float column_sum(float x) {
  x += simd_shuffle_xor(x, 4);
  x += simd_shuffle_xor(x, 16);
#ifdef MOEFLUX_CUDA
  return x + simd_shuffle_xor(x, 8);
#else
  return x + simd_shuffle_xor(x, 2);
#endif
}
inline float row_max(float x) {
  x = metal::max(x, simd_shuffle_xor(x, 1));
#ifdef MOEFLUX_CUDA
  return metal::max(x, simd_shuffle_xor(x, 2));
#else
  return metal::max(x, simd_shuffle_xor(x, 8));
#endif
}

// load_* and mma are in the dialect on CUDA.
#ifndef MOEFLUX_CUDA
// Says nothing on Metal; the emulator checks that rows start at multiples of 16 bytes, as the
// wide loads on CUDA need.
template <typename P>
inline void check_rows(P p, int ld) {}

template <typename T, typename P>
inline void load_a(thread tile_a<T>& a, P p, int ld, uint lane) {
  check_rows(p, ld);
  for (int i = 0; i < 8; ++i) {
    a.e[i] = T(p[a.row(i, lane) * ld + a.col(i, lane)]);
  }
}
template <typename T, typename P>
inline void load_a_t(thread tile_a<T>& a, P p, int ld, uint lane) {
  check_rows(p, ld);
  for (int i = 0; i < 8; ++i) {
    a.e[i] = T(p[a.col(i, lane) * ld + a.row(i, lane)]);
  }
}
template <typename T, typename P>
inline void load_b(thread tile_b<T>& b, P p, int ld, uint lane) {
  check_rows(p, ld);
  for (int i = 0; i < 4; ++i) {
    b.e[i] = T(p[b.row(i, lane) * ld + b.col(i, lane)]);
  }
}
template <typename T, typename P>
inline void load_b_t(thread tile_b<T>& b, P p, int ld, uint lane) {
  check_rows(p, ld);
  for (int i = 0; i < 4; ++i) {
    b.e[i] = T(p[b.col(i, lane) * ld + b.row(i, lane)]);
  }
}

// Matrices of float whatever T is: products are then exact and as fast.
template <typename T>
inline simdgroup_float8x8 float_matrix(T x, T y) {
  simdgroup_float8x8 m;
  m.thread_elements()[0] = float(x);
  m.thread_elements()[1] = float(y);
  return m;
}
template <typename T>
inline void mma(thread tile_c& c, const thread tile_a<T>& a, const thread tile_b<T>& b) {
  for (int m = 0; m < 2; ++m) {
    simdgroup_float8x8 sum = float_matrix(c.e[2 * m], c.e[2 * m + 1]);
    for (int k = 0; k < 2; ++k) {
      simdgroup_float8x8 left = float_matrix(a.e[4 * k + 2 * m], a.e[4 * k + 2 * m + 1]);
      simdgroup_float8x8 right = float_matrix(b.e[2 * k], b.e[2 * k + 1]);
      simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    c.e[2 * m] = sum.thread_elements()[0];
    c.e[2 * m + 1] = sum.thread_elements()[1];
  }
}
#endif
