// Experts of a few tokens, pair by pair, out of a bank by slot number.
#include "quantised.metal"

// As add_rows, also of MXFP4, whose scales are bytes; x is read as EXACT then.
template <int ROWS, int BITS, bool EXACT, int V, typename W, typename S>
inline void add_expert_rows(
    thread float* acc, const thread slice<V, W, S>* rows, const thread float* x, float sum) {
  if (!are_bytes<S>()) {
    add_rows<ROWS, BITS, EXACT>(acc, rows, x, &sum);
    return;
  }
  const int per = per_word<BITS>();
  for (int r = 0; r < ROWS; ++r) {
    float dot = 0.0f;
    for (int i = 0; i < V; ++i) {
      float q[8];
      tiny_numbers(q, uint(rows[r].words.at[i]));
      for (int j = 0; j < per; ++j) {
        dot = metal::fma(q[j], x[i * per + j], dot);
      }
    }
    acc[r] = metal::fma(of_tiny(uint(rows[r].scale)), dot, acc[r]);
  }
}

// h = activated(gate[slot] x, up[slot] x), with BIASED after their biases are added: ROWS rows from
// `row` on. An absent expert's, whose slot is num_slots or more, stay as they are.
template <int ROWS, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, bool BIASED, uint ALPHA,
          uint LIMIT, typename T, typename W, typename S, typename B>
inline void inner_rows(
    const device T* x,
    const device W* gate,
    const device S* gate_scales,
    const device S* gate_biases,
    const device W* up,
    const device S* up_scales,
    const device S* up_biases,
    const device B* gate_bias,
    const device B* up_bias,
    device float* h,
    uint num_slots,
    uint slot,
    uint row,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
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
      const float total = load_x<BITS, EXACT, N>(part, x + at);
      add_expert_rows<ROWS, BITS, EXACT>(sums_gate, gates, part, total);
      add_expert_rows<ROWS, BITS, EXACT>(sums_up, ups, part, total);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float first = simd_sum(sums_gate[r]), second = simd_sum(sums_up[r]);
    if (BIASED) {
      first += float(gate_bias[base + r]);
      second += float(up_bias[base + r]);
    }
    if (lane == 0) {
      h[row + r] = activated<ALPHA, LIMIT>(first, second);
    }
  }
}

// One pair of a token and an expert, K a token.
template <int ROWS, int K, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, bool BIASED,
          uint ALPHA, uint LIMIT, typename T, typename W, typename S, typename B>
inline void expert_inner(
    const device T* x,
    const device uint* slots,
    const device W* gate,
    const device S* gate_scales,
    const device S* gate_biases,
    const device W* up,
    const device S* up_scales,
    const device S* up_biases,
    const device B* gate_bias,
    const device B* up_bias,
    device float* h,
    uint num_slots,
    uint pair,
    uint row,
    uint lane) {
  inner_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT, BIASED, ALPHA, LIMIT>(
      x + pair / K * IN, gate, gate_scales, gate_biases, up, up_scales, up_biases, gate_bias,
      up_bias, h + ulong(pair) * OUT, num_slots, slots[pair], row, lane);
}

// products[r] = weight down[slot] h, with BIASED weight (down[slot] h + bias[slot]): ROWS rows from
// `row` on.
template <int ROWS, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, bool BIASED, typename W,
          typename S, typename B>
inline void outer_rows(
    const device float* h,
    const device W* down,
    const device S* scales,
    const device S* biases,
    const device B* bias,
    threadgroup float* products,
    float weight,
    uint slot,
    uint row,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const ulong base = ulong(slot) * OUT + row;
  const ulong words = base * (IN / per), groups = base * (IN / GROUP);
  float sums[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    sums[r] = 0.0f;
  }
  for (uint at = lane * N; at < IN; at += 32 * N) {
    slice<V, W, S> rows[ROWS];
    fetch_rows<ROWS, IN, BITS, GROUP>(rows, down + words, scales + groups, biases + groups, at);
    float values[N];
    const float total = load_x<BITS, EXACT, N>(values, h + at);
    add_expert_rows<ROWS, BITS, EXACT>(sums, rows, values, total);
  }
  for (int r = 0; r < ROWS; ++r) {
    float total = simd_sum(sums[r]);
    if (BIASED) {
      total += float(bias[base + r]);
    }
    if (lane == 0) {
      products[r] = weight * total;
    }
  }
}

