// Rows of x, each by itself, through matrices: a threadgroup keeps its row on the chip.
#include "quantised.metal"

// ROWS rows of w form(x) for each simdgroup, FORM as above, of the OUT rows of w from BASE on;
// returns the first. All lanes get the totals. x is staged PIECE steps at a time.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          int PIECE, bool EXACT, int FORM, typename T, typename U, typename W, typename S>
inline uint rows_of(
    thread float* totals,
    const device T* x,
    const device U* other,
    float epsilon,
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
    inverse = metal::precise::rsqrt(total / float(IN) + epsilon);
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

// y[row ...] = (residual +) w form(x); rows of y lie `stride` apart.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          int PIECE, bool EXACT, int FORM, bool RESIDUAL, typename T, typename U, typename W,
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
    threadgroup float* values,
    threadgroup float* sums,
    threadgroup float* squares,
    uint stride,
    uint token,
    uint group,
    uint simdgroup,
    uint lane) {
  float totals[ROWS];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, BASE, OUT, BITS, GROUP, V, PIECE, EXACT, FORM>(
      totals, x + token * IN, norm_weight, epsilon, w, scales, biases, values, sums, squares, group,
      simdgroup, lane);
  if (lane == 0 && owns_rows<ROWS, SIMDGROUPS, OUT>(group, simdgroup)) {
    for (int r = 0; r < ROWS; ++r) {
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
  x += token * IN;
  y += token * stride;
  float square = 0.0f;
  for (uint i = simdgroup * 32 + lane; i < IN; i += 32 * SIMDGROUPS) {
    square = metal::fma(float(x[i]), float(x[i]), square);
  }
  square = threadgroup_sum(square, squares, lane, simdgroup, SIMDGROUPS);
  const float inverse = metal::precise::rsqrt(square / float(IN) + epsilon);
  for (uint i = simdgroup * 32 + lane; i < IN; i += 32 * SIMDGROUPS) {
    y[i] = T(float(x[i]) * inverse * float(norm_weight[i]));
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
      totals, gate + token * IN, up + token * IN, 0.0f, w, scales, biases, values, sums, values,
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
