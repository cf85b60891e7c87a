// What a mixer or MLP reads of S residual streams of C numbers, and how its output goes back.
#include "quantised.metal"

// 1 / sqrt(mean of x^2 + epsilon) of each stream of a row, for everybody. Everybody meets.
template <int S, int C, int SIMDGROUPS, typename T>
inline void stream_norms(
    const device T* x,
    threadgroup float* squares,
    threadgroup float* inverse,
    float epsilon,
    uint simdgroup,
    uint lane) {
  const uint index = simdgroup * 32 + lane;
  for (int s = 0; s < S; ++s) {
    float square = 0.0f;
    for (uint c = index; c < C; c += 32 * SIMDGROUPS) {
      const float value = float(x[s * C + c]);
      square = metal::fma(value, value, square);
    }
    square = simd_sum(square);
    if (lane == 0) {
      squares[s * SIMDGROUPS + simdgroup] = square;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index < S) {
    float total = 0.0f;
    for (int i = 0; i < SIMDGROUPS; ++i) {
      total += squares[index * SIMDGROUPS + i];
    }
    inverse[index] = metal::precise::rsqrt(total / float(C) + epsilon);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A lane's columns of the normed row, as add_rows wants them; take_columns of quantised.metal.
template <int PARTS, int S, int C, int BITS, bool EXACT, int SHARE, int N, typename T, typename U>
inline void take_normed(
    thread columns<SHARE, N>& own,
    const device T* x,
    const device U* norm,
    const threadgroup float* inverse,
    uint part,
    uint lane) {
  const int IN = S * C, M = N % 4 == 0 ? 4 : 1;
  own.first = (part * SHARE * 32 + lane) * N;
  #pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const uint at = own.first + i * 32 * N;
    own.sums[i][0] = 0.0f;
    for (int j = 0; j < N; j += M) {
      if (PARTS * SHARE * 32 * N == IN || at < IN) {
        const pack<T, M> in = load_pack<M>(x + at + j);
        const pack<U, M> beside = load_pack<M>(norm + at + j);
        for (int c = 0; c < M; ++c) {
          const float scale = inverse[(at + j + c) / C];
          const float value = float(in.at[c]) * scale * float(beside.at[c]);
          own.sums[i][0] += value;
          own.values[i][j + c] = value * factor<BITS, EXACT>(j + c);
        }
      }
    }
  }
}

// The normed row times ROWS of the OUT rows of a matrix that begins at row BASE of w: the first ROWS
// threads get one product each, of the row that is returned. M rows are computed together.
template <int ROWS, int SIMDGROUPS, int S, int C, int BASE, int OUT, int BITS, int GROUP, int V,
          int M, bool EXACT, typename T, typename U, typename W, typename B>
inline uint normed_product(
    thread float& total,
    const device T* x,
    const device U* norm,
    const threadgroup float* inverse,
    const device W* w,
    const device B* scales,
    const device B* biases,
    threadgroup float* partial,
    uint group,
    uint simdgroup,
    uint lane) {
  const int IN = S * C, per = per_word<BITS>(), N = V * per, APART = OUT / ROWS * M;
  const uint index = simdgroup * 32 + lane, row = group * M;
  columns<share<IN, N, SIMDGROUPS>(), N> own;
  take_normed<SIMDGROUPS, S, C, BITS, EXACT>(own, x, norm, inverse, simdgroup, lane);
  part_of_rows<ROWS, M, APART, SIMDGROUPS, SIMDGROUPS, IN, BITS, GROUP, V, EXACT>(
      partial + simdgroup, own, w + ulong(BASE + row) * (IN / per),
      scales + ulong(BASE + row) * (IN / GROUP), biases + ulong(BASE + row) * (IN / GROUP), lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  total = 0.0f;
  for (int i = 0; index < ROWS && i < SIMDGROUPS; ++i) {
    total += partial[index * SIMDGROUPS + i];
  }
  return row + index / M * APART + index % M;
}

// N neighbours of low as add_rows wants them; returns their sum.
template <int BITS, bool EXACT, int N>
inline float take_low(thread float* x, const device float* p) {
  const int M = N % 4 == 0 ? 4 : 1;
  float sum = 0.0f;
  for (int i = 0; i < N; i += M) {
    const pack<float, M> part = load_pack<M>(p + i);
    for (int c = 0; c < M; ++c) {
      sum += part.at[c];
      x[i + c] = part.at[c] * factor<BITS, EXACT>(i + c);
    }
  }
  return sum;
}

// y[column ...] = mean over streams of sigmoid(w low) normed x, COLUMNS neighbours for a simdgroup.
template <int COLUMNS, int S, int C, int IN, int BITS, int GROUP, int V, bool EXACT, typename T,
          typename U, typename W, typename B>
inline void mix_streams(
    const device float* low,
    const device float* inverse,
    const device T* x,
    const device U* norm,
    const device W* w,
    const device B* scales,
    const device B* biases,
    device T* y,
    uint column,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  if (column >= C) {
    return;
  }
  float totals[S * COLUMNS] = {};
  for (int step = 0; step < steps<IN, N>(); ++step) {
    const uint at = (step * 32 + lane) * N;
    if (at < IN) {
      float part[N];
      const float sum = take_low<BITS, EXACT, N>(part, low + at);
      for (int s = 0; s < S; ++s) {
        slice<V, W, B> rows[COLUMNS];
        const ulong first = ulong(s) * C + column;
        fetch_rows<COLUMNS, IN, BITS, GROUP>(
            rows, w + first * (IN / per), scales + first * (IN / GROUP),
            biases + first * (IN / GROUP), at);
        add_rows<COLUMNS, BITS, EXACT>(totals + s * COLUMNS, rows, part, &sum);
      }
    }
  }
  float sum = 0.0f;
  const uint own = column + lane % COLUMNS;
  for (int s = 0; s < S; ++s) {
    float total = 0.0f;
    for (int i = 0; i < COLUMNS; ++i) {
      const float all = simd_sum(totals[s * COLUMNS + i]);
      total = lane % COLUMNS == i ? all : total;
    }
    const uint at = s * C + own;
    sum += sigmoid(total) * (float(x[at]) * inverse[s] * float(norm[at]));
  }
  if (lane < COLUMNS) {
    y[own] = T(sum / float(S));
  }
}
