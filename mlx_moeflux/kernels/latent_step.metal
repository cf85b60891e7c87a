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

// OUT rows of w times norm(x) as rows_of has them, rounded to T. PARTS simdgroups share the columns,
// and as many times PARTS of them as there are have ROWS rows each, M at a time. Row n is in values
// at n, and 4 further for each EVERY of the first NARROW, which so lie on different banks; everybody
// has to meet before they are read.
template <int ROWS, int M, int PARTS, int IN, int OUT, int BITS, int GROUP, int V, bool EXACT,
          int NARROW, int EVERY, typename T, typename U, typename W, typename S>
inline void rows_on_chip(
    const device T* x, const device U* norm_weight, float epsilon, const device W* w,
    const device S* scales, const device S* biases, threadgroup float* values,
    threadgroup float* squares, threadgroup float* partial, uint simdgroup, uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const uint row = simdgroup / PARTS * ROWS, part = simdgroup % PARTS;
  columns<share<IN, N, PARTS>(), N> own;
  const float square = take_columns<PARTS, IN, BITS, EXACT, NORM>(own, x, norm_weight, part, lane);
  part_of_rows<ROWS, M, M, PARTS, PARTS, IN, BITS, GROUP, V, EXACT>(
      partial + row * PARTS + part, own, w + row * (IN / per), scales + row * (IN / GROUP),
      biases + row * (IN / GROUP), lane);
  const float inverse = inverse_norm<PARTS, IN>(square, squares, epsilon, simdgroup, lane);
  const uint index = simdgroup * 32 + lane;
  if (index < OUT) {
    float total = 0.0f;
    for (int i = 0; i < PARTS; ++i) {
      total += partial[index * PARTS + i];
    }
    values[index + metal::min(index, uint(NARROW - 1)) / EVERY * 4] = float(T(total * inverse));
  }
}

// One head of one sequence: its queries, DN + DR rows of v times norm(low [L]), never leave the chip.
// nope goes through w, rows [RANK, DN], into q_latent; rotary is returned, as floats.
template <int ROWS, int DN, int DR, int RANK, int BITS, int GROUP, int V, int OWN, int M, int PARTS,
          int L, int LOW_BITS, int LOW_GROUP, int LOW_V, bool EXACT, typename T, typename U,
          typename X, typename Y, typename W, typename S>
inline const threadgroup float* step_of_head(
    const device T* low, const device U* norm_weight, float epsilon, const device X* v,
    const device Y* v_scales, const device Y* v_biases, const device W* w, const device S* scales,
    const device S* biases, device T* q_latent, threadgroup float* values,
    threadgroup float* squares, threadgroup float* partial, uint simdgroup, uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const uint row = simdgroup * ROWS;
  slice<V, W, S> own[narrow_steps<ROWS, DN, N>()];
  if (row < RANK) {
    fetch_narrow<ROWS, DN, BITS, GROUP>(
        own, w + row * (DN / per), scales + row * (DN / GROUP), biases + row * (DN / GROUP), lane);
  }
  rows_on_chip<OWN, M, PARTS, L, DN + DR, LOW_BITS, LOW_GROUP, LOW_V, EXACT, DN, N>(
      low, norm_weight, epsilon, v, v_scales, v_biases, values, squares, partial, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (row < RANK) {
    multiply_narrow<ROWS, DN, BITS, EXACT>(
        own, (const threadgroup float*)values + lane % (DN / N) * (N + 4), q_latent + row, lane);
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
