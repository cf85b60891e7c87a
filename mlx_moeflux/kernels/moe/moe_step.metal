// A MoE block for a few tokens after its first matrices: each step does what the launches that it
// replaces do, number by number.
#include "matvec.metal"
#include "expert_pairs.metal"
#include "router.metal"

// Simdgroup 0 chooses the token's experts; everybody then knows the slots and weights. Threadgroups
// that `write` leave them in device memory too. table: expert -> slot; without TABLED slot e holds
// expert e, and anything stands there.
template <int E, int K, bool NORMALISE, bool TABLED, typename T, typename I>
inline void choose_slots(
    const device T* logits,
    const device I* table,
    device uint* slots,
    device float* weights,
    threadgroup uint* chosen,
    threadgroup float* share,
    bool write,
    uint simdgroup,
    uint lane) {
  if (simdgroup == 0) {
    softmax_choice<E, K, NORMALISE>(logits, chosen, share, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < K) {
      const uint slot = TABLED ? uint(table[chosen[lane]]) : chosen[lane];
      chosen[lane] = slot;
      if (write) {
        slots[lane] = slot;
        weights[lane] = share[lane];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// y = residual + the experts' sum + sigmoid(score) shared, `shared` as add_shared has it; ROWS rows
// for a threadgroup. Simdgroup k < K computes expert k, simdgroup K the shared expert (SHARED).
template <int ROWS, int K, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT, bool SHARED,
          bool SCORED, int INNER, int SHARED_BITS, int SHARED_GROUP, int SHARED_V, typename T,
          typename W, typename S, typename X, typename Y>
inline void moe_finish(
    const device float* h,
    const device uint* slots,
    const device float* weights,
    const device W* down,
    const device S* scales,
    const device S* biases,
    const device T* residual,
    const device T* gate,
    const device T* up,
    const device T* score,
    const device X* w,
    const device Y* shared_scales,
    const device Y* shared_biases,
    device T* y,
    threadgroup float* products,
    threadgroup float* values,
    threadgroup float* sums,
    uint num_slots,
    uint row,
    uint simdgroup,
    uint lane) {
  const int N = SHARED_V * per_word<SHARED_BITS>();
  if (SHARED) {
    stage<INNER, SHARED_BITS, EXACT, N, SWIGLU>(
        values, sums, gate, up, simdgroup * 32 + lane, 32 * (K + 1));
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (simdgroup < K) {
    if (slots[simdgroup] < num_slots) {
      outer_rows<ROWS, IN, OUT, BITS, GROUP, V, EXACT, false>(
          h + simdgroup * IN, down, scales, biases, h, products + simdgroup * ROWS,
          weights[simdgroup], slots[simdgroup], row, lane);
    }
  } else if (SHARED) {
    float totals[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      totals[r] = 0.0f;
    }
    #pragma unroll
    for (int step = 0; step < steps<INNER, N>(); ++step) {
      const uint at = (step * 32 + lane) * N;
      if (INNER % (32 * N) == 0 || at < INNER) {
        slice<SHARED_V, X, Y> rows[ROWS];
        fetch_rows<ROWS, INNER, SHARED_BITS, SHARED_GROUP>(
            rows, w + row * (INNER / per_word<SHARED_BITS>()),
            shared_scales + row * (INNER / SHARED_GROUP),
            shared_biases + row * (INNER / SHARED_GROUP), at);
        float part[N];
        take<N>(part, values, step, lane);
        add_rows<ROWS, SHARED_BITS, EXACT>(totals, rows, part, sums[step * 32 + lane]);
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      const float total = simd_sum(totals[r]);
      if (lane == 0) {
        products[K * ROWS + r] = total;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0 && lane < ROWS) {
    const float experts = sum_of_experts<ROWS, K>(products, slots, -0.0f, num_slots, lane);
    if (SHARED) {
      const float factor = SCORED ? sigmoid(float(score[0])) : 1.0f;
      y[row + lane] =
          T(float(residual[row + lane]) + experts + factor * products[K * ROWS + lane]);
    } else {
      y[row + lane] = T(float(residual[row + lane]) + experts);
    }
  }
}
