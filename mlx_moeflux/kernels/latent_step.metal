// Latent attention of one token a sequence, between its projections and its two sums: each part as
// the launches that it replaces have it, number by number.
#include "matvec.metal"
#include "heads.metal"

// The rows of a tail [TAIL, D] but the one at `own`: N neighbours for each thread.
template <int TAIL, int D, int N, typename T>
inline void other_rows(const device T* from, device T* to, int own, uint index) {
  if (index < TAIL * D / N && int(index * N / D) != own) {
    store_pack(to + index * N, load_pack<N>(from + index * N));
  }
}

// One head of one sequence: its queries, DN + DR rows of v times norm(low [L]), never leave the chip.
// nope goes through w, rows [RANK, DN], into q_latent; rotary is returned, as floats. Each sum is that
// of rows_of or of narrow_matvec. PARTS simdgroups share the columns of v, and as many times PARTS of
// them as there are have OWN of its rows each, M at a time; all have ROWS rows of w.
template <int ROWS, int DN, int DR, int RANK, int BITS, int GROUP, int V, int OWN, int M, int PARTS,
          int L, int LOW_BITS, int LOW_GROUP, int LOW_V, bool EXACT, typename T, typename U,
          typename X, typename Y, typename W, typename S>
inline const threadgroup float* step_of_head(
    const device T* low, const device U* norm_weight, float epsilon, const device X* v,
    const device Y* v_scales, const device Y* v_biases, const device W* w, const device S* scales,
    const device S* biases, device T* q_latent, threadgroup float* values,
    threadgroup float* squares, threadgroup float* partial, uint simdgroup, uint lane) {
  const int per = per_word<BITS>(), N = V * per, LOW_N = LOW_V * per_word<LOW_BITS>();
  const uint index = simdgroup * 32 + lane, part = simdgroup % PARTS, row = simdgroup * ROWS;
  const uint first = simdgroup / PARTS * OWN;
  columns<share<L, LOW_N, PARTS>(), LOW_N> own;
  const float square =
      take_columns<PARTS, L, LOW_BITS, EXACT, NORM>(own, low, norm_weight, part, lane);
  part_of_rows<OWN, M, M, PARTS, PARTS, L, LOW_BITS, LOW_GROUP, LOW_V, EXACT>(
      partial + first * PARTS + part, own, v + first * (L / per_word<LOW_BITS>()),
      v_scales + first * (L / LOW_GROUP), v_biases + first * (L / LOW_GROUP), lane);
  // On their way while everybody meets.
  slice<V, W, S> rows[narrow_steps<ROWS, DN, N>()];
  if (row < RANK) {
    fetch_narrow<ROWS, DN, BITS, GROUP>(
        rows, w + row * (DN / per), scales + row * (DN / GROUP), biases + row * (DN / GROUP), lane);
  }
  const float inverse = inverse_norm<PARTS, L>(square, squares, epsilon, simdgroup, lane);
  if (index < DN + DR) {
    float total = 0.0f;
    for (int i = 0; i < PARTS; ++i) {
      total += partial[index * PARTS + i];
    }
    // 4 further behind each N, so that lanes read from different banks.
    values[index + metal::min(index, uint(DN - 1)) / N * 4] = float(T(total * inverse));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row < RANK) {
    multiply_narrow<ROWS, DN, BITS, EXACT>(
        rows, (const threadgroup float*)values + lane % (DN / N) * (N + 4), q_latent + row, lane);
  }
  return values + DN + (DN / N - 1) * 4;
}

// What is not of a head: the tail [TAIL, RANK + DR] with the latent of kv at `own`; its key is
// returned, as floats. Threadgroups share the copying, N neighbours for each thread at a time.
template <int THREADS, int OTHERS, int TAIL, int RANK, int DR, int N, typename T, typename U>
inline const threadgroup float* step_of_tail(
    const device T* kv, const device U* weight, float epsilon, const device T* latents,
    const device T* keys, device T* new_latents, device T* new_keys, threadgroup float* values,
    int own, uint group, uint simdgroup, uint lane) {
  const uint index = simdgroup * 32 + lane, packs = TAIL * (RANK > DR ? RANK : DR) / N;
  for (uint i = group * THREADS + index; i < packs; i += OTHERS * THREADS) {
    other_rows<TAIL, RANK, N>(latents, new_latents, own, i);
    other_rows<TAIL, DR, N>(keys, new_keys, own, i);
  }
  if (group == 0 && simdgroup == 0) {
    latent_row<T, RANK>(kv, weight, epsilon, new_latents + own * RANK, lane);
  }
  for (uint i = index; i < DR; i += THREADS) {
    values[i] = float(kv[RANK + i]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return values;
}
