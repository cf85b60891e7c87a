// Products of rows with matrices in ggml's blocks: a lane takes eights, eight neighbours of a block,
// of a row's columns.
#include "blocks.metal"
#include "quantised.metal"

// A lane's eights of ROWS rows, STRIDE bytes from each other. They are of one block, and their offsets
// are bits that `at` has not, so that compilers see which of them read the same bytes.
template <int ROWS, int STRIDE, typename L, typename E>
inline void fetch_eights(thread E* to, const device uchar* w, uint at) {
  const int ELEMENTS = E::ELEMENTS, BYTES = E::BYTES;
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    #pragma unroll
    for (int i = 0; i < L::COUNT; ++i) {
      to[r * L::COUNT + i].fetch(
          w + r * STRIDE + at / ELEMENTS * BYTES, at % ELEMENTS | L::offset(i));
    }
  }
}

// Whether numbers are read as floats that are tiny (quantised.metal), and what sums of them are
// multiplied with then.
template <bool EXACT>
inline constexpr bool tiny_eights() {
#ifdef MOEFLUX_CUDA
  return reads_tiny<8, EXACT>();
#else
  return false;
#endif
}
template <bool EXACT>
inline float unit_of() {
  return tiny_eights<EXACT>() ? 562949953421312.0f : 1.0f;
}

// acc[r] += this lane's part of row r times x, over unit_of; x and sums are what take_eights took with
// the same EXACT.
template <int ROWS, typename L, bool EXACT, typename E>
inline void add_eights(
    thread float* acc,
    const thread E* rows,
    const thread float* x,
    const thread float* sums,
    uint at) {
  const int ELEMENTS = E::ELEMENTS, ZERO = E::ZERO, WIDE = L::NEIGHBOURS;
  const bool ADDS = E::ADDS, TINY = tiny_eights<EXACT>();
  #pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float dot = 0.0f;
    #pragma unroll
    for (int i = 0; i < L::COUNT; ++i) {
      const thread E& own = rows[r * L::COUNT + i];
      const uint from = at % ELEMENTS | L::offset(i);
      if (i % WIDE == 0) {
        dot = TINY && ZERO != 0 ? -ZERO * sums[i / WIDE] : 0.0f;
      }
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        float q = number<8>(own.word(j / 4, from), j % 4, ZERO);
#ifdef MOEFLUX_CUDA
        q = TINY ? bare_number<8>(own.word(j / 4, from), j % 4) : q;
#endif
        dot = metal::fma(q, x[8 * i + j], dot);
      }
      if (i % WIDE == WIDE - 1) {
        acc[r] = metal::fma(own.scale(from), dot, acc[r]);
        if (ADDS) {
          acc[r] = metal::fma(own.added(from), sums[i / WIDE], acc[r]);
        }
      }
    }
  }
}

// A lane's eights of form(x), FORM as in quantised.metal, and the sum of each group's over unit_of.
template <typename L, bool EXACT, int FORM, typename T, typename U>
inline void take_eights(
    thread float* to,
    thread float* sums,
    const device T* x,
    const device U* other,
    thread float& squares) {
  const int WIDE = L::NEIGHBOURS, M = sizeof(T) + (FORM == PLAIN ? 2 : sizeof(U)) == 4 ? 8 : 4;
  #pragma unroll
  for (int i = 0; i < L::COUNT; ++i) {
    float sum = 0.0f;
    #pragma unroll
    for (int j = 0; j < 8; j += M) {
      const pack<T, M> in = load_pack<M>(x + L::offset(i) + j);
      pack<U, M> beside;
      if (FORM != PLAIN) {
        beside = load_pack<M>(other + L::offset(i) + j);
      }
      for (int c = 0; c < M; ++c) {
        const float second = FORM == PLAIN ? 0.0f : float(beside.at[c]);
        const float value = formed<FORM>(float(in.at[c]), second, squares);
        sum += value;
        to[8 * i + j + c] = value * factor<8, EXACT>(j + c);
      }
    }
    sum /= unit_of<EXACT>();
    sums[i / WIDE] = i % WIDE == 0 ? sum : sums[i / WIDE] + sum;
  }
}

