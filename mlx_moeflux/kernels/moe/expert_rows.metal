// Products of rows with the matrices of their experts, in the tiles of small_batch.metal.
#include "small_batch.metal"

// `order` lists pairs (token * K + rank) by slot, tiles are (slot, first position) of 8
// neighbours of a list, see expert_tiles.metal. h [position] = silu(gate x) * (up x).
template <int W, int K, int IN, int OUT, int BITS, int GROUP, int V, typename T, typename Q,
          typename S>
inline void expert_rows_inner(
    const device T* x,
    const device uint* order,
    const device uint* offsets,
    const device uint* tiles,
    const device Q* gate,
    const device S* gate_scales,
    const device S* gate_biases,
    const device Q* up,
    const device S* up_scales,
    const device S* up_biases,
    device T* h,
    threadgroup float* partial,
    threadgroup uint* listed,
    int row,
    uint tile,
    uint index) {
  const uint slot = tiles[2 * tile], simdgroup = index / 32, lane = index % 32;
  if (slot == 0xffffffffu) {
    return;
  }
  const uint first = tiles[2 * tile + 1];
  const int rows = metal::min(int(offsets[slot + 1] - first), 8);
  if (index < 8) {
    listed[index] = order[first + metal::min(int(index), rows - 1)] / K;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong words = ulong(slot) * OUT * (IN / per_word<BITS>());
  const ulong groups = ulong(slot) * OUT * (IN / GROUP);
  threadgroup float* ups = partial + 8 * W * 20;
  multiply_tile<1, 1, W, IN, BITS, GROUP, V, PLAIN, true>(
      partial, x, x, gate + words, gate_scales + groups, gate_biases + groups, row, OUT - 1, 0, 8,
      listed, simdgroup, lane);
  multiply_tile<1, 1, W, IN, BITS, GROUP, V, PLAIN, true>(
      ups, x, x, up + words, up_scales + groups, up_biases + groups, row, OUT - 1, 0, 8, listed,
      simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = index; p < 128; p += 32 * W) {
    const int n = p / 16, r = p % 16;
    if (n < rows && row + r < OUT) {
      const float gated = silu(whole_sum<1, 1, W>(partial, n, r));
      h[ulong(first + n) * OUT + row + r] = T(gated * whole_sum<1, 1, W>(ups, n, r));
    }
  }
}

// out[pair] = down h[position].
template <int MT, int W, int IN, int OUT, int BITS, int GROUP, int V, typename T, typename Q,
          typename S>
inline void expert_rows_outer(
    const device T* h,
    const device uint* order,
    const device uint* offsets,
    const device uint* tiles,
    const device Q* down,
    const device S* scales,
    const device S* biases,
    device T* out,
    threadgroup float* partial,
    int row,
    uint tile,
    uint index) {
  const uint slot = tiles[2 * tile];
  if (slot == 0xffffffffu) {
    return;
  }
  const uint first = tiles[2 * tile + 1];
  const int rows = metal::min(int(offsets[slot + 1] - first), 8);
  multiply_tile<MT, 1, W, IN, BITS, GROUP, V, PLAIN, false>(
      partial, h, h, down + ulong(slot) * OUT * (IN / per_word<BITS>()),
      scales + ulong(slot) * OUT * (IN / GROUP), biases + ulong(slot) * OUT * (IN / GROUP), row,
      OUT - 1, first, first + rows, nullptr, index / 32, index % 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = index; p < 128 * MT; p += 32 * W) {
    const int n = p / (16 * MT), r = p % (16 * MT);
    if (n < rows && row + r < OUT) {
      out[ulong(order[first + n]) * OUT + row + r] = T(whole_sum<MT, 1, W>(partial, n, r));
    }
  }
}
