// Latent attention of one token a sequence, between its projections and its two sums: each part as
// the launches that it replaces have it, number by number.
#include "per_head_matmul.metal"

// The rows of a tail [TAIL, D] but the one at `own`: N neighbours for each thread.
template <int TAIL, int D, int N, typename T>
inline void other_rows(const device T* from, device T* to, int own, uint index) {
  if (index < TAIL * D / N && int(index * N / D) != own) {
    store_pack(to + index * N, load_pack<N>(from + index * N));
  }
}