// The sums of N values of each of LANES neighbouring lanes; both are powers of two. Lane i < N has
// that of value `which`.
template <int N, int LANES>
inline float folded(thread float* values, thread uint& which, uint lane) {
  which = 0;
  #pragma unroll
  for (int n = N / 2; n > 0; n /= 2) {
    const int mask = N / 2 / n;
    const bool upper = lane & mask;
    which += upper ? n : 0;
    #pragma unroll
    for (int i = 0; i < n; ++i) {
      const float own = upper ? values[i + n] : values[i];
      const float other = upper ? values[i] : values[i + n];
      values[i] = own + simd_shuffle_xor(other, ushort(mask));
    }
  }
  #pragma unroll
  for (int mask = N; mask < LANES; mask *= 2) {
    values[0] += simd_shuffle_xor(values[0], ushort(mask));
  }
  return values[0];
}

#ifdef MOEFLUX_CUDA
// So many neighbouring bytes come closer at once: compilers load an eight shortly before they use it,
// which is several times the memory's latency for a lane's.
template <int BYTES>
inline void prefetch_bytes(const device uchar* p, uint lane) {
  for (uint at = lane * 128; at < BYTES; at += 32 * 128) {
    prefetch(p + at);
  }
}
#endif

// Lanes that share a row of so many units: a power of two.
template <int UNITS>
inline constexpr int lanes_of() {
  return UNITS > 16 ? 32 : UNITS > 8 ? 16 : 8;
}

// ROWS rows of a matrix, a power of two, times form(x): LANES neighbouring lanes have a row. Lane i of
// them gets the total of row `which`, if i is less than OWN; `squares` is every lane's part of the sum
// of squares.
template <int ROWS, int IN, typename E>
struct block_lanes {
  using L = typename E::lanes;
  enum {
    UNITS = IN / (8 * L::COUNT),
    ROW = IN / E::ELEMENTS * E::BYTES,
    // Where there are fewer rows than lanes could take at a time, all lanes have one.
    LANES = ROWS * lanes_of<UNITS>() % 32 == 0 ? lanes_of<UNITS>() : 32,
    AT_ONCE = 32 / LANES,
    OWN = ROWS / AT_ONCE
  };
};

template <int ROWS, int IN, int FORM, bool EXACT, typename E, typename T, typename U>
inline float block_totals(
    const device T* x,
    const device U* other,
    const device uchar* w,
    thread float& squares,
    thread uint& which,
    uint lane) {
  using B = block_lanes<ROWS, IN, E>;
  using L = typename E::lanes;
  const int COUNT = L::COUNT, UNITS = B::UNITS, LANES = B::LANES, OWN = B::OWN;
  const int BYTES = B::ROW, AT_ONCE = B::AT_ONCE;
  const uint first = lane / LANES;
#ifdef MOEFLUX_CUDA
  prefetch_bytes<ROWS * BYTES>(w, lane);
#endif
  w += first * BYTES;
  float acc[OWN];
  for (int r = 0; r < OWN; ++r) {
    acc[r] = 0.0f;
  }
  squares = 0.0f;
  #pragma unroll 2
  for (int step = 0; step < (UNITS + LANES - 1) / LANES; ++step) {
    const uint unit = step * LANES + lane % LANES;
    if (UNITS % LANES == 0 || unit < UNITS) {
      const uint at = L::first(unit);
      E rows[OWN * COUNT];
      fetch_eights<OWN, AT_ONCE * BYTES, L>(rows, w, at);
      float part[8 * COUNT], sums[COUNT];
      take_eights<L, EXACT, FORM>(part, sums, x + at, other + at, squares);
      add_eights<OWN, L, EXACT>(acc, rows, part, sums, at);
    }
  }
  if (FORM == NORM) {
    #pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
      squares += simd_shuffle_xor(squares, ushort(mask));
    }
  }
  const float total = folded<OWN, LANES>(acc, which, lane);
  which = first + which * AT_ONCE;
  return total * unit_of<EXACT>();
}
