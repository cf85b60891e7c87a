// Norm of each head, then rotation of its first DIMS values: a simdgroup owns one head of one
// token, a lane owns packs of P neighbours.

template <typename T, typename W, int D, int P, int DIMS, bool INTERLEAVED, bool NORM>
inline void norm_rope_row(
    const device T* x, const device W* weight, const device float* frequencies, float eps,
    int position, device T* y, uint lane) {
  constexpr int N = D / 32 / P, HALF = DIMS / 2;
  float inverse = 1.0f;
  if (NORM) {
    float squares = 0.0f;
    for (int j = 0; j < N; ++j) {
      const pack<T, P> own = load_pack<P>(x + P * (int(lane) + 32 * j));
      for (int e = 0; e < P; ++e) {
        squares += float(own.at[e]) * float(own.at[e]);
      }
    }
    inverse = metal::precise::rsqrt(simd_sum(squares) / float(D) + eps);
  }
  for (int j = 0; j < N; ++j) {
    const int column = P * (int(lane) + 32 * j);
    const bool second = column >= HALF;
    const bool alone = INTERLEAVED || column >= DIMS;
    const int other = alone ? column : second ? column - HALF : column + HALF;
    const pack<T, P> own = load_pack<P>(x + column), partner = load_pack<P>(x + other);
    pack<T, P> out;
    for (int e = 0; e < P; ++e) {
      const int at = INTERLEAVED ? e ^ 1 : e;
      const float a = float(own.at[e]) * inverse * (NORM ? float(weight[column + e]) : 1.0f);
      float value = a;
      if (column < DIMS) {
        const float b = float(partner.at[at]) * inverse * (NORM ? float(weight[other + at]) : 1.0f);
        const int pair = INTERLEAVED ? (column + e) / 2 : metal::min(column, other) + e;
        const float angle = float(position) * frequencies[pair];
        const float turned = b * metal::precise::sin(angle);
        const bool later = INTERLEAVED ? (e & 1) != 0 : second;
        value = a * metal::precise::cos(angle) + (later ? turned : -turned);
      }
      out.at[e] = T(value);
    }
    store_pack(y + column, out);
  }
}

template <typename T, int D, int P>
inline void copy_row(const device T* x, device T* y, uint lane) {
  for (int column = P * int(lane); column < D; column += 32 * P) {
    store_pack(y + column, load_pack<P>(x + column));
  }
}

// q [B, T, HQ, LQ >= D], k [B, T, HK, D], v [B, T, HV, DV] -> the same with heads before tokens.
template <typename T, typename WQ, typename WK, int HQ, int HK, int HV, int D, int LQ, int DV,
          int P, int PV, int DIMS, bool INTERLEAVED, bool NORMQ, bool NORMK>
inline void norm_rope(
    const device T* q, const device T* k, const device T* v, const device WQ* q_weight,
    const device WK* k_weight, const device float* frequencies, const device float* eps,
    const device int* offset, device T* q_out, device T* k_out, device T* v_out, int batch,
    int tokens, uint row, uint lane) {
  constexpr int H = HQ + HK + HV;
  const int n = int(row) / H, b = n / tokens, t = n % tokens;
  int h = int(row) % H;
  if (b >= batch) {
    return;
  }
  const int position = offset[b] + t;
  if (h < HQ) {
    norm_rope_row<T, WQ, D, P, DIMS, INTERLEAVED, NORMQ>(
        q + (size_t(n) * HQ + h) * LQ, q_weight, frequencies, eps[0], position,
        q_out + ((size_t(b) * HQ + h) * tokens + t) * D, lane);
  } else if (h < HQ + HK) {
    h -= HQ;
    norm_rope_row<T, WK, D, P, DIMS, INTERLEAVED, NORMK>(
        k + (size_t(n) * HK + h) * D, k_weight, frequencies, eps[0], position,
        k_out + ((size_t(b) * HK + h) * tokens + t) * D, lane);
  } else {
    h -= HQ + HK;
    copy_row<T, DV, PV>(
        v + (size_t(n) * HV + h) * DV, v_out + ((size_t(b) * HV + h) * tokens + t) * DV, lane);
  }
}
