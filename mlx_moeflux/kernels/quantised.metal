// Products of few rows of x with matrices [out, in] as MLX stores them: numbers of BITS bits in
// words, the lowest first, with a scale and a bias for every GROUP neighbours. BITS = 0: floats.
//
// A simdgroup computes ROWS rows of a matrix. Its lanes share the columns: one takes V words, N
// numbers of one group, at a time, and needs the N values of x in registers.
//
// Where tiny floats are not flushed to zero, a number in the low bits of a word is a float by
// itself: 2^(at - 149) times what it says, `at` being its first bit. x carries 2^(100 - at), and
// the product is read for nothing. The sum loses what is below 2^-77, and terms that cancel in a
// group: so not for x of float (EXACT).

#ifdef MOEFLUX_CUDA
template <int BITS, bool EXACT>
inline constexpr bool reads_tiny() {
  return BITS != 0 && !EXACT;
}
#endif

// What the i-th of N values of x is multiplied with.
template <int BITS, bool EXACT>
inline float factor(int i) {
#ifdef MOEFLUX_CUDA
  return reads_tiny<BITS, EXACT>() ? as_type<float>(uint(227 - i * BITS % 16) << 23) : 1.0f;
#else
  return 1.0f;
#endif
}

// N columns of a row as they are stored.
template <int V, typename W, typename S>
struct slice {
  pack<W, V> words;
  S scale, bias;
};

template <int ROWS, int IN, int BITS, int GROUP, int V, typename W, typename S>
inline void fetch_rows(
    thread slice<V, W, S>* next,
    const device W* w,
    const device S* scales,
    const device S* biases,
    uint at) {
  const int per = per_word<BITS>();
  if (IN % (32 * V * per) == 0 || at < IN) {
    for (int r = 0; r < ROWS; ++r) {
      next[r].words = load_pack<V>(w + r * (IN / per) + at / per);
      if (BITS != 0) {
        next[r].scale = scales[r * (IN / GROUP) + at / GROUP];
        next[r].bias = biases[r * (IN / GROUP) + at / GROUP];
      }
    }
  }
}

// acc[r] += this lane's part of row r times x; `sum` is the sum of its values of x.
template <int ROWS, int BITS, bool EXACT, int V, typename W, typename S>
inline void add_rows(
    thread float* acc, const thread slice<V, W, S>* rows, const thread float* x, float sum) {
  const int per = per_word<BITS>();
  // Numbers around zero: the two terms of a group's sum would else cancel.
  float middle = float(1 << BITS >> 1), unit = 1.0f;
#ifdef MOEFLUX_CUDA
  const bool TINY = reads_tiny<BITS, EXACT>();
  if (TINY) {
    middle = 0.0f;
    unit = 562949953421312.0f;
  }
#endif
  for (int r = 0; r < ROWS; ++r) {
    float dot = 0.0f;
    for (int i = 0; i < V * per; ++i) {
      W word = rows[r].words.at[i / per];
      float q = number<BITS>(word, i % per, middle);
#ifdef MOEFLUX_CUDA
      q = TINY ? bare_number<BITS>(word, i % per) : q;
#endif
      dot = metal::fma(q, x[i], dot);
    }
    if (BITS == 0) {
      acc[r] += dot;
    } else {
      float scale = float(rows[r].scale), bias = metal::fma(middle, scale, float(rows[r].bias));
      acc[r] += metal::fma(scale * unit, dot, bias * sum);
    }
  }
}

// How many times 32 lanes take N of IN columns.
template <int IN, int N>
inline constexpr int steps() {
  return (IN + 32 * N - 1) / (32 * N);
}

// What a row goes through before it meets a matrix, with another row beside it: nothing;
// x other, with the sum of squares of x; silu(x) other.
#define PLAIN 0
#define NORM 1
#define SWIGLU 2