// The sum over a token's experts of row `lane`, in ascending k.
template <int ROWS, int K>
inline float sum_of_experts(
    const threadgroup float* products,
    const device uint* slots,
    float total,
    uint num_slots,
    uint lane) {
  for (int i = 0; i < K; ++i) {
    if (slots[i] < num_slots) {
      total += products[i * ROWS + lane];
    }
  }
  return total;
}

// The sum over a token's experts, whose outputs of this row lie OUT apart, in ascending k.
template <int K, int OUT>
inline float sum_of_outputs(const device float* outputs) {
  float total = -0.0f;
  for (int k = 0; k < K; ++k) {
    total += outputs[k * OUT];
  }
  return total;
}

// y[n] = initial[n] + sum_k weights[n, k] (down[s] h[n, k] (+ bias[s])), s = slots[n, k], in ascending
// k; an absent expert adds nothing. Simdgroup k of a threadgroup computes ROWS rows of pair (n, k).
template <int ROWS, int K, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT,
          bool CONTINUES, bool BIASED, typename W, typename S, typename B>
inline void expert_outer(
    const device float* h,
    const device uint* slots,
    const device float* weights,
    const device W* down,
    const device S* scales,
    const device S* biases,
    const device B* bias,
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
    outer_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT, BIASED>(
        h + ulong(pair) * IN, down, scales, biases, bias, products + k * ROWS, weights[pair], slot,
        row, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (k == 0 && lane < ROWS) {
    const ulong at = ulong(token) * OUT + row + lane;
    y[at] = sum_of_experts<ROWS, K>(
        products, slots + token * K, CONTINUES ? initial[at] : -0.0f, num_slots, lane);
  }
}

// As outer_rows, out to a pair's output y; an absent expert's rows are -0.0.
template <int ROWS, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, bool BIASED, typename W,
          typename S, typename B>
inline void expert_own(
    const device float* h,
    const device W* down,
    const device S* scales,
    const device S* biases,
    const device B* bias,
    device float* y,
    threadgroup float* products,
    float weight,
    uint num_slots,
    uint slot,
    uint row,
    uint lane) {
  const bool is_own = slot < num_slots;
  if (is_own) {
    outer_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT, BIASED>(
        h, down, scales, biases, bias, products, weight, slot, row, lane);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < ROWS) {
    y[row + lane] = is_own ? products[lane] : -0.0f;
  }
}

// Where a value is in a row that is dealt out: N neighbours are a lane's, and of four of them each all
// lanes' lie side by side.
template <int N>
inline uint dealt(uint at) {
  return at / (32 * N) * (32 * N) + at % N / 4 * 128 + at / N % 32 * 4 + at % 4;
}

// As take_columns, of a row that is dealt out.
template <int PARTS, int IN, int BITS, bool EXACT, int SHARE, int N>
inline void take_dealt(
    thread columns<SHARE, N>& own, const device float* h, uint part, uint lane) {
  own.first = (part * SHARE * 32 + lane) * N;
  #pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const uint block = (part * SHARE + i) * 32 * N;
    own.sums[i][0] = 0.0f;
    for (int j = 0; j < N; j += 4) {
      if (PARTS * SHARE * 32 * N == IN || block < IN) {
        const pack<float, 4> in = load_pack<4>(h + block + 32 * j + 4 * lane);
        for (int c = 0; c < 4; ++c) {
          own.sums[i][0] += in.at[c];
          own.values[i][j + c] = in.at[c] * factor<BITS, EXACT>(j + c);
        }
      }
    }
  }
}

// As inner_rows, with rows of an expert that are all simdgroups' work. DEAL: h is dealt out for lanes
// that take so many columns, 0: it is not.
template <int ROWS, int M, int SIMDGROUPS, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT,
          int DEAL, typename T, typename W, typename S>
