// Attention of one token over parts of the keys, joined as attend_combine does it, and each head's
// result through its matrix as head_narrow does it, number by number.
#include "quantised.metal"
#include "attention.metal"

// y [HEADS, OUT] = w_h x[h], x [HEADS, DV] being the joined parts: a threadgroup for each head, ROWS
// rows of w for each simdgroup. shared: 8 (DV + 1) floats; values: DV, and 4 behind each N, so that
// lanes read from different banks.
template <int ROWS, int SIMDGROUPS, int HEADS, int DV, int OUT, int FIRST, int BLOCK, int PACKS,
          int BITS, int GROUP, int V, bool EXACT, typename T, typename W, typename S>
inline void attend_values(
    const device float* partial, const device float* stats, const device W* w,
    const device S* scales, const device S* biases, device T* y, threadgroup float* shared,
    threadgroup float* values, int parts, uint head, uint sequence, uint simdgroup, uint lane) {
  const int per = per_word<BITS>(), N = V * per, THREADS = 32 * SIMDGROUPS;
  const int index = int(simdgroup * 32 + lane);
  const size_t base = size_t(sequence) * parts * HEADS + head;
  const uint row = simdgroup * ROWS;
  const ulong block = ulong(head) * BLOCK + FIRST + row;
  w += ulong(head) * BLOCK * PACKS + ulong(FIRST + row) * (DV / per);
  scales += block * (DV / GROUP);
  biases += block * (DV / GROUP);
  slice<V, W, S> own[narrow_steps<ROWS, DV, N>()];
  fetch_narrow<ROWS, DV, BITS, GROUP>(own, w, scales, biases, lane);

  // A task: an eighth of the parts, and twice four columns. Five parts at once: 33 fill a GPU. DV is a
  // multiple of 32, so that whole simdgroups have tasks.
  const int EIGHTH = DV / 8;
  for (int task = index; task < 8 * EIGHTH; task += THREADS) {
    const int first = task / EIGHTH, column = task % EIGHTH * 4;
    some_parts<5, 4, 2> some;
    fetch_parts<DV>(some, partial, stats, base, parts, HEADS, first, column);
    const float highest = highest_top(stats, base, parts, HEADS, int(lane));
    float value[8] = {};
    const float total = add_parts<DV>(
        value, some, partial, stats, highest, base, parts, HEADS, first, column);
    EACH(p, 2) {
      store_pack(
          shared + first * DV + p * (DV / 2) + column,
          pack<float, 4>{value[4 * p], value[4 * p + 1], value[4 * p + 2], value[4 * p + 3]});
    }
    if (column == 0) {
      shared[8 * DV + first] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int column = index; column < DV; column += THREADS) {
    float sum = 0.0f, total = 0.0f;
    EACH(i, 8) {
      sum += shared[i * DV + column];
      total += shared[8 * DV + i];
    }
    values[column + column / N * 4] = float(T(total > 0.0f ? sum / total : 0.0f));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  multiply_narrow<ROWS, DV, BITS, EXACT>(
      own, (const threadgroup float*)values + lane % (DV / N) * (N + 4),
      y + (size_t(sequence) * HEADS + head) * OUT + row, lane);
}
