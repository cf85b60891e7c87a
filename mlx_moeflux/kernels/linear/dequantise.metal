#include "blocks.metal"

// A matrix [out, in] of affine numbers as floats. A lane takes V words, THREADS apart, so that
// neighbours read and write neighbours; all are asked for before the first is used.
template <int BITS, int GROUP, int V, int THREADS, typename T, typename W, typename S>
inline void dequantise(
    const device W* w,
    const device S* scales,
    const device S* biases,
    device T* y,
    uint words,
    uint group,
    uint index) {
  const int per = per_word<BITS>(), N = per * int(sizeof(T)) > 16 ? 16 / int(sizeof(T)) : per;
  const uint first = group * (V * THREADS) + index;
  W word[V];
  S scale[V], bias[V];
  for (int i = 0; i < V; ++i) {
    const uint at = metal::min(first + i * THREADS, words - 1);
    word[i] = w[at];
    scale[i] = scales[at / (GROUP / per)];
    bias[i] = biases[at / (GROUP / per)];
  }
  for (int i = 0; i < V; ++i) {
    const uint at = first + i * THREADS;
    for (int from = 0; from < per && at < words; from += N) {
      pack<T, N> values;
      for (int j = 0; j < N; ++j) {
        const float q = number<BITS>(word[i], from + j, 0.0f);
        values.at[j] = T(metal::fma(float(scale[i]), q, float(bias[i])));
      }
      store_pack(y + ulong(at) * per + from, values);
    }
  }
}

// The at-th eight neighbours of blocks.
template <typename E, typename T>
inline void dequantise_eight(const device uchar* w, device T* y, uint at) {
  const uint from = at * 8ul % E::ELEMENTS;
  E eight;
  eight.fetch(w + at / (E::ELEMENTS / 8) * ulong(E::BYTES), from);
  const float scale = eight.scale(from), added = eight.added(from);
  const bool ADDS = E::ADDS;
  const int N = 16 / sizeof(T);
  for (int i = 0; i < 8; i += N) {
    pack<T, N> values;
    for (int j = 0; j < N; ++j) {
      // Where something is added the product is exact.
      const float q = number<8>(eight.word((i + j) / 4, from), (i + j) % 4, float(E::ZERO));
      values.at[j] = T(ADDS ? metal::fma(scale, q, added) : scale * q);
    }
    store_pack(y + at * 8ul + i, values);
  }
}
