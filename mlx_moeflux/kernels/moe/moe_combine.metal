// The end of a layer: one threadgroup a row of C values, four neighbours a thread at a time.

// y = residual + experts + gate shared.
// THREADS: of the threadgroup. SHARED: 0 none, 1 as it is, 2 gated by sigmoid(score).
template <typename T, int C, int SHARED, int THREADS>
inline void moe_combine(
    const device T* residual, const device float* experts, const device T* shared,
    const device T* score, device T* y, uint row, uint index) {
  constexpr int PACKS = (C / 4 + THREADS - 1) / THREADS;
  const device T* own = residual + size_t(row) * C;
  const device float* routed = experts + size_t(row) * C;
  const device T* always = shared + (SHARED ? size_t(row) * C : 0);
  const float gate = SHARED == 2 ? sigmoid(float(score[SHARED == 2 ? row : 0])) : 1.0f;
  for (int i = 0; i < PACKS; ++i) {
    const int at = 4 * (int(index) + THREADS * i);
    if (at < C) {
      const pack<T, 4> a = load_pack<4>(own + at);
      const pack<float, 4> b = load_pack<4>(routed + at);
      pack<T, 4> c, out;
      if (SHARED) {
        c = load_pack<4>(always + at);
      }
      for (int j = 0; j < 4; ++j) {
        float sum = float(a.at[j]) + b.at[j];
        if (SHARED) {
          sum += gate * float(c.at[j]);
        }
        out.at[j] = T(sum);
      }
      store_pack(y + size_t(row) * C + at, out);
    }
  }
}
