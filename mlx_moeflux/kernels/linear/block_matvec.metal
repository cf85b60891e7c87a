// As matvec.metal, of matrices some of which are in ggml's blocks. Their simdgroups read all of x by
// themselves, so that none waits for another.
#include "matvec.metal"
#include "block_rows.metal"

// Rows of w form(x), of the OUT rows of w from BASE on: each simdgroup has ROWS of its own. Returns
// true to lanes that get the total of one.
template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, bool EXACT, int FORM, typename E,
          typename T, typename U>
inline bool block_row(
    thread float& total,
    thread uint& row,
    const device T* x,
    const device U* other,
    float epsilon,
    const device uchar* w,
    uint group,
    uint simdgroup,
    uint lane) {
  using B = block_lanes<ROWS, IN, E>;
  const int LANES = B::LANES, OWN = B::OWN;
  const uint own = (group * SIMDGROUPS + simdgroup) * ROWS;
  const uint first = metal::min(own, uint(OUT - ROWS));  // the last repeat others' rows
  float squares;
  total = block_totals<ROWS, IN, FORM, EXACT, E>(
      x, other, w + ulong(BASE + first) * int(B::ROW), squares, row, lane);
  row += first;
  if (FORM == NORM) {
    total *= metal::precise::rsqrt(squares / float(IN) + epsilon);
  }
  return own < uint(OUT) && lane % LANES < OWN;
}

// How a matrix is stored, and what norm_matvec does of it.
template <typename E>
struct in_blocks {
  template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
            int SPLIT, bool EXACT, int FORM, bool RESIDUAL, typename T, typename U, typename Y>
  static inline void multiply(
      const device T* x,
      const device U* norm_weight,
      float epsilon,
      const device T* residual,
      const device uchar* w,
      const device uchar*,
      const device uchar*,
      device Y* y,
      threadgroup float*,
      uint stride,
      uint token,
      uint group,
      uint simdgroup,
      uint lane) {
    float total;
    uint row;
    if (block_row<ROWS, SIMDGROUPS, IN, BASE, OUT, EXACT, FORM, E>(
            total, row, x + token * IN, norm_weight, epsilon, w, group, simdgroup, lane)) {
      const uint at = token * stride + row;
      y[at] = Y(RESIDUAL ? float(residual[at]) + total : total);
    }
  }
};
struct in_words {
  template <int ROWS, int SIMDGROUPS, int IN, int BASE, int OUT, int BITS, int GROUP, int V,
            int SPLIT, bool EXACT, int FORM, bool RESIDUAL, typename T, typename U, typename W,
            typename S, typename Y>
  static inline void multiply(
      const device T* x,
      const device U* norm_weight,
      float epsilon,
      const device T* residual,
      const device W* w,
      const device S* scales,
      const device S* biases,
      device Y* y,
      threadgroup float* memory,
      uint stride,
      uint token,
      uint group,
      uint simdgroup,
      uint lane) {
    norm_matvec<1, ROWS, SIMDGROUPS, IN, BASE, OUT, BITS, GROUP, V, SPLIT, EXACT, FORM, RESIDUAL>(
        x, norm_weight, epsilon, residual, w, scales, biases, y, memory, stride, token, group,
        simdgroup, lane);
  }
};

// As add_shared.
template <int ROWS, int SIMDGROUPS, int IN, int OUT, bool EXACT, bool ROUTED, bool SCORED, typename E,
          typename T>
inline void add_shared_blocks(
    const device T* residual,
    const device float* experts,
    const device T* gate,
    const device T* up,
    const device T* score,
    const device uchar* w,
    device T* y,
    uint token,
    uint group,
    uint simdgroup,
    uint lane) {
  float total;
  uint row;
  if (block_row<ROWS, SIMDGROUPS, IN, 0, OUT, EXACT, SWIGLU, E>(
          total, row, gate + token * IN, up + token * IN, 0.0f, w, group, simdgroup, lane)) {
    const uint at = token * OUT + row;
    const float factor = SCORED ? sigmoid(float(score[token])) : 1.0f;
    y[at] = T(float(residual[at]) + (ROUTED ? experts[at] : 0.0f) + factor * total);
  }
}
