// Blocks [heads, R, D] with the row `at` (mod R) of each head replaced by row [heads, D]: N
// neighbours for each thread.
template <typename T, int R, int D, int N>
inline void with_row(
    const device T* block, const device T* row, const device int* at, device T* y, uint index) {
  const uint place = index * N, head = place / (R * D), inside = place % (R * D);
  const bool own = int(inside / D) == at[0] % R;
  store_pack(y + place, load_pack<N>(own ? row + head * D + inside % D : block + place));
}
