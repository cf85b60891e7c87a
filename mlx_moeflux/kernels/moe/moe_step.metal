// A MoE block for a few tokens after its first matrices: each step does what the launches that it
// replaces do, number by number.
#include "matvec.metal"
#include "expert_blocks.metal"
#include "router.metal"

// Simdgroup 0 chooses the token's experts; everybody then knows the slots and weights. Threadgroups
// that `write` leave them in device memory too, and the experts. table: expert -> slot; without TABLED slot e holds
// expert e, and anything stands there.
template <int E, int K, bool NORMALISE, bool TABLED, typename T, typename I>
inline void choose_slots(
    const device T* logits,
    const device I* table,
    device uint* slots,
    device float* weights,
    device uint* ids,
    threadgroup uint* chosen,
    threadgroup float* share,
    bool write,
    uint simdgroup,
    uint lane) {
  if (simdgroup == 0) {
    softmax_choice<E, K, NORMALISE>(logits, chosen, share, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < K) {
      const uint id = chosen[lane], slot = TABLED ? uint(table[id]) : id;
      chosen[lane] = slot;
      if (write) {
        slots[lane] = slot;
        weights[lane] = share[lane];
        ids[lane] = id;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// products[r] = row `row` + r of the shared expert, whose inner values are staged; as add_shared has
// it.
template <int ROWS, int INNER, int BITS, int GROUP, int V, bool EXACT, typename X, typename Y>
inline void shared_products(
    const threadgroup float* values,
    const threadgroup float* sums,
    const device X* w,
    const device Y* scales,
    const device Y* biases,
    threadgroup float* products,
    uint row,
    uint lane) {
  const int N = V * per_word<BITS>();
  float totals[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    totals[r] = 0.0f;
  }
  #pragma unroll
  for (int step = 0; step < steps<INNER, N>(); ++step) {
    const uint at = (step * 32 + lane) * N;
    if (INNER % (32 * N) == 0 || at < INNER) {
      slice<V, X, Y> rows[ROWS];
      fetch_rows<ROWS, INNER, BITS, GROUP>(
          rows, w + row * (INNER / per_word<BITS>()), scales + row * (INNER / GROUP),
          biases + row * (INNER / GROUP), at);
      add_staged<ROWS, BITS, EXACT, 1, N>(totals, rows, values, sums, step, lane);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const float total = simd_sum(totals[r]);
    if (lane == 0) {
      products[r] = total;
    }
  }
}

// y = residual + the experts' sum + sigmoid(score) shared: row `row` + lane of some. shared: Those of
// the shared expert (SHARED).
template <bool SHARED, bool SCORED, typename T>
inline void finish_row(
    float experts,
    const threadgroup float* shared,
    const device T* residual,
    const device T* score,
    device T* y,
    uint row,
    uint lane) {
  if (SHARED) {
    const float factor = SCORED ? sigmoid(float(score[0])) : 1.0f;
    y[row + lane] = T(float(residual[row + lane]) + experts + factor * shared[lane]);
  } else {
    y[row + lane] = T(float(residual[row + lane]) + experts);
  }
}
