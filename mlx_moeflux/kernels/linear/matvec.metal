// TOKENS rows of x, each by itself, through matrices that are read once for all of them: a threadgroup
// keeps its rows on the chip.
#include "quantised.metal"

// inverse[t] = 1 / sqrt(mean of x^2 + epsilon) of every lane's part of token t's sum of squares.
// Everybody meets.
template <int TOKENS, int SIMDGROUPS, int IN>
inline void inverse_norms(
    thread float* inverse,
    const thread float* square,
    threadgroup float* squares,
    float epsilon,
    uint simdgroup,
    uint lane) {
  for (int t = 0; t < TOKENS; ++t) {
    const float sum = simd_sum(square[t]);
    if (lane == 0) {
      squares[t * SIMDGROUPS + simdgroup] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int t = 0; t < TOKENS; ++t) {
    float total = 0.0f;
    for (int i = 0; i < SIMDGROUPS; ++i) {
      total += squares[t * SIMDGROUPS + i];
    }
    inverse[t] = metal::precise::rsqrt(total / float(IN) + epsilon);
  }
}

// Totals that a lane of rows_of gets of a token.
template <int ROWS, int SPLIT>
inline constexpr int most_totals() {
  return SPLIT ? 1 : ROWS;
}

// Rows of w form(x), FORM as above, of the OUT rows of w from BASE on; token t's totals lie behind
// those of token t - 1, most_totals of each. Each simdgroup has ROWS rows of its own and all of x,
// which is staged; lane 0 gets `count` totals of a token, from the returned row on. Or (SPLIT) ROWS
// rows are all simdgroups' work, so many of them at a time: each has its share of the columns, and its
// values of x in registers; the first ROWS threads get one total each.
template <int TOKENS, int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          int SPLIT, bool EXACT, int FORM, typename T, typename U, typename W, typename S>
inline uint rows_of(
    thread int& count,
    thread float* totals,
    const device T* x,
    const device U* other,
    float epsilon,
    const device W* w,
    const device S* scales,
    const device S* biases,
    threadgroup float* squares,
    uint group,
    uint simdgroup,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per, M = SPLIT ? SPLIT : 1, APART = OUT / ROWS * M;
  const uint own = SPLIT ? group * M : (group * SIMDGROUPS + simdgroup) * ROWS;
  const uint row = SPLIT ? own : metal::min(own, uint(OUT - ROWS));  // the last repeat others' rows
  const uint index = simdgroup * 32 + lane;
  const int OWN = most_totals<ROWS, SPLIT>(), STAGED = steps<IN, N>() * 32;
  const int BESIDE = FORM == SWIGLU ? IN : 0;  // what is between two tokens' other rows
  threadgroup float* values = squares + 32 * TOKENS;
  threadgroup float* sums = values + TOKENS * STAGED * N;
  w += ulong(BASE + row) * (IN / per);
  scales += ulong(BASE + row) * (IN / GROUP);
  biases += ulong(BASE + row) * (IN / GROUP);
  slice<V, W, S> rows[2][OWN];
  float square[TOKENS], inverse[TOKENS];
  if (SPLIT) {
    columns<share<IN, N, SIMDGROUPS>(), N, TOKENS> part;
    for (int t = 0; t < TOKENS; ++t) {
      square[t] = take_columns<SIMDGROUPS, IN, BITS, EXACT, FORM>(
          part, x + t * IN, other + t * BESIDE, simdgroup, lane, t);
    }
    part_of_rows<ROWS, M, APART, SIMDGROUPS, SIMDGROUPS, IN, BITS, GROUP, V, EXACT>(
        values + simdgroup, part, w, scales, biases, lane);
  } else {
    fetch_rows<OWN, IN, BITS, GROUP>(rows[0], w, scales, biases, lane * N);
    stage<IN, BITS, EXACT, N, FORM, TOKENS, BESIDE>(
        values, sums, square, x, other, index, 32 * SIMDGROUPS);
  }
  if (FORM == NORM) {
    inverse_norms<TOKENS, SIMDGROUPS, IN>(inverse, square, squares, epsilon, simdgroup, lane);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < TOKENS * OWN; ++i) {
    totals[i] = 0.0f;
  }
  if (SPLIT) {
    for (int i = 0; index < ROWS && i < SIMDGROUPS; ++i) {
      for (int t = 0; t < TOKENS; ++t) {
        totals[t] += values[(t * ROWS + index) * SIMDGROUPS + i];
      }
    }
  } else {
    #pragma unroll
    for (int step = 0; step < steps<IN, N>(); ++step) {
      const uint at = (step * 32 + lane) * N;
      if (step + 1 < steps<IN, N>()) {
        fetch_rows<OWN, IN, BITS, GROUP>(rows[(step + 1) % 2], w, scales, biases, at + 32 * N);
      }
      if (IN % (32 * N) == 0 || at < IN) {
        add_staged<OWN, BITS, EXACT, TOKENS, STAGED * N>(
            totals, rows[step % 2], values, sums, step, lane);
      }
    }
  }
  for (int i = 0; i < TOKENS * OWN; ++i) {
    const float total = SPLIT ? totals[i] : simd_sum(totals[i]);
    totals[i] = FORM == NORM ? total * inverse[i / OWN] : total;
  }
  count = SPLIT ? int(index < ROWS) : lane == 0 && own < uint(OUT) ? ROWS : 0;
  return SPLIT ? row + index / M * APART + index % M : row;
}

// y[row ...] = (residual +) w form(x) of the tokens from `token` on; rows of y lie `stride` apart.
template <int TOKENS, int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          int SPLIT, bool EXACT, int FORM, bool RESIDUAL, typename T, typename U, typename W,
          typename S, typename Y>
inline void norm_matvec(
    const device T* x,
    const device U* norm_weight,
    float epsilon,
    const device T* residual,
    const device W* w,
    const device S* scales,
    const device S* biases,
    device Y* y,
    threadgroup float* memory,
    uint stride,
    uint token,
    uint group,
    uint simdgroup,
    uint lane) {
  const int MOST = most_totals<ROWS, SPLIT>();
  int count;
  float totals[TOKENS * MOST];
  const uint row = rows_of<TOKENS, ROWS, SIMDGROUPS, IN, BASE, OUT, BITS, GROUP, V, SPLIT, EXACT, FORM>(
      count, totals, x + token * IN, norm_weight, epsilon, w, scales, biases, memory,
      group, simdgroup, lane);
  for (int i = 0; i < TOKENS * MOST; ++i) {
    if (i % MOST < count) {
      const uint at = (token + i / MOST) * stride + row + i % MOST;
      y[at] = Y(RESIDUAL ? float(residual[at]) + totals[i] : totals[i]);
    }
  }
}

// y = norm(x), one row for a threadgroup.
template <int SIMDGROUPS, int IN, typename T, typename U>
inline void norm_row(
    const device T* x,
    const device U* norm_weight,
    float epsilon,
    device T* y,
    threadgroup float* squares,
    uint stride,
    uint token,
    uint simdgroup,
    uint lane) {
  const int N = 4, SHARE = share<IN, N, SIMDGROUPS>();
  columns<SHARE, N> own;
  const float square = take_columns<SIMDGROUPS, IN, 0, true, NORM>(
      own, x + token * IN, norm_weight, simdgroup, lane);
  float inverse;
  inverse_norms<1, SIMDGROUPS, IN>(&inverse, &square, squares, epsilon, simdgroup, lane);
  for (int i = 0; i < SHARE; ++i) {
    const uint at = own.first + i * 32 * N;
    for (int c = 0; c < N && at < IN; ++c) {
      y[token * stride + at + c] = T(own.values[i][c] * inverse);
    }
  }
}

// What lies between the end of a row and the next one.
template <int END, int STRIDE, typename T>
inline void clear_rest(device T* y, uint index) {
  if (index < STRIDE - END) {
    y[END + index] = T(0.0f);
  }
}

// y = residual + experts + sigmoid(score) w (silu(gate) up); without SCORED the factor is 1, without
// ROUTED there are no experts.
template <int TOKENS, int ROWS, int SIMDGROUPS, int IN, int OUT, int BITS, int GROUP, int V, int SPLIT,
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
    threadgroup float* memory,
    uint token,
    uint group,
    uint simdgroup,
    uint lane) {
  const int MOST = most_totals<ROWS, SPLIT>();
  int count;
  float totals[TOKENS * MOST];
  const uint row = rows_of<TOKENS, ROWS, SIMDGROUPS, IN, 0, OUT, BITS, GROUP, V, SPLIT, EXACT, SWIGLU>(
      count, totals, gate + token * IN, up + token * IN, 0.0f, w, scales, biases,
      memory, group, simdgroup, lane);
  for (int i = 0; i < TOKENS * MOST; ++i) {
    if (i % MOST < count) {
      const uint of = token + i / MOST, at = of * OUT + row + i % MOST;
      const float factor = SCORED ? sigmoid(float(score[of])) : 1.0f;
      const float routed = ROUTED ? experts[at] : 0.0f;
      y[at] = T(float(residual[at]) + routed + factor * totals[i]);
    }
  }
}

