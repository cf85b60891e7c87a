// Latent attention around its two sums: what comes of the projections, and products of rows with
// one matrix for each head.
#include "quantised.metal"

// Rows [D] turned, which lie `from` and then `to` apart: pair i by position * frequencies[i], and
// scaled by `factor`.
template <typename T, int D, bool INTERLEAVED, typename P>
inline void turned_rows(
    P x, const device float* frequencies, float factor, int position, device T* y, uint lane,
    int rows, int from, size_t to) {
  for (int i = int(lane); i < D / 2; i += 32) {
    const int first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + 1 : i + D / 2;
    const float angle = float(position) * frequencies[i];
    const float cosine = factor * metal::precise::cos(angle);
    const float sine = factor * metal::precise::sin(angle);
    for (int r = 0; r < rows; ++r) {
      const float a = float(x[r * from + first]), b = float(x[r * from + second]);
      y[r * to + first] = T(a * cosine - b * sine);
      y[r * to + second] = T(b * cosine + a * sine);
    }
  }
}

// Row own [R] -> latent [R], normed.
template <typename T, int R, typename W>
inline void latent_row(
    const device T* own, const device W* weight, float eps, device T* latent, uint lane) {
  const int N = R % 4 ? 1 : 4, PACKS = (R + 32 * N - 1) / (32 * N);
  pack<T, N> in[PACKS];
  pack<W, N> weights[PACKS];
  float squares = 0.0f;
  #pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int at = N * (int(lane) + 32 * i);
    if (at < R) {
      in[i] = load_pack<N>(own + at);
      weights[i] = load_pack<N>(weight + at);
    }
  }
  #pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (N * (int(lane) + 32 * i) < R) {
      for (int c = 0; c < N; ++c) {
        squares = metal::fma(float(in[i].at[c]), float(in[i].at[c]), squares);
      }
    }
  }
  const float inverse = metal::precise::rsqrt(simd_sum(squares) / float(R) + eps);
  #pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int at = N * (int(lane) + 32 * i);
    if (at < R) {
      pack<T, N> out;
      for (int c = 0; c < N; ++c) {
        out.at[c] = T(float(in[i].at[c]) * inverse * float(weights[i].at[c]));
      }
      store_pack(latent + at, out);
    }
  }
}

// q [B, T, H, DN + DR] -> nope [B, H, T, DN] and rotary [B, H, T, DR], turned; kv [B, T, R + DR]
// -> latents [B, T, R], normed, and keys [B, T, DR], turned. A simdgroup for EACH heads of a token,
// and one for kv. Without NOPE that stays where it is.
template <typename T, typename W, int H, int DN, int DR, int R, bool INTERLEAVED, bool NOPE,
          int EACH>
inline void latent_prepare(
    const device T* q, const device T* kv, const device W* weight, const device float* frequencies,
    const device float* numbers, const device int* offset, device T* nope, device T* rotary,
    device T* latents, device T* keys, int batch, int tokens, uint simdgroup, uint lane) {
  const int parts = (H + EACH - 1) / EACH + 1, n = int(simdgroup) / parts;
  const int h = int(simdgroup) % parts * EACH, b = n / tokens, t = n % tokens;
  if (b >= batch) {
    return;
  }
  const int position = offset[b] + t;
  if (h >= H) {
    const device T* latent = kv + size_t(n) * (R + DR);
    latent_row<T, R>(latent, weight, numbers[0], latents + size_t(n) * R, lane);
    turned_rows<T, DR, INTERLEAVED>(
        latent + R, frequencies, numbers[1], position, keys + size_t(n) * DR, lane, 1, 0, 0);
    return;
  }
  const int heads = metal::min(EACH, H - h);
  const device T* own = q + (size_t(n) * H + h) * (DN + DR);
  const size_t to = (size_t(b) * H + h) * tokens + t;
  for (int r = 0; NOPE && r < heads; ++r) {
    for (int column = 4 * int(lane); column < DN; column += 128) {
      store_pack(
          nope + (to + r * size_t(tokens)) * DN + column,
          load_pack<4>(own + r * (DN + DR) + column));
    }
  }
  turned_rows<T, DR, INTERLEAVED>(
      own + DN, frequencies, numbers[1], position, rotary + to * DR, lane, heads, DN + DR,
      size_t(tokens) * DR);
}

// y [rows, OUT] = x [rows, IN] w of the row's head: rows FIRST .. FIRST + IN - 1 of the head's
// BLOCK, each of OUT numbers as MLX stores them. Row r is of head r / tokens % H. A lane owns V
// words, N numbers of one group; the simdgroups of a threadgroup share the rows of w.
template <int H, int IN, int OUT, int FIRST, int BLOCK, int BITS, int GROUP, int V, int SIMDGROUPS,
          typename T, typename W, typename S>
inline void head_vecmat(
    const device T* x, const device W* w, const device S* scales, const device S* biases,
    device T* y, threadgroup float* sums, int tokens, uint row, uint column, uint simdgroup,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  const uint at = (column * 32 + lane) * N;
  const size_t base = size_t(int(row) / tokens % H) * BLOCK + FIRST;
  const float middle = float(1 << BITS >> 1);
  float acc[N] = {}, rest = 0.0f;
  if (at < OUT) {
    for (int n = int(simdgroup); n < IN; n += SIMDGROUPS) {
      const float value = float(x[row * IN + n]);
      const pack<W, V> words = load_pack<V>(w + (base + n) * (OUT / per) + at / per);
      float scaled = value;
      if (BITS != 0) {
        const size_t group = (base + n) * (OUT / GROUP) + at / GROUP;
        const float scale = float(scales[group]);
        rest = metal::fma(value, metal::fma(middle, scale, float(biases[group])), rest);
        scaled = value * scale;
      }
      for (int i = 0; i < N; ++i) {
        acc[i] = metal::fma(scaled, number<BITS>(words.at[i / per], i % per, middle), acc[i]);
      }
    }
  }
  for (int i = 0; i < N; ++i) {
    sums[(simdgroup * N + i) * 32 + lane] = acc[i] + rest;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(simdgroup); i < N; i += SIMDGROUPS) {
    float total = 0.0f;
    for (int s = 0; s < SIMDGROUPS; ++s) {
      total += sums[(s * N + i) * 32 + lane];
    }
    if (at < OUT) {
      y[row * OUT + at + i] = T(total);
    }
  }
}

// y [OUT] = w x, narrow rows: ROWS of them for each simdgroup.
template <int ROWS, int SIMDGROUPS, int IN, int FIRST, int OUT, int BITS, int GROUP, int V,
          bool EXACT, typename T, typename W, typename S>
inline void narrow_matvec(
    const device T* x, const device W* w, const device S* scales, const device S* biases,
    device T* y, uint group, uint simdgroup, uint lane) {
  const int per = per_word<BITS>();
  const uint row = (group * SIMDGROUPS + simdgroup) * ROWS;
  if (row >= OUT) {
    return;
  }
  slice<V, W, S> parts[narrow_steps<ROWS, IN, V * per>()];
  fetch_narrow<ROWS, IN, BITS, GROUP>(
      parts, w + ulong(FIRST + row) * (IN / per), scales + ulong(FIRST + row) * (IN / GROUP),
      biases + ulong(FIRST + row) * (IN / GROUP), lane);
  multiply_narrow<ROWS, IN, BITS, EXACT>(
      parts, x + lane % (IN / (V * per)) * (V * per), y + row, lane);
}