inline void inner_parts(
    const device T* x,
    const device W* gate,
    const device S* gate_scales,
    const device S* gate_biases,
    const device W* up,
    const device S* up_scales,
    const device S* up_biases,
    device float* h,
    threadgroup float* partial,
    uint num_slots,
    uint slot,
    uint row,
    uint simdgroup,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per, SHARE = share<IN, N, SIMDGROUPS>();
  columns<SHARE, N> own;
  take_columns<SIMDGROUPS, IN, BITS, EXACT, PLAIN>(own, x, x, simdgroup, lane);
  if (slot >= num_slots) {
    return;
  }
  const ulong base = ulong(slot) * OUT + row;
  const ulong words = base * (IN / per), groups = base * (IN / GROUP);
  part_of_rows<ROWS, M, OUT / ROWS * M, SIMDGROUPS, SIMDGROUPS, IN, BITS, GROUP, V, EXACT>(
      partial + simdgroup, own, gate + words, gate_scales + groups, gate_biases + groups, lane);
  part_of_rows<ROWS, M, OUT / ROWS * M, SIMDGROUPS, SIMDGROUPS, IN, BITS, GROUP, V, EXACT>(
      partial + ROWS * SIMDGROUPS + simdgroup, own, up + words, up_scales + groups,
      up_biases + groups, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint index = simdgroup * 32 + lane;
  if (index < ROWS) {
    float first = 0.0f, second = 0.0f;
    for (int i = 0; i < SIMDGROUPS; ++i) {
      first += partial[index * SIMDGROUPS + i];
      second += partial[(ROWS + index) * SIMDGROUPS + i];
    }
    const uint at = row + index / M * (OUT / ROWS * M) + index % M;
    h[DEAL ? dealt<DEAL ? DEAL : 4>(at) : at] = silu(first) * second;
  }
}

// As expert_outer, with PARTS simdgroups for each expert, which share its rows' columns; DEALT: h is
// as inner_parts deals it.
template <int ROWS, int M, int PARTS, int K, int IN, int OUT, int BITS, int GROUP, int V,
          bool EXACT, bool CONTINUES, bool DEALT, typename W, typename S>
inline void outer_parts(
    const device float* h,
    const device uint* slots,
    const device float* weights,
    const device W* down,
    const device S* scales,
    const device S* biases,
    const device float* initial,
    device float* y,
    threadgroup float* partial,
    uint num_slots,
    uint token,
    uint row,
    uint simdgroup,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per, SHARE = share<IN, N, PARTS>();
  const int STRIDE = K * PARTS | 1;
  const uint pair = token * K + simdgroup / PARTS, slot = slots[pair];
  if (slot < num_slots) {
    const ulong base = ulong(slot) * OUT + row;
    columns<SHARE, N> own;
    const device float* row_of_h = h + ulong(pair) * IN;
    if (DEALT) {
      take_dealt<PARTS, IN, BITS, EXACT>(own, row_of_h, simdgroup % PARTS, lane);
    } else {
      take_columns<PARTS, IN, BITS, EXACT, PLAIN>(own, row_of_h, h, simdgroup % PARTS, lane);
    }
    part_of_rows<ROWS, M, OUT / ROWS * M, PARTS, STRIDE, IN, BITS, GROUP, V, EXACT>(
        partial + simdgroup, own, down + base * (IN / per), scales + base * (IN / GROUP),
        biases + base * (IN / GROUP), lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint index = simdgroup * 32 + lane;
  if (index < ROWS) {
    const ulong at =
        ulong(token) * OUT + row + index / M * (OUT / ROWS * M) + index % M;
    float total = CONTINUES ? initial[at] : -0.0f;
    for (int k = 0; k < K; ++k) {
      if (slots[token * K + k] < num_slots) {
        float sum = 0.0f;
        for (int i = 0; i < PARTS; ++i) {
          sum += partial[index * STRIDE + k * PARTS + i];
        }
        total += rounded_product(weights[token * K + k], sum);
      }
    }
    y[at] = total;
  }
}