// y = w (silu(gate) up) in float: what add_shared multiplies and adds.
template <int TOKENS, int ROWS, int SIMDGROUPS, int IN, int OUT, int BITS, int GROUP, int V, int SPLIT,
          bool EXACT, typename T, typename W, typename S>
inline void shared_product(
    const device T* gate,
    const device T* up,
    const device W* w,
    const device S* scales,
    const device S* biases,
    device float* y,
    threadgroup float* memory,
    uint token,
    uint group,
    uint simdgroup,
    uint lane) {
  const int MOST = most_totals<ROWS, SPLIT>();
  int count;
  float totals[TOKENS * MOST];
  const uint row = rows_of<TOKENS, ROWS, SIMDGROUPS, IN, 0, OUT, BITS, GROUP, V, SPLIT, EXACT, SWIGLU>(
      count, totals, gate + token * IN, up + token * IN, 0.0f, w, scales, biases,
      memory, group, simdgroup, lane);
  for (int i = 0; i < TOKENS * MOST; ++i) {
    if (i % MOST < count) {
      y[(token + i / MOST) * OUT + row + i % MOST] = totals[i];
    }
  }
}

// The rest of it, for N neighbours of [*, C].
template <int C, int N, bool SCORED, typename T>
inline void add_products(
    const device T* residual,
    const device float* experts,
    const device T* score,
    const device float* products,
    device T* y,
    uint at) {
  const pack<T, N> a = load_pack<N>(residual + at);
  const pack<float, N> b = load_pack<N>(experts + at), c = load_pack<N>(products + at);
  const float factor = SCORED ? sigmoid(float(score[at / C])) : 1.0f;
  pack<T, N> out;
  for (int i = 0; i < N; ++i) {
    out.at[i] = T(float(a.at[i]) + b.at[i] + factor * c.at[i]);
  }
  store_pack(y + at, out);
}
