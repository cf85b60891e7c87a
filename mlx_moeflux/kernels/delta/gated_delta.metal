// The gated delta rule. The formula and the shapes are in gated_delta.py; launches in
// gated_delta_fused.py.

// ---- Token by token
//
// Eight lanes hold a row of the state, four neighbours of every 32 columns each; a simdgroup
// holds four rows. The next token is read while one is computed.

inline float eight_lanes_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  x += simd_shuffle_xor(x, 2);
  return x + simd_shuffle_xor(x, 4);
}

template <typename T, int Dk>
struct delta_token {
  pack<T, 4> q[Dk / 32], k[Dk / 32];
  float v, decay, beta;
};

template <typename T, int Dk>
inline void read_token(
    thread delta_token<T, Dk>& token, const device T* q, const device T* k, const device T* v,
    const device float* log_decay, const device float* beta) {
#pragma unroll
  for (int j = 0; j < Dk / 32; ++j) {
    token.q[j] = load_pack<4>(q + 32 * j);
    token.k[j] = load_pack<4>(k + 32 * j);
  }
  token.v = float(*v);
  token.decay = *log_decay;
  token.beta = *beta;
}

// position: (lane, four rows, sequence and value head). mask is read where Masked.
template <typename T, int Hk, int Hv, int Dk, int Dv, bool Masked, typename M>
inline void gated_delta_recurrent(
    const device T* q, const device T* k, const device T* v, const device float* log_decay,
    const device float* beta, const device float* state, const device M* mask, device T* y,
    device float* new_state, int tokens, uint3 position, uint lane) {
  constexpr int N = Dk / 32;
  const int b = position.z / Hv, h = position.z % Hv;
  const int row = 4 * position.y + (lane >> 3), col = 4 * (lane & 7);
  const long first = (long)b * tokens;
  q += (first * Hk + h / (Hv / Hk)) * Dk + col;
  k += (first * Hk + h / (Hv / Hk)) * Dk + col;
  v += (first * Hv + h) * Dv + row;
  y += (first * Hv + h) * Dv + row;
  log_decay += first * Hv + h;
  beta += first * Hv + h;
  const long at = ((long)position.z * Dv + row) * Dk + col;
  pack<float, 4> s[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    s[j] = load_pack<4>(state + at + 32 * j);
  }
  delta_token<T, Dk> token, next;
  read_token(token, q, k, v, log_decay, beta);
  for (int t = 0; t < tokens; ++t) {
    const int step = t + 1 < tokens ? t + 1 : t;
    read_token(
        next, q + (long)step * Hk * Dk, k + (long)step * Hk * Dk, v + (long)step * Hv * Dv,
        log_decay + (long)step * Hv, beta + (long)step * Hv);
    float decay = metal::precise::exp(token.decay), rate = token.beta;
    if (Masked && !is_set(mask[first + t])) {
      decay = 1.0f;
      rate = 0.0f;
    }
    float recalled[4] = {0.0f, 0.0f, 0.0f, 0.0f}, out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[j].at[i] *= decay;
        recalled[i] += s[j].at[i] * float(token.k[j].at[i]);
      }
    }
    const float delta =
        (token.v - eight_lanes_sum((recalled[0] + recalled[1]) + (recalled[2] + recalled[3]))) *
        rate;
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[j].at[i] += delta * float(token.k[j].at[i]);
        out[i] += s[j].at[i] * float(token.q[j].at[i]);
      }
    }
    const float total = eight_lanes_sum((out[0] + out[1]) + (out[2] + out[3]));
    if ((lane & 7) == 0) {
      y[(long)t * Hv * Dv] = T(total);
    }
    token = next;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    store_pack(new_state + at + 32 * j, s[j]);
  }
}
