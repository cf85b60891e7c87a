// Experts in ggml's blocks for a few tokens, pair by pair, out of a bank by slot number.
#include "block_rows.metal"
#include "expert_pairs.metal"

// h = activated(gate[slot] x, up[slot] x): ROWS rows from `row` on. An absent expert's, whose slot is
// num_slots or more, stay as they are. L: Which eights of the rows of both a lane takes at a time.
template <int ROWS, int IN, int OUT, typename G, typename U, typename L, bool EXACT, uint ALPHA,
          uint LIMIT, typename T>
inline void block_inner(
    const device T* x,
    const device uchar* gate,
    const device uchar* up,
    device float* h,
    uint num_slots,
    uint slot,
    uint row,
    uint lane) {
  const int COUNT = L::COUNT, UNITS = IN / (8 * COUNT);
  const int GATE_ROW = IN / G::ELEMENTS * G::BYTES;
  const int UP_ROW = IN / U::ELEMENTS * U::BYTES;
  if (slot >= num_slots) {
    return;
  }
  gate += (ulong(slot) * OUT + row) * GATE_ROW;
  up += (ulong(slot) * OUT + row) * UP_ROW;
#ifdef MOEFLUX_CUDA
  prefetch_bytes<ROWS * GATE_ROW>(gate, lane);
  prefetch_bytes<ROWS * UP_ROW>(up, lane);
#endif
  float sums_gate[ROWS], sums_up[ROWS], squares;
  for (int r = 0; r < ROWS; ++r) {
    sums_gate[r] = sums_up[r] = 0.0f;
  }
  #pragma unroll 4
  for (int step = 0; step < (UNITS + 31) / 32; ++step) {
    const uint unit = step * 32 + lane;
    if (UNITS % 32 == 0 || unit < UNITS) {
      const uint at = L::first(unit);
      G gates[ROWS * COUNT];
      U ups[ROWS * COUNT];
      fetch_eights<ROWS, GATE_ROW, L>(gates, gate, at);
      fetch_eights<ROWS, UP_ROW, L>(ups, up, at);
      float part[8 * COUNT], sums[COUNT];
      take_eights<L, EXACT, PLAIN>(part, sums, x + at, x + at, squares);
      add_eights<ROWS, L, EXACT>(sums_gate, gates, part, sums, at);
      add_eights<ROWS, L, EXACT>(sums_up, ups, part, sums, at);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const float first = simd_sum(sums_gate[r]) * unit_of<EXACT>();
    const float second = simd_sum(sums_up[r]) * unit_of<EXACT>();
    if (lane == 0) {
      h[row + r] = activated<ALPHA, LIMIT>(first, second);
    }
  }
}

// products[r] = weight w[slot] form(x): ROWS rows, 4 or 8, from `row` on.
template <int ROWS, int IN, int OUT, int FORM, bool EXACT, typename E, typename T>
inline void block_products(
    const device T* x,
    const device T* other,
    const device uchar* w,
    threadgroup float* products,
    float weight,
    uint slot,
    uint row,
    uint lane) {
  using B = block_lanes<ROWS, IN, E>;
  const int LANES = B::LANES, OWN = B::OWN;
  float squares;
  uint which;
  const float total = block_totals<ROWS, IN, FORM, EXACT, E>(
      x, other, w + (ulong(slot) * OUT + row) * int(B::ROW), squares, which, lane);
  if (lane % LANES < OWN) {
    products[which] = weight * total;
  }
}

// As expert_outer.
template <int ROWS, int K, int IN, int OUT, bool EXACT, bool CONTINUES, typename E>
inline void block_outer(
    const device float* h,
    const device uint* slots,
    const device float* weights,
    const device uchar* down,
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
    const device float* own = h + ulong(pair) * IN;
    block_products<ROWS, IN, OUT, PLAIN, EXACT, E>(
        own, own, down, products + k * ROWS, weights[pair], slot, row, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (k == 0 && lane < ROWS) {
    const ulong at = ulong(token) * OUT + row + lane;
    y[at] = sum_of_experts<ROWS, K>(
        products, slots + token * K, CONTINUES ? initial[at] : -0.0f, num_slots, lane);
  }
}
