// Latent attention around its two sums: what comes of the projections, and products of rows with
// one matrix for each head.

// Row [D] turned: pair i by position * frequencies[i], and scaled by `factor`.
template <typename T, int D, bool INTERLEAVED>
inline void turned_row(
    const device T* x, const device float* frequencies, float factor, int position, device T* y,
    uint lane) {
  for (int i = int(lane); i < D / 2; i += 32) {
    const int first = INTERLEAVED ? 2 * i : i, second = INTERLEAVED ? 2 * i + 1 : i + D / 2;
    const float angle = float(position) * frequencies[i];
    const float cosine = factor * metal::precise::cos(angle);
    const float sine = factor * metal::precise::sin(angle);
    const float a = float(x[first]), b = float(x[second]);
    y[first] = T(a * cosine - b * sine);
    y[second] = T(b * cosine + a * sine);
  }
}

// q [B, T, H, DN + DR] -> nope [B, H, T, DN] and rotary [B, H, T, DR], turned; kv [B, T, R + DR]
// -> latents [B, T, R], normed, and keys [B, T, DR], turned. A simdgroup for each head of each
// token, and one for kv.
template <typename T, typename W, int H, int DN, int DR, int R, bool INTERLEAVED>
inline void latent_prepare(
    const device T* q, const device T* kv, const device W* weight, const device float* frequencies,
    const device float* numbers, const device int* offset, device T* nope, device T* rotary,
    device T* latents, device T* keys, int batch, int tokens, uint row, uint lane) {
  const int n = int(row) / (H + 1), h = int(row) % (H + 1), b = n / tokens, t = n % tokens;
  if (b >= batch) {
    return;
  }
  const int position = offset[b] + t;
  const float eps = numbers[0], factor = numbers[1];
  if (h < H) {
    const device T* own = q + (size_t(n) * H + h) * (DN + DR);
    const size_t to = (size_t(b) * H + h) * tokens + t;
    for (int column = 4 * int(lane); column < DN; column += 128) {
      store_pack(nope + to * DN + column, load_pack<4>(own + column));
    }
    turned_row<T, DR, INTERLEAVED>(
        own + DN, frequencies, factor, position, rotary + to * DR, lane);
    return;
  }
  const device T* own = kv + size_t(n) * (R + DR);
  float squares = 0.0f;
  for (int i = int(lane); i < R; i += 32) {
    squares = metal::fma(float(own[i]), float(own[i]), squares);
  }
  const float inverse = metal::precise::rsqrt(simd_sum(squares) / float(R) + eps);
  for (int i = int(lane); i < R; i += 32) {
    latents[size_t(n) * R + i] = T(float(own[i]) * inverse * float(weight[i]));
  }
  turned_row<T, DR, INTERLEAVED>(
      own + R, frequencies, factor, position, keys + size_t(n) * DR, lane);
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
