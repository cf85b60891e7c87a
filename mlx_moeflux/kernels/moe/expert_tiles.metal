// Many tokens: pairs are listed by slot, and each slot's pairs are multiplied in tiles.
// A pair is token * K + rank. No slot has the number slots[pair]: no expert, it is in no list.
#include "blocks.metal"

// order[offsets[s]] ...: the pairs of slot s, ascending. One threadgroup for each slot, and one
// more for the end of the last list. Every one looks at all pairs: no order of arrival, no atomics.
template <int SIMDGROUPS>
inline void list_pairs(
    const device uint* slots,
    device uint* order,
    device uint* offsets,
    uint pairs,
    uint slot,
    threadgroup uint* counts,
    uint simdgroup,
    uint lane) {
  const uint span = (pairs + 32 * SIMDGROUPS - 1) / (32 * SIMDGROUPS) * 32;
  const uint first = metal::min(simdgroup * span, pairs), last = metal::min(first + span, pairs);
  uint lower = 0, equal = 0;
  for (uint i = first + lane; i < last; i += 32) {
    uint s = slots[i];
    lower += s < slot ? 1 : 0;
    equal += s == slot ? 1 : 0;
  }
  lower = simd_sum(lower);
  equal = simd_sum(equal);
  if (lane == 0) {
    counts[simdgroup] = equal;
    counts[SIMDGROUPS + simdgroup] = lower;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint at = 0;
  for (uint i = 0; i < SIMDGROUPS; ++i) {
    at += counts[SIMDGROUPS + i];
  }
  if (simdgroup == 0 && lane == 0) {
    offsets[slot] = at;
  }
  for (uint i = 0; i < simdgroup; ++i) {
    at += counts[i];
  }
  for (uint start = first; start < last; start += 32) {
    uint i = start + lane;
    uint mine = i < last && slots[metal::min(i, last - 1)] == slot ? 1 : 0;
    if (simd_any(mine != 0)) {
      uint rank = simd_prefix_inclusive_sum(mine);
      if (mine != 0) {
        order[at + rank - 1] = i;
      }
      at += simd_broadcast(rank, 31);
    }
  }
}

// tiles[i] = (slot, first position in order) of every BM positions of every list; slot
// 0xffffffff after the last. One threadgroup.
template <int BM, int SIMDGROUPS>
inline void list_tiles(
    const device uint* offsets,
    device uint* tiles,
    uint slots,
    uint limit,
    threadgroup uint* counts,
    uint index,
    uint simdgroup,
    uint lane) {
  uint done = 0;
  for (uint start = 0; start < slots; start += 32 * SIMDGROUPS) {
    const uint slot = start + index;
    uint first = 0, own = 0;
    if (slot < slots) {
      first = offsets[slot];
      own = (offsets[slot + 1] - first + BM - 1) / BM;
    }
    const uint upto = simd_prefix_inclusive_sum(own);
    if (lane == 31) {
      counts[simdgroup] = upto;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint at = done + upto - own;
    for (uint i = 0; i < SIMDGROUPS; ++i) {
      at += i < simdgroup ? counts[i] : 0;
      done += counts[i];
    }
    for (uint i = 0; i < own; ++i) {
      tiles[2 * (at + i)] = slot;
      tiles[2 * (at + i) + 1] = first + i * BM;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = done + index; i < limit; i += 32 * SIMDGROUPS) {
    tiles[2 * i] = 0xffffffffu;
    tiles[2 * i + 1] = 0;
  }
}

// A word's values as T; as tight as this is called, CUDA does better where scales are T.
template <int BITS, typename T, typename W, typename S>
inline void spread(thread T* to, W word, S scale, S bias) {
#ifdef MOEFLUX_CUDA
  if constexpr (sizeof(T) == 2 && same<T, S>::value && (BITS == 2 || BITS == 4)) {
    spread_pairs<BITS>(to, word, scale, bias);
    return;
  }
#endif
  if (are_bytes<S>()) {
    float q[8];
    tiny_numbers(q, uint(word));
    for (int i = 0; i < per_word<BITS>(); ++i) {
      to[i] = T(q[i] * of_tiny(uint(scale)));
    }
    return;
  }
  for (int i = 0; i < per_word<BITS>(); ++i) {
    float q = number<BITS>(word, i, 0.0f);
    to[i] = T(BITS == 0 ? q : metal::fma(float(scale), q, float(bias)));
  }
}

// A thread's share of a step: neighbours of a row of a matrix. fetch() reads them as they are stored,
// from column `col` of `row` on, and place() writes them as T, those past the end of a row as zeros.
//
// Of floats or affine numbers: WORDS, EACH at a time, with their scale and bias.
template <int IN, int BITS, int GROUP, int WORDS, int EACH, typename W, typename S>
struct affine_share {
  const device W* w;
  const device S* scales;
  const device S* biases;
  pack<W, EACH> at[WORDS / EACH];
  S scale, bias;
  inline void fetch(ulong row, int col) {
    const int per = per_word<BITS>();
    scale = bias = S(0.0f);
    for (int i = 0; i < WORDS / EACH; ++i) {
      // Rows of floats may end inside of a share.
      const int from = col + (BITS == 0 && IN % WORDS != 0 ? i * EACH : 0);
      if (from < IN) {
        at[i] = load_pack<EACH>(w + row * (IN / per) + col / per + i * EACH);
      } else {
        for (int j = 0; j < EACH; ++j) {
          at[i].at[j] = W(0);
        }
      }
    }
    if (BITS != 0 && col < IN) {
      scale = scales[row * (IN / GROUP) + col / GROUP];
      bias = biases[row * (IN / GROUP) + col / GROUP];
    }
  }
  template <typename T>
  inline void place(threadgroup T* to, int col) const {
    const int per = per_word<BITS>(), M = 16 / sizeof(T), STEP = per > M ? per : M;
    #pragma unroll
    for (int i = 0; i < WORDS * per; i += STEP) {
      pack<T, STEP> values;
      #pragma unroll
      for (int j = 0; j < STEP; j += per) {
        const int word = (i + j) / per;
        spread<BITS>(values.at + j, at[word / EACH].at[word % EACH], scale, bias);
      }
      #pragma unroll
      for (int j = 0; j < STEP; j += M) {
        pack<T, M> part;
        #pragma unroll
        for (int c = 0; c < M; ++c) {
          part.at[c] = values.at[j + c];
        }
        store_pack(to + i + j, part);
      }
    }
  }
};
template <int IN, int BITS, int GROUP, int WORDS, int EACH, typename W, typename S>
inline affine_share<IN, BITS, GROUP, WORDS, EACH, W, S> share_of(
    const device W* w, const device S* scales, const device S* biases) {
  affine_share<IN, BITS, GROUP, WORDS, EACH, W, S> share;
  share.w = w;
  share.scales = scales;
  share.biases = biases;
  return share;
}

// Of blocks: N numbers; `col` is a multiple of N.
template <int IN, int N, typename E>
struct block_share {
  const device uchar* w;
  E eights[N / 8];
  inline void fetch(ulong row, int col) {
    const int ELEMENTS = E::ELEMENTS, BYTES = E::BYTES;
    const device uchar* from = w + row * (IN / ELEMENTS * BYTES);
    #pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint at = uint(col) | 8 * i;
      if (at < IN) {
        eights[i].fetch(from + at / ELEMENTS * BYTES, at % ELEMENTS);
      }
    }
  }
  template <typename T>
  inline void place(threadgroup T* to, int col) const {
    const int ZERO = E::ZERO, M = 16 / sizeof(T);
    #pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint at = (uint(col) | 8 * i) % E::ELEMENTS;
      const bool there = col + 8 * i < IN;
      const float scale = there ? eights[i].scale(at) : 0.0f;
      const float added = there && E::ADDS ? eights[i].added(at) : 0.0f;
      #pragma unroll
      for (int j = 0; j < 8; j += M) {
        pack<T, M> part;
        #pragma unroll
        for (int c = 0; c < M; c += 2) {
          float values[2];
          for (int e = 0; e < 2; ++e) {
            const int own = j + c + e;
            const float q = there ? number<8>(eights[i].word(own / 4, at), own % 4, ZERO) : 0.0f;
            values[e] = E::ADDS ? metal::fma(scale, q, added) : scale * q;
          }
          narrow(part.at + c, values[0], values[1]);
        }
        store_pack(to + 8 * i + j, part);
      }
    }
  }
};

// One tile: BM pairs of a slot, BN columns of the result.
//   GATED: h[position] = activated(w0 x[pair / K], w1 x[pair / K]);  else out[pair] = w0 x[position]
// w0 and w1 are this thread's shares of each. With BIASED the slot's bias is added to each product. The
// sum over IN runs in the same order whatever the tile's size, its place and its other rows.
template <int BM, int BN, int BK, int WM, int WN, int K, bool GATED, int IN, int OUT, bool BIASED,
          uint ALPHA, uint LIMIT, typename T, typename W0, typename W1, typename A>
inline void expert_tile(
    const device T* x,
    const device uint* order,
    const device uint* offsets,
    const device uint* tiles,
    thread W0& w0,
    thread W1& w1,
    const device A* bias0,
    const device A* bias1,
    device T* out,
    threadgroup T* a,
    threadgroup T* b,
    threadgroup uint* pairs,
    uint3 group,
    int index,
    int simdgroup,
    uint lane) {
  const int B = GATED ? 2 : 1, M = 16 / sizeof(T), LD = BK + M, THREADS = 32 * WM * WN;
  const int TM = BM / 16 / WM, TN = BN / 8 / WN, STEP = THREADS * M / BK, PASSES = BM / STEP;
  const uint slot = tiles[2 * group.y];
  if (slot == 0xffffffffu) {
    return;
  }
  const uint first = tiles[2 * group.y + 1];
  const int rows = metal::min(int(offsets[slot + 1] - first), BM), left = group.x * BN;
  for (int i = index; i < BM; i += THREADS) {
    pairs[i] = order[first + metal::min(i, rows - 1)];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // This thread's share of every step: packs of PASSES rows of x, and of one row of the weights.
  const int a_row = index / (BK / M), a_col = index % (BK / M) * M;
  const int b_row = index / (THREADS / BN), b_col = index % (THREADS / BN) * (BN * BK / THREADS);
  const device T* from[PASSES];
  #pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    const int row = metal::min(a_row + i * STEP, rows - 1);
    from[i] = x + ulong(GATED ? pairs[row] / K : first + row) * IN;
  }
  const ulong w_row = ulong(slot) * OUT + metal::min(left + b_row, OUT - 1);
  pack<T, M> next_a[PASSES];

  tile_c acc[B][TM][TN];
  #pragma unroll
  for (int m = 0; m < B; ++m) {
    #pragma unroll
    for (int i = 0; i < TM; ++i) {
      #pragma unroll
      for (int j = 0; j < TN; ++j) {
        fill(acc[m][i][j], 0.0f);
      }
    }
  }
  const int top = simdgroup / WN * TM * 16, side = simdgroup % WN * TN * 8;
  for (int k = -BK; k < IN; k += BK) {
    if (k >= 0) {
      #pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        store_pack(a + (a_row + i * STEP) * LD + a_col, next_a[i]);
      }
      w0.place(b + b_row * LD + b_col, k + b_col);
      if (GATED) {
        w1.place(b + (BN + b_row) * LD + b_col, k + b_col);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (k + BK < IN) {
      const int ca = k + BK + a_col, cb = k + BK + b_col;
      #pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        // Past the end weights are zero; values of x must only be numbers.
        next_a[i] = load_pack<M>(from[i] + metal::min(ca, IN - M));
      }
      w0.fetch(w_row, cb);
      if (GATED) {
        w1.fetch(w_row, cb);
      }
    }
    if (k >= 0) {
      #pragma unroll
      for (int kk = 0; kk < BK; kk += 16) {
        tile_a<T> left_tile[TM];
        #pragma unroll
        for (int i = 0; i < TM; ++i) {
          load_a(left_tile[i], a + (top + 16 * i) * LD + kk, LD, lane);
        }
        #pragma unroll
        for (int m = 0; m < B; ++m) {
          #pragma unroll
          for (int j = 0; j < TN; ++j) {
            tile_b<T> right_tile;
            load_b_t(right_tile, b + (m * BN + side + 8 * j) * LD + kk, LD, lane);
            #pragma unroll
            for (int i = 0; i < TM; ++i) {
              mma(acc[m][i][j], left_tile[i], right_tile);
            }
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  #pragma unroll
  for (int i = 0; i < TM; ++i) {
    #pragma unroll
    for (int j = 0; j < TN; ++j) {
      #pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int row = top + 16 * i + acc[0][i][j].row(e, lane);
        const int col = left + side + 8 * j + acc[0][i][j].col(e, lane);
        if (row < rows && col < OUT) {
          pack<T, 2> values;
          #pragma unroll
          for (int c = 0; c < 2; ++c) {
            float value = acc[0][i][j][e + c], other = acc[B - 1][i][j][e + c];
            if (BIASED) {
              value += float(bias0[slot * OUT + col + c]);
              other += float(bias1[slot * OUT + col + c]);
            }
            values.at[c] = T(GATED ? activated<ALPHA, LIMIT>(value, other) : value);
          }
          store_pack(out + ulong(GATED ? first + row : pairs[row]) * OUT + col, values);
        }
      }
    }
  }
}

// y[n] = initial[n] + sum_k weights[n, k] out[n, k] in ascending k, four columns for each thread.
template <int K, int C, bool CONTINUES, typename T>
inline void combine_pairs(
    const device T* out,
    const device uint* slots,
    const device float* weights,
    const device float* initial,
    device float* y,
    uint num_slots,
    uint token,
    uint col) {
  if (col >= C) {
    return;
  }
  const ulong at = ulong(token) * C + col;
  pack<float, 4> total;
  for (int j = 0; j < 4; ++j) {
    total.at[j] = -0.0f;
  }
  if (CONTINUES) {
    total = load_pack<4>(initial + at);
  }
  for (int k = 0; k < K; ++k) {
    const uint pair = token * K + k;
    if (slots[pair] < num_slots) {
      pack<T, 4> part = load_pack<4>(out + ulong(pair) * C + col);
      for (int j = 0; j < 4; ++j) {
        total.at[j] += rounded_product(weights[pair], float(part.at[j]));
      }
    }
  }
  store_pack(y + at, total);
}
