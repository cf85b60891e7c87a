// Rows of x, each by itself, through matrices: a threadgroup keeps its row on the chip.
#include "quantised.metal"

// 1 / sqrt(mean of x^2 + epsilon) of every simdgroup's part of the sum of squares.
template <int SIMDGROUPS, int IN>
inline float inverse_norm(const threadgroup float* squares, float epsilon) {
  float total = 0.0f;
  for (int i = 0; i < SIMDGROUPS; ++i) {
    total += squares[i];
  }
  return metal::precise::rsqrt(total / float(IN) + epsilon);
}

// Who works on what: see the two that follow.
template <bool SPLIT>
struct way {};

// Each simdgroup has ROWS rows of its own of w form(x), FORM as above, of the OUT rows of w from
// BASE on, and all of x, which is staged. Lane 0 gets `count` totals, from the returned row on.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          bool EXACT, int FORM, typename T, typename U, typename W, typename S>
inline uint rows_of(
    way<false>,
    thread int& count,
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
  const uint own = (group * SIMDGROUPS + simdgroup) * ROWS;
  const uint row = metal::min(own, uint(OUT - ROWS));  // the last ones repeat others' rows
  w += ulong(BASE + row) * (IN / per);
  scales += ulong(BASE + row) * (IN / GROUP);
  biases += ulong(BASE + row) * (IN / GROUP);
  slice<V, W, S> rows[2][ROWS];
  fetch_rows<ROWS, IN, BITS, GROUP>(rows[0], w, scales, biases, lane * N);
  for (int r = 0; r < ROWS; ++r) {
    totals[r] = 0.0f;
  }
  float square = stage<IN, BITS, EXACT, N, FORM>(
      values, sums, x, other, simdgroup * 32 + lane, 32 * SIMDGROUPS);
  if (FORM == NORM) {
    square = simd_sum(square);
    if (lane == 0) {
      squares[simdgroup] = square;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  #pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const uint at = (step * 32 + lane) * N;
    if (step + 1 < STEPS) {
      fetch_rows<ROWS, IN, BITS, GROUP>(rows[(step + 1) % 2], w, scales, biases, at + 32 * N);
    }
    if (IN % (32 * N) == 0 || at < IN) {
      float part[N];
      take<N>(part, values, step, lane);
      add_rows<ROWS, BITS, EXACT>(totals, rows[step % 2], part, sums[step * 32 + lane]);
    }
  }
  const float inverse = FORM == NORM ? inverse_norm<SIMDGROUPS, IN>(squares, epsilon) : 1.0f;
  for (int r = 0; r < ROWS; ++r) {
    totals[r] = simd_sum(totals[r]) * inverse;
  }
  count = lane == 0 && own < uint(OUT) ? ROWS : 0;
  return row;
}

// N values of form(x), as add_rows wants them; returns their sum and adds to that of their squares.
template <int BITS, bool EXACT, int N, int FORM, typename T, typename U>
inline float form_x(
    thread float* values, thread float& square, const device T* x, const device U* other) {
  float sum = 0.0f;
  for (int i = 0; i < N; i += 4) {
    const pack<T, 4> in = load_pack<4>(x + i);
    const pack<U, 4> beside = load_pack<4>(other + i);
    for (int c = 0; c < 4; ++c) {
      const float value = formed<FORM>(float(in.at[c]), float(beside.at[c]), square);
      sum += value;
      values[i + c] = value * factor<BITS, EXACT>(i + c);
    }
  }
  return sum;
}

// ROWS rows are all simdgroups' work: each has its share of the columns, and their values of x in
// registers. The first ROWS threads get one total each.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          bool EXACT, int FORM, typename T, typename U, typename W, typename S>
inline uint rows_of(
    way<true>,
    thread int& count,
    thread float* totals,
    const device T* x,
    const device U* other,
    float epsilon,
    const device W* w,
    const device S* scales,
    const device S* biases,
    threadgroup float* partial,
    threadgroup float* sums,
    threadgroup float* squares,
    uint group,
    uint simdgroup,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const int SHARE = (steps<IN, N>() + SIMDGROUPS - 1) / SIMDGROUPS;
  const int TOGETHER = ROWS % 4 == 0 ? 4 : 1;
  const uint row = group * ROWS, first = (simdgroup * SHARE * 32 + lane) * N;
  w += ulong(BASE + row) * (IN / per);
  scales += ulong(BASE + row) * (IN / GROUP);
  biases += ulong(BASE + row) * (IN / GROUP);
  float values[SHARE][N], sum[SHARE], square = 0.0f;
  #pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const uint at = first + i * 32 * N;
    if (at < IN) {
      sum[i] = form_x<BITS, EXACT, N, FORM>(values[i], square, x + at, other + at);
    }
  }
  #pragma unroll
  for (int r = 0; r < ROWS; r += TOGETHER) {
    float acc[TOGETHER];
    for (int j = 0; j < TOGETHER; ++j) {
      acc[j] = 0.0f;
    }
    #pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      const uint at = first + i * 32 * N;
      if (at < IN) {
        slice<V, W, S> rows[TOGETHER];
        fetch_rows<TOGETHER, IN, BITS, GROUP>(
            rows, w + r * (IN / per), scales + r * (IN / GROUP), biases + r * (IN / GROUP), at);
        add_rows<TOGETHER, BITS, EXACT>(acc, rows, values[i], sum[i]);
      }
    }
    for (int j = 0; j < TOGETHER; ++j) {
      const float total = simd_sum(acc[j]);
      if (lane == 0) {
        partial[(r + j) * SIMDGROUPS + simdgroup] = total;
      }
    }
  }
  if (FORM == NORM) {
    square = simd_sum(square);
    if (lane == 0) {
      squares[simdgroup] = square;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint index = simdgroup * 32 + lane;
  count = index < ROWS ? 1 : 0;
  if (index < ROWS) {
    totals[0] = 0.0f;
    for (int i = 0; i < SIMDGROUPS; ++i) {
      totals[0] += partial[index * SIMDGROUPS + i];
    }
    totals[0] *= FORM == NORM ? inverse_norm<SIMDGROUPS, IN>(squares, epsilon) : 1.0f;
  }
  return row + index;
}

// y[row ...] = (residual +) w form(x); rows of y lie `stride` apart.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
          bool SPLIT, bool EXACT, int FORM, bool RESIDUAL, typename T, typename U, typename W,
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
  int count;
  float totals[ROWS];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, BASE, OUT, BITS, GROUP, V, EXACT, FORM>(
      way<SPLIT>(), count, totals, x + token * IN, norm_weight, epsilon, w, scales, biases, values,
      sums, squares, group, simdgroup, lane);
  for (int r = 0; r < count; ++r) {
    const uint at = token * stride + row + r;
    y[at] = Y(RESIDUAL ? float(residual[at]) + totals[r] : totals[r]);
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
template <int ROWS, int SIMDGROUPS, int IN, int OUT, int BITS, int GROUP, int V, bool SPLIT,
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
  int count;
  float totals[ROWS];
  const uint row = rows_of<ROWS, SIMDGROUPS, IN, 0, OUT, BITS, GROUP, V, EXACT, SWIGLU>(
      way<SPLIT>(), count, totals, gate + token * IN, up + token * IN, 0.0f, w, scales, biases,
      values, sums, values, group, simdgroup, lane);
  const float factor = SCORED ? sigmoid(float(score[token])) : 1.0f;
  for (int r = 0; r < count; ++r) {
    const uint at = token * OUT + row + r;
    const float routed = ROUTED ? experts[at] : 0.0f;
    y[at] = T(float(residual[at]) + routed + factor * totals[r]);
  }
}