// x from `from` on, COUNT steps of it, into threadgroup memory in the order in which lanes want it,
// four values at a time, and the sum of every lane's N. Returns this thread's part of the sum of
// squares.
template <int IN, int BITS, bool EXACT, int N, int FORM, int COUNT, typename T, typename U>
inline float stage(
    threadgroup float* values,
    threadgroup float* sums,
    const device T* x,
    const device U* other,
    uint from,
    uint index,
    uint threads) {
  float squares = 0.0f;
  for (uint p = index; p < COUNT * 8 * N; p += threads) {
    const uint chunk = 4 * p / N, part = p % (N / 4), at = from + 4 * p;
    const bool there = IN % (32 * N * COUNT) == 0 || at < IN;
    pack<float, 4> out;
    float sum = 0.0f;
    if (there) {
      pack<T, 4> in = load_pack<4>(x + at);
      pack<U, 4> beside;
      if (FORM != PLAIN) {
        beside = load_pack<4>(other + at);
      }
      for (int c = 0; c < 4; ++c) {
        float value = float(in.at[c]);
        if (FORM == NORM) {
          squares = metal::fma(value, value, squares);
          value *= float(beside.at[c]);
        } else if (FORM == SWIGLU) {
          value = silu(value) * float(beside.at[c]);
        }
        sum += value;
        out.at[c] = value * factor<BITS, EXACT>(4 * part + c);
      }
    }
    for (int m = 1; m < N / 4; m *= 2) {
      sum += simd_shuffle_xor(sum, m);
    }
    if (there) {
      store_pack(values + ((chunk / 32 * (N / 4) + part) * 32 + chunk % 32) * 4, out);
      if (part == 0) {
        sums[chunk] = sum;
      }
    }
  }
  return squares;
}

// One step's values of a staged row.
template <int N>
inline void take(thread float* x, const threadgroup float* values, int step, uint lane) {
  for (int j = 0; j < N / 4; ++j) {
    pack<float, 4> part = load_pack<4>(values + ((step * (N / 4) + j) * 32 + lane) * 4);
    for (int c = 0; c < 4; ++c) {
      x[4 * j + c] = part.at[c];
    }
  }
}

// N values of x as add_rows wants them; returns their sum.
template <int BITS, bool EXACT, int N, typename T>
inline float load_x(thread float* x, const device T* p) {
  const int most = 16 / sizeof(T), M = N < most ? N : most;
  float sum = 0.0f;
  for (int i = 0; i < N; i += M) {
    pack<T, M> part = load_pack<M>(p + i);
    for (int c = 0; c < M; ++c) {
      float value = float(part.at[c]);
      sum += value;
      x[i + c] = value * factor<BITS, EXACT>(i + c);
    }
  }
  return sum;
}

// h[p] = silu(gate[s] x[p / K]) * (up[s] x[p / K]), s = slots[p]; rows of absent experts,
// whose s is num_slots or more, stay as they are. ROWS rows for each simdgroup.
template <int ROWS, int K, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, typename T,
          typename W, typename S>
