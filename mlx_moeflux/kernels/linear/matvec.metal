// Rows of x, each by itself, through matrices: a threadgroup keeps its row on the chip.
#include "quantised.metal"

// 1 / sqrt(mean of x^2 + epsilon) of every lane's part of the sum of squares. Everybody meets.
template <int SIMDGROUPS, int IN>
inline float inverse_norm(
    float square, threadgroup float* squares, float epsilon, uint simdgroup, uint lane) {
  square = simd_sum(square);
  if (lane == 0) {
    squares[simdgroup] = square;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (int i = 0; i < SIMDGROUPS; ++i) {
    total += squares[i];
  }
  return metal::precise::rsqrt(total / float(IN) + epsilon);
}

// Rows of w form(x), FORM as above, of the OUT rows of w from BASE on. Each simdgroup has ROWS rows
// of its own and all of x, which is staged; lane 0 gets `count` totals, from the returned row on. Or
// (SPLIT) ROWS rows are all simdgroups' work, so many of them at a time: each has its share of the
// columns, and its values of x in registers; the first ROWS threads get one total each.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V, int SPLIT,
          bool EXACT, int FORM, typename T, typename U, typename W, typename S>
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
  const int OWN = SPLIT ? 1 : ROWS;
  threadgroup float* values = squares + 32;
  threadgroup float* sums = values + steps<IN, N>() * 32 * N;
  w += ulong(BASE + row) * (IN / per);
  scales += ulong(BASE + row) * (IN / GROUP);
  biases += ulong(BASE + row) * (IN / GROUP);
  slice<V, W, S> rows[2][OWN];
  float square;
  if (SPLIT) {
    columns<share<IN, N, SIMDGROUPS>(), N> part;
    square = take_columns<SIMDGROUPS, IN, BITS, EXACT, FORM>(part, x, other, simdgroup, lane);
    part_of_rows<ROWS, M, APART, SIMDGROUPS, SIMDGROUPS, IN, BITS, GROUP, V, EXACT>(
        values + simdgroup, part, w, scales, biases, lane);
  } else {
    fetch_rows<OWN, IN, BITS, GROUP>(rows[0], w, scales, biases, lane * N);
    square = stage<IN, BITS, EXACT, N, FORM>(values, sums, x, other, index, 32 * SIMDGROUPS);
  }
  float inverse = 1.0f;
  if (FORM == NORM) {
    inverse = inverse_norm<SIMDGROUPS, IN>(square, squares, epsilon, simdgroup, lane);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int r = 0; r < OWN; ++r) {
    totals[r] = 0.0f;
  }
  if (SPLIT) {
    for (int i = 0; index < ROWS && i < SIMDGROUPS; ++i) {
      totals[0] += values[index * SIMDGROUPS + i];
    }
  } else {
    #pragma unroll
    for (int step = 0; step < steps<IN, N>(); ++step) {
      const uint at = (step * 32 + lane) * N;
      if (step + 1 < steps<IN, N>()) {
        fetch_rows<OWN, IN, BITS, GROUP>(rows[(step + 1) % 2], w, scales, biases, at + 32 * N);
      }
      if (IN % (32 * N) == 0 || at < IN) {
        float part[N];
        take<N>(part, values, step, lane);
        add_rows<OWN, BITS, EXACT>(totals, rows[step % 2], part, sums[step * 32 + lane]);
      }
    }
  }
  for (int r = 0; r < OWN; ++r) {
    totals[r] = (SPLIT ? totals[r] : simd_sum(totals[r])) * inverse;
  }
  count = SPLIT ? int(index < ROWS) : lane == 0 && own < uint(OUT) ? ROWS : 0;
  return SPLIT ? row + index / M * APART + index % M : row;
}

// y[row ...] = (residual +) w form(x); rows of y lie `stride` apart.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
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
  const int MOST = SPLIT ? 1 : ROWS;
  int count;
  float totals[MOST];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, BASE, OUT, BITS, GROUP, V, SPLIT, EXACT, FORM>(
      count, totals, x + token * IN, norm_weight, epsilon, w, scales, biases, memory,
      group, simdgroup, lane);
  for (int r = 0; r < MOST; ++r) {
    if (r < count) {
      const uint at = token * stride + row + r;
      y[at] = Y(RESIDUAL ? float(residual[at]) + totals[r] : totals[r]);
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
  const float inverse = inverse_norm<SIMDGROUPS, IN>(square, squares, epsilon, simdgroup, lane);
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
template <int ROWS, int SIMDGROUPS, int IN, int OUT, int BITS, int GROUP, int V, int SPLIT,
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
  const int MOST = SPLIT ? 1 : ROWS;
  int count;
  float totals[MOST];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, 0, OUT, BITS, GROUP, V, SPLIT, EXACT, SWIGLU>(
      count, totals, gate + token * IN, up + token * IN, 0.0f, w, scales, biases,
      memory, group, simdgroup, lane);
  const float factor = SCORED ? sigmoid(float(score[token])) : 1.0f;
  for (int r = 0; r < MOST; ++r) {
    if (r < count) {
      const uint at = token * OUT + row + r;
      const float routed = ROUTED ? experts[at] : 0.0f;
      y[at] = T(float(residual[at]) + routed + factor * totals[r]);
    }
  }
}

// y = w (silu(gate) up) in float: what add_shared multiplies and adds.
template <int ROWS, int SIMDGROUPS, int IN, int OUT, int BITS, int GROUP, int V, int SPLIT,
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
  const int MOST = SPLIT ? 1 : ROWS;
  int count;
  float totals[MOST];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, 0, OUT, BITS, GROUP, V, SPLIT, EXACT, SWIGLU>(
      count, totals, gate + token * IN, up + token * IN, 0.0f, w, scales, biases,
      memory, group, simdgroup, lane);
  for (int r = 0; r < MOST; ++r) {
    if (r < count) {
      y[token * OUT + row + r] = totals[r];
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
