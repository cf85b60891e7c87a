// Blocks [sequences, H, R, D], whose rows from `at` (mod R) on are ROWS others [sequences, ROWS, H, D]:
// N neighbours for each thread.
template <typename T, int H, int R, int D, int ROWS, int N>
inline void with_rows(
    const device T* block, const device T* rows, const device int* at, device T* y, uint index) {
  const uint place = index * N, head = place / (R * D), inside = place % (R * D);
  const int which = (int(inside / D) + R - at[0] % R) % R;
  const uint row = (head / H * ROWS + which) * H + head % H;
  store_pack(
      y + place, load_pack<N>(which < ROWS ? rows + row * D + inside % D : block + place));
}
