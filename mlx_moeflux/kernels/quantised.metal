// Products of few rows of x with matrices [out, in] as MLX stores them: numbers of BITS bits in
// words, the lowest first, with a scale and a bias for every GROUP neighbours. BITS = 0: floats.
//
// One simdgroup computes ROWS rows of a matrix. Its lanes share the columns; V words at a time
// are one access, and belong to one group.

// N neighbours of p as floats.
template <int N, typename T>
inline void load_floats(thread float* x, const device T* p) {
  const int most = 16 / sizeof(T), M = N < most ? N : most;
  for (int i = 0; i < N; i += M) {
    pack<T, M> part = load_pack<M>(p + i);
    for (int j = 0; j < M; ++j) {
      x[i + j] = float(part.at[j]);
    }
  }
}

// acc[r * TOKENS + t] += this lane's part of row r times x[t], for the N columns from `at` on;
// sums[t] is the sum of x[t].
template <int ROWS, int TOKENS, int IN, int BITS, int GROUP, int V, typename W, typename S>
inline void add_products(
    thread float* acc,
    const device W* w,
    const device S* scales,
    const device S* biases,
    uint at,
    const thread float* x,
    const thread float* sums) {
  const int per = per_word<BITS>(), N = V * per;
  // Numbers around zero: the two terms of a group's sum would else cancel.
  const float middle = float(1 << BITS >> 1);
  pack<W, V> words[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    words[r] = load_pack<V>(w + r * (IN / per) + at / per);
  }
  for (int r = 0; r < ROWS; ++r) {
    float q[N];
    for (int i = 0; i < N; ++i) {
      q[i] = number<BITS>(words[r].at[i / per], i % per, middle);
    }
    float scale = 1.0f, bias = 0.0f;
    if (BITS != 0) {
      scale = float(scales[r * (IN / GROUP) + at / GROUP]);
      bias = metal::fma(middle, scale, float(biases[r * (IN / GROUP) + at / GROUP]));
    }
    for (int t = 0; t < TOKENS; ++t) {
      float dot = 0.0f;
      for (int i = 0; i < N; ++i) {
        dot = metal::fma(q[i], x[t * N + i], dot);
      }
      acc[r * TOKENS + t] += BITS == 0 ? dot : metal::fma(scale, dot, bias * sums[t]);
    }
  }
}

template <int N>
inline float sum_of(const thread float* x) {
  float total = 0.0f;
  for (int i = 0; i < N; ++i) {
    total += x[i];
  }
  return total;
}

// h[p] = silu(gate[s] x[p / K]) * (up[s] x[p / K]), s = slots[p]; rows of absent experts stay
// as they are.
template <int ROWS, int K, int IN, int OUT, int BITS, int GROUP, int V, typename T, typename W,
          typename S>
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
    uint pair,
    uint row,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const uint slot = slots[pair];
  if (slot == 0xffffffffu) {
    return;
  }
  const ulong base = ulong(slot) * OUT + row;
  const ulong words = base * (IN / per), groups = base * (IN / GROUP);
  float sums_gate[ROWS], sums_up[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    sums_gate[r] = sums_up[r] = 0.0f;
  }
  x += pair / K * IN;
  for (uint at = lane * N; at < IN; at += 32 * N) {
    float values[N], sum[1];
    load_floats<N>(values, x + at);
    sum[0] = sum_of<N>(values);
    add_products<ROWS, 1, IN, BITS, GROUP, V>(
        sums_gate, gate + words, gate_scales + groups, gate_biases + groups, at, values, sum);
    add_products<ROWS, 1, IN, BITS, GROUP, V>(
        sums_up, up + words, up_scales + groups, up_biases + groups, at, values, sum);
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
template <int ROWS, int K, int IN, int OUT, int BITS, int GROUP, int V, bool CONTINUES,
          typename W, typename S>
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
    uint token,
    uint row,
    uint k,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const uint pair = token * K + k, slot = slots[pair];
  if (slot != 0xffffffffu) {
    const ulong base = ulong(slot) * OUT + row;
    const ulong words = base * (IN / per), groups = base * (IN / GROUP);
    float sums[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      sums[r] = 0.0f;
    }
    for (uint at = lane * N; at < IN; at += 32 * N) {
      float values[N], sum[1];
      load_floats<N>(values, h + ulong(pair) * IN + at);
      sum[0] = sum_of<N>(values);
      add_products<ROWS, 1, IN, BITS, GROUP, V>(
          sums, down + words, scales + groups, biases + groups, at, values, sum);
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
      if (slots[token * K + i] != 0xffffffffu) {
        total += products[i * ROWS + lane];
      }
    }
    y[at] = total;
  }
}

// y[t, row ...] = (residual +) w norm(x[t]), norm(x) = norm_weight x / sqrt(mean x^2 + eps);
// without NORM x is taken as it is. ROWS rows for each simdgroup, all tokens.
template <int ROWS, int TOKENS, int IN, int OUT, int BITS, int GROUP, int V, bool NORM,
          bool RESIDUAL, typename T, typename U, typename W, typename S>
inline void norm_matvec(
    const device T* x,
    const device U* norm_weight,
    const device float* eps,
    const device T* residual,
    const device W* w,
    const device S* scales,
    const device S* biases,
    device T* y,
    uint row,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const ulong words = ulong(row) * (IN / per), groups = ulong(row) * (IN / GROUP);
  float acc[ROWS * TOKENS], squares[TOKENS];
  for (int i = 0; i < ROWS * TOKENS; ++i) {
    acc[i] = 0.0f;
  }
  for (int t = 0; t < TOKENS; ++t) {
    squares[t] = 0.0f;
  }
  for (uint at = lane * N; at < IN; at += 32 * N) {
    float values[TOKENS * N], sums[TOKENS], factors[N];
    if (NORM) {
      load_floats<N>(factors, norm_weight + at);
    }
    for (int t = 0; t < TOKENS; ++t) {
      load_floats<N>(values + t * N, x + t * IN + at);
      if (NORM) {
        for (int i = 0; i < N; ++i) {
          squares[t] = metal::fma(values[t * N + i], values[t * N + i], squares[t]);
          values[t * N + i] *= factors[i];
        }
      }
      sums[t] = sum_of<N>(values + t * N);
    }
    add_products<ROWS, TOKENS, IN, BITS, GROUP, V>(
        acc, w + words, scales + groups, biases + groups, at, values, sums);
  }
  for (int t = 0; t < TOKENS; ++t) {
    float factor = 1.0f;
    if (NORM) {
      factor = metal::precise::rsqrt(simd_sum(squares[t]) / float(IN) + eps[0]);
    }
    for (int r = 0; r < ROWS; ++r) {
      float total = simd_sum(acc[r * TOKENS + t]) * factor;
      if (lane == 0) {
        const uint at = t * OUT + row + r;
        y[at] = T(RESIDUAL ? float(residual[at]) + total : total);
      }
    }
  }
}
