// Experts in ggml's blocks for a few tokens, pair by pair, out of a bank by slot number.
#include "blocks.metal"
#include "expert_pairs.metal"

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

// A lane's eights of x, and the sum of each group's over unit_of.
template <typename L, bool EXACT, typename T>
inline void take_eights(thread float* to, thread float* sums, const device T* x) {
  const int WIDE = L::NEIGHBOURS;
  #pragma unroll
  for (int i = 0; i < L::COUNT; ++i) {
    const float sum = load_x<8, EXACT, 8>(to + 8 * i, x + L::offset(i)) / unit_of<EXACT>();
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

// h = activated(gate[slot] x, up[slot] x): ROWS rows from `row` on. An absent expert's, whose slot is
// num_slots or more, stay as they are. L: Which eights of the rows of both a lane takes at a time.
template <int ROWS, int IN, int OUT, typename G, typename U, typename L, bool EXACT, uint ALPHA,
          uint LIMIT, typename T>
inline void block_inner(
    const device T* x,
    const device uchar* gate,
    const device uchar* up,
    device float* h,
    uint num_slots,
    uint slot,
    uint row,
    uint lane) {
  const int COUNT = L::COUNT, UNITS = IN / (8 * COUNT);
  const int GATE_ROW = IN / G::ELEMENTS * G::BYTES;
  const int UP_ROW = IN / U::ELEMENTS * U::BYTES;
  if (slot >= num_slots) {
    return;
  }
  gate += (ulong(slot) * OUT + row) * GATE_ROW;
  up += (ulong(slot) * OUT + row) * UP_ROW;
#ifdef MOEFLUX_CUDA
  prefetch_bytes<ROWS * GATE_ROW>(gate, lane);
  prefetch_bytes<ROWS * UP_ROW>(up, lane);
#endif
  float sums_gate[ROWS], sums_up[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    sums_gate[r] = sums_up[r] = 0.0f;
  }
  #pragma unroll 4
  for (int step = 0; step < (UNITS + 31) / 32; ++step) {
    const uint unit = step * 32 + lane;
    if (UNITS % 32 == 0 || unit < UNITS) {
      const uint at = L::first(unit);
      G gates[ROWS * COUNT];
      U ups[ROWS * COUNT];
      fetch_eights<ROWS, GATE_ROW, L>(gates, gate, at);
      fetch_eights<ROWS, UP_ROW, L>(ups, up, at);
      float part[8 * COUNT], sums[COUNT];
      take_eights<L, EXACT>(part, sums, x + at);
      add_eights<ROWS, L, EXACT>(sums_gate, gates, part, sums, at);
      add_eights<ROWS, L, EXACT>(sums_up, ups, part, sums, at);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const float first = simd_sum(sums_gate[r]) * unit_of<EXACT>();
    const float second = simd_sum(sums_up[r]) * unit_of<EXACT>();
    if (lane == 0) {
      h[row + r] = activated<ALPHA, LIMIT>(first, second);
    }
  }
}

// Lanes that share a row of so many units: a power of two.
template <int UNITS>
inline constexpr int lanes_of() {
  return UNITS > 16 ? 32 : UNITS > 8 ? 16 : 8;
}

// products[r] = weight down[slot] h: ROWS rows, 4 or 8, from `row` on.
template <int ROWS, int IN, int OUT, bool EXACT, typename E>
inline void block_products(
    const device float* h,
    const device uchar* down,
    threadgroup float* products,
    float weight,
    uint slot,
    uint row,
    uint lane) {
  using L = typename E::lanes;
  const int COUNT = L::COUNT, UNITS = IN / (8 * COUNT), LANES = lanes_of<UNITS>();
  const int AT_ONCE = 32 / LANES, OWN = ROWS / AT_ONCE;
  const int BYTES = IN / E::ELEMENTS * E::BYTES;
  const uint first = lane / LANES;
  down += (ulong(slot) * OUT + row) * BYTES;
#ifdef MOEFLUX_CUDA
  prefetch_bytes<ROWS * BYTES>(down, lane);
#endif
  down += first * BYTES;
  float acc[OWN];
  for (int r = 0; r < OWN; ++r) {
    acc[r] = 0.0f;
  }
  #pragma unroll 2
  for (int step = 0; step < (UNITS + LANES - 1) / LANES; ++step) {
    const uint unit = step * LANES + lane % LANES;
    if (UNITS % LANES == 0 || unit < UNITS) {
      const uint at = L::first(unit);
      E rows[OWN * COUNT];
      fetch_eights<OWN, AT_ONCE * BYTES, L>(rows, down, at);
      float part[8 * COUNT], sums[COUNT];
      take_eights<L, EXACT>(part, sums, h + at);
      add_eights<OWN, L, EXACT>(acc, rows, part, sums, at);
    }
  }
  uint which;
  const float total = folded<OWN, LANES>(acc, which, lane);
  if (lane % LANES < OWN) {
    products[first + which * AT_ONCE] = weight * (total * unit_of<EXACT>());
  }
}

// As expert_outer.
template <int ROWS, int K, int IN, int OUT, bool EXACT, bool CONTINUES, typename E>
inline void block_outer(
    const device float* h,
    const device uint* slots,
    const device float* weights,
    const device uchar* down,
    const device float* initial,
    device float* y,
    threadgroup float* products,
    uint num_slots,
    uint token,
    uint row,
    uint k,
    uint lane) {
  const uint pair = token * K + k, slot = slots[pair];
  if (slot < num_slots) {
    block_products<ROWS, IN, OUT, EXACT, E>(
        h + ulong(pair) * IN, down, products + k * ROWS, weights[pair], slot, row, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (k == 0 && lane < ROWS) {
    const ulong at = ulong(token) * OUT + row + lane;
    y[at] = sum_of_experts<ROWS, K>(
        products, slots + token * K, CONTINUES ? initial[at] : -0.0f, num_slots, lane);
  }
}