inline void expert_inner(
    const device T* x,
    const device uint* slots,
    const device W* gate,
    const device S* gate_scales,
    const device S* gate_biases,
    const device W* up,
    const device S* up_scales,
    const device S* up_biases,
    device float* h,
    uint num_slots,
    uint pair,
    uint row,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const uint slot = slots[pair];
  if (slot >= num_slots) {
    return;
  }
  const ulong base = ulong(slot) * OUT + row;
  const ulong words = base * (IN / per), groups = base * (IN / GROUP);
  float sums_gate[ROWS], sums_up[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    sums_gate[r] = sums_up[r] = 0.0f;
  }
  #pragma unroll
  for (int step = 0; step < steps<IN, N>(); ++step) {
    const uint at = (step * 32 + lane) * N;
    if (IN % (32 * N) == 0 || at < IN) {
      slice<V, W, S> gates[ROWS], ups[ROWS];
      fetch_rows<ROWS, IN, BITS, GROUP>(
          gates, gate + words, gate_scales + groups, gate_biases + groups, at);
      fetch_rows<ROWS, IN, BITS, GROUP>(
          ups, up + words, up_scales + groups, up_biases + groups, at);
      float part[N];
      const float total = load_x<BITS, EXACT, N>(part, x + pair / K * IN + at);
      add_rows<ROWS, BITS, EXACT>(sums_gate, gates, part, total);
      add_rows<ROWS, BITS, EXACT>(sums_up, ups, part, total);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float gated = silu(simd_sum(sums_gate[r])) * simd_sum(sums_up[r]);
    if (lane == 0) {
      h[ulong(pair) * OUT + row + r] = gated;
    }
  }
}

// y[n] = initial[n] + sum_k weights[n, k] down[s] h[n, k], s = slots[n, k], in ascending k; an
// absent expert adds nothing. Simdgroup k of a threadgroup computes ROWS rows of pair (n, k).
template <int ROWS, int K, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT,
          bool CONTINUES, typename W, typename S>
inline void expert_outer(
    const device float* h,
    const device uint* slots,
    const device float* weights,
    const device W* down,
    const device S* scales,
    const device S* biases,
    const device float* initial,
    device float* y,
    threadgroup float* products,
    uint num_slots,
    uint token,
    uint row,
    uint k,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const uint pair = token * K + k, slot = slots[pair];
  if (slot < num_slots) {
    const ulong base = ulong(slot) * OUT + row;
    const ulong words = base * (IN / per), groups = base * (IN / GROUP);
    float sums[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      sums[r] = 0.0f;
    }
    for (uint at = lane * N; at < IN; at += 32 * N) {
      slice<V, W, S> rows[ROWS];
      fetch_rows<ROWS, IN, BITS, GROUP>(
          rows, down + words, scales + groups, biases + groups, at);
      float values[N];
      const float total = load_x<BITS, EXACT, N>(values, h + ulong(pair) * IN + at);
      add_rows<ROWS, BITS, EXACT>(sums, rows, values, total);
    }
    const float weight = weights[pair];
    for (int r = 0; r < ROWS; ++r) {
      float total = simd_sum(sums[r]);
      if (lane == 0) {
        products[k * ROWS + r] = weight * total;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (k == 0 && lane < ROWS) {
    const ulong at = ulong(token) * OUT + row + lane;
    float total = CONTINUES ? initial[at] : -0.0f;
    for (int i = 0; i < K; ++i) {
      if (slots[token * K + i] < num_slots) {
        total += products[i * ROWS + lane];
      }
    }
    y[at] = total;
  }
}

// ROWS rows of w form(x) for each simdgroup, FORM as above, of the OUT rows of w from BASE on;
// returns the first. All lanes get the totals. x is staged PIECE steps at a time.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          int PIECE, bool EXACT, int FORM, typename T, typename U, typename W, typename S>
inline uint rows_of(
    thread float* totals,
    const device T* x,
    const device U* other,
    const device float* eps,
    const device W* w,
    const device S* scales,
    const device S* biases,
    threadgroup float* values,
    threadgroup float* sums,
    threadgroup float* squares,
    uint group,
    uint simdgroup,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per, STEPS = steps<IN, N>();
  const uint row = metal::min((group * SIMDGROUPS + simdgroup) * ROWS, uint(OUT - ROWS));
  w += ulong(BASE + row) * (IN / per);
  scales += ulong(BASE + row) * (IN / GROUP);
  biases += ulong(BASE + row) * (IN / GROUP);
  slice<V, W, S> rows[2][ROWS];
  fetch_rows<ROWS, IN, BITS, GROUP>(rows[0], w, scales, biases, lane * N);
  for (int r = 0; r < ROWS; ++r) {
    totals[r] = 0.0f;
  }
  float square = 0.0f;
  #pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step % PIECE == 0) {
      if (step > 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      square += stage<IN, BITS, EXACT, N, FORM, PIECE>(
          values, sums, x, other, step * 32 * N, simdgroup * 32 + lane, 32 * SIMDGROUPS);
      if (FORM == NORM && step + PIECE >= STEPS) {
        square = simd_sum(square);
        if (lane == 0) {
          squares[simdgroup] = square;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const uint at = (step * 32 + lane) * N;
    if (step + 1 < STEPS) {
      fetch_rows<ROWS, IN, BITS, GROUP>(rows[(step + 1) % 2], w, scales, biases, at + 32 * N);
    }
    if (IN % (32 * N) == 0 || at < IN) {
      float part[N];
      take<N>(part, values, step % PIECE, lane);
      add_rows<ROWS, BITS, EXACT>(
          totals, rows[step % 2], part, sums[step % PIECE * 32 + lane]);
    }
  }
  float inverse = 1.0f;
  if (FORM == NORM) {
    float total = 0.0f;
    for (int i = 0; i < SIMDGROUPS; ++i) {
      total += squares[i];
    }
    inverse = metal::precise::rsqrt(total / float(IN) + eps[0]);
  }
  for (int r = 0; r < ROWS; ++r) {
    totals[r] = simd_sum(totals[r]) * inverse;
  }
  return row;
}

// Whether this simdgroup has rows of its own; the last ones repeat others' rows.
template <int ROWS, int SIMDGROUPS, int OUT>
inline bool owns_rows(uint group, uint simdgroup) {
  return (group * SIMDGROUPS + simdgroup) * ROWS < uint(OUT);
}

// y[row ...] = (residual +) w form(x).
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          int PIECE, bool EXACT, int FORM, bool RESIDUAL, typename T, typename U, typename W,
          typename S, typename Y>
inline void norm_matvec(
    const device T* x,
    const device U* norm_weight,
    const device float* eps,
    const device T* residual,
    const device W* w,
    const device S* scales,
    const device S* biases,
    device Y* y,
    threadgroup float* values,
    threadgroup float* sums,
    threadgroup float* squares,
    uint token,
    uint group,
    uint simdgroup,
    uint lane) {
  float totals[ROWS];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, BASE, OUT, BITS, GROUP, V, PIECE, EXACT, FORM>(
      totals, x + token * IN, norm_weight, eps, w, scales, biases, values, sums, squares, group,
      simdgroup, lane);
  if (lane == 0 && owns_rows<ROWS, SIMDGROUPS, OUT>(group, simdgroup)) {
    for (int r = 0; r < ROWS; ++r) {
      const uint at = token * OUT + row + r;
      y[at] = Y(RESIDUAL ? float(residual[at]) + totals[r] : totals[r]);
    }
  }
}

// y = norm(x), one row for a threadgroup.
template <int SIMDGROUPS, int IN, typename T, typename U>
inline void norm_row(
    const device T* x,
    const device U* norm_weight,
    const device float* eps,
    device T* y,
    threadgroup float* squares,
    uint token,
    uint simdgroup,
    uint lane) {
  x += token * IN;
  float square = 0.0f;
  for (uint i = simdgroup * 32 + lane; i < IN; i += 32 * SIMDGROUPS) {
    square = metal::fma(float(x[i]), float(x[i]), square);
  }
  square = threadgroup_sum(square, squares, lane, simdgroup, SIMDGROUPS);
  const float inverse = metal::precise::rsqrt(square / float(IN) + eps[0]);
  for (uint i = simdgroup * 32 + lane; i < IN; i += 32 * SIMDGROUPS) {
    y[token * IN + i] = T(float(x[i]) * inverse * float(norm_weight[i]));
  }
}

// y = residual + experts + sigmoid(score) w (silu(gate) up); without SCORED the factor is 1, without
// ROUTED there are no experts.
template <int ROWS, int SIMDGROUPS, int IN, int OUT, int BITS, int GROUP, int V, int PIECE,
          bool EXACT, bool ROUTED, bool SCORED, typename T, typename W, typename S>
inline void add_shared(
    const device T* residual,
    const device float* experts,
    const device T* gate,
    const device T* up,
    const device T* score,
    const device W* w,
    const device S* scales,
    const device S* biases,
    device T* y,
    threadgroup float* values,
    threadgroup float* sums,
    uint token,
    uint group,
    uint simdgroup,
    uint lane) {
  float totals[ROWS];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, 0, OUT, BITS, GROUP, V, PIECE, EXACT, SWIGLU>(
      totals, gate + token * IN, up + token * IN, experts, w, scales, biases, values, sums, values,
      group, simdgroup, lane);
  if (lane == 0 && owns_rows<ROWS, SIMDGROUPS, OUT>(group, simdgroup)) {
    const float factor = SCORED ? sigmoid(float(score[token])) : 1.0f;
    for (int r = 0; r < ROWS; ++r) {
      const uint at = token * OUT + row + r;
      const float routed = ROUTED ? experts[at] : 0.0f;
      y[at] = T(float(residual[at]) + routed + factor * totals[r]);
    }
  }
}
