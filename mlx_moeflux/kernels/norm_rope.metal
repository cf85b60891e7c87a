// Norm of each head, then rotation of its first DIMS values: a simdgroup owns one head of one
// token, a lane owns packs of P neighbours.

// Everything is read, and angles are taken, before the simdgroup meets: one wait for memory.
template <typename T, typename W, int D, int P, int DIMS, bool INTERLEAVED, bool NORM>
inline void norm_rope_row(
    const device T* x, const device W* weight, const device float* frequencies, float eps,
    const device int* offset, int t, device T* y, uint lane) {
  constexpr int N = D / 32 / P, HALF = DIMS / 2;
  pack<T, P> own[N], other[N];
  float scale[N][P], other_scale[N][P], angle[N][P];
  for (int j = 0; j < N; ++j) {
    const int column = P * (int(lane) + 32 * j);
    const bool turns = column < DIMS, second = column >= HALF;
    const int at = INTERLEAVED || !turns ? column : second ? column - HALF : column + HALF;
    own[j] = load_pack<P>(x + column);
    other[j] = load_pack<P>(x + at);
    for (int e = 0; e < P; ++e) {
      const int partner = INTERLEAVED ? e ^ 1 : e;
      scale[j][e] = NORM ? float(weight[column + e]) : 1.0f;
      other_scale[j][e] = NORM ? float(weight[at + partner]) : 1.0f;
      const int pair = INTERLEAVED ? (column + e) / 2 : metal::min(column, at) + e;
      angle[j][e] = turns ? frequencies[pair] : 0.0f;
    }
  }
  const float position = float(offset[0] + t);
  float squares = 0.0f;
  for (int j = 0; j < N; ++j) {
    for (int e = 0; e < P; ++e) {
      squares += float(own[j].at[e]) * float(own[j].at[e]);
    }
  }
  const float inverse = NORM ? metal::precise::rsqrt(simd_sum(squares) / float(D) + eps) : 1.0f;
  for (int j = 0; j < N; ++j) {
    const int column = P * (int(lane) + 32 * j);
    pack<T, P> out;
    for (int e = 0; e < P; ++e) {
      float value = float(own[j].at[e]) * inverse * scale[j][e];
      if (column < DIMS) {
        const float partner = float(other[j].at[INTERLEAVED ? e ^ 1 : e]) * inverse;
        const float turned =
            partner * other_scale[j][e] * metal::precise::sin(position * angle[j][e]);
        const bool later = INTERLEAVED ? (e & 1) != 0 : column >= HALF;
        value = value * metal::precise::cos(position * angle[j][e]) + (later ? turned : -turned);
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
  if (h < HQ) {
    norm_rope_row<T, WQ, D, P, DIMS, INTERLEAVED, NORMQ>(
        q + (size_t(n) * HQ + h) * LQ, q_weight, frequencies, eps[0], offset + b, t,
        q_out + ((size_t(b) * HQ + h) * tokens + t) * D, lane);
  } else if (h < HQ + HK) {
    h -= HQ;
    norm_rope_row<T, WK, D, P, DIMS, INTERLEAVED, NORMK>(
        k + (size_t(n) * HK + h) * D, k_weight, frequencies, eps[0], offset + b, t,
        k_out + ((size_t(b) * HK + h) * tokens + t) * D, lane);
  } else {
    h -= HQ + HK;
    copy_row<T, DV, PV>(
        v + (size_t(n) * HV + h) * DV, v_out + ((size_t(b) * HV + h) * tokens + t) * DV, lane);
  }
}
