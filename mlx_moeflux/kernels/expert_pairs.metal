// Experts of a few tokens, pair by pair, out of a bank by slot number.
#include "quantised.metal"

// h = silu(gate[slot] x) * (up[slot] x): ROWS rows from `row` on. An absent expert's, whose slot is
// num_slots or more, stay as they are.
template <int ROWS, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, typename T, typename W,
          typename S>
inline void inner_rows(
    const device T* x,
    const device W* gate,
    const device S* gate_scales,
    const device S* gate_biases,
    const device W* up,
    const device S* up_scales,
    const device S* up_biases,
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
      add_rows<ROWS, BITS, EXACT>(sums_gate, gates, part, total);
      add_rows<ROWS, BITS, EXACT>(sums_up, ups, part, total);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float gated = silu(simd_sum(sums_gate[r])) * simd_sum(sums_up[r]);
    if (lane == 0) {
      h[row + r] = gated;
    }
  }
}

// One pair of a token and an expert, K a token.
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
  inner_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT>(
      x + pair / K * IN, gate, gate_scales, gate_biases, up, up_scales, up_biases,
      h + ulong(pair) * OUT, num_slots, slots[pair], row, lane);
}

// products[r] = weight down[slot] h: ROWS rows from `row` on.
template <int ROWS, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, typename W,
          typename S>
inline void outer_rows(
    const device float* h,
    const device W* down,
    const device S* scales,
    const device S* biases,
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
    add_rows<ROWS, BITS, EXACT>(sums, rows, values, total);
  }
  for (int r = 0; r < ROWS; ++r) {
    float total = simd_sum(sums[r]);
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
  const uint pair = token * K + k, slot = slots[pair];
  if (slot < num_slots) {
    outer_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT>(
        h + ulong(pair) * IN, down, scales, biases, products + k * ROWS, weights[pair], slot, row,
        lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (k == 0 && lane < ROWS) {
    const ulong at = ulong(token) * OUT + row + lane;
    y[at] = sum_of_experts<ROWS, K>(
        products, slots + token * K, CONTINUES ? initial[at] : -0.0f, num_slots, lane);
  }
}
