// Attention over preallocated keys and values, a tile of BN keys at a time with online softmax:
// no scores in device memory, rows outside a sequence's range are never read.
//
// attend_rows: a simdgroup owns 16 query rows; scores, probabilities and sums stay in its
// registers. attend_shared: a threadgroup owns 16 MT query rows of PACK heads that share a KV
// head; its simdgroups divide keys and value columns and exchange scores. attend_combine: joins
// the results of ranges of keys.

// 16 bytes into threadgroup memory, zeros where not live. CUDA copies while the thread goes on.
#ifdef MOEFLUX_CUDA
template <typename T>
inline void copy_async(threadgroup T* to, const device T* from, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   uint(__cvta_generic_to_shared(to))),
               "l"(from), "r"(live ? 16 : 0)
               : "memory");
}
inline void copy_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
#else
template <typename T>
inline void copy_async(threadgroup T* to, const device T* from, bool live) {
  #pragma unroll
  for (int i = 0; i < 16 / int(sizeof(T)); ++i) {
    to[i] = live ? from[i] : T(0.0f);
  }
}
inline void copy_wait() {}
#endif

// Rows first .. first + COUNT of a matrix [*, D] into rows of LD values; rows outside
// [low, high) are not read and become zeros.
template <typename T, int D, int LD, int COUNT, int THREADS>
inline void stage_rows(
    threadgroup T* to, const device T* from, int first, int low, int high, uint index) {
  constexpr int WIDE = 16 / int(sizeof(T)), CHUNKS = D / WIDE;
  for (int i = int(index); i < COUNT * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, column = i % CHUNKS * WIDE;
    const bool live = first + row >= low && first + row < high;
    copy_async(to + row * LD + column, from + (live ? (first + row) * D + column : 0), live);
  }
}

// Below every score; finite, so that differences are never NaN.
inline float no_score() {
  return -3.0e38f;
}

struct key_range {
  int low, high;
};

// Part `part` of `parts` of the keys from start to high, in whole tiles.
inline key_range part_of(int start, int high, int tile, uint part, uint parts) {
  const int unit = int(parts) * tile;
  const int share = (metal::max(high - start, 0) + unit - 1) / unit * tile;
  const int low = start + int(part) * share;
  return {low, metal::min(high, low + share)};
}

// An attended value to y [B, T, HQ, DV], through the sigmoid of its gate. GATE 1: the gate is
// [B, T, HQ, DV]; 2: the second half of [B, T, HQ, 2 DV]. `row`: head past `head` * tokens + token.
template <typename T, int DV, int HQ, int GATE>
inline void write_attended(
    device T* y, const device T* gate, float value, int b, int head, int row, int column,
    int tokens) {
  const size_t at = (size_t(b) * tokens + row % tokens) * HQ + head + row / tokens;
  if (GATE != 0) {
    value *= sigmoid(float(gate[at * (GATE * DV) + (GATE - 1) * DV + column]));
  }
  y[at * DV + column] = T(value);
}

template <typename T, int D, int DV, int BN>
struct alignas(16) row_memory {
  T keys[BN * (D + 8)];
  T values[BN * (DV + 8)];
};

// q [B, HQ, T, D], k [B, HKV, capacity, D], v [B, HKV, capacity, DV]; ranges [B, 2]: first and
// past-the-last key of each sequence; query t sees keys below length - T + t + 1 if CAUSAL.
// Threadgroups: (parts of the keys, B * HQ, blocks of 16 W rows from the last). SPLIT: writes
// sums that are not divided yet [B * HQ, parts, T, DV], and (maximum in base 2, sum of weights).
// Columns i and i + 1 of a tile_c, i even, lie in one row.
template <typename T, int D, int DV, int HQ, int HKV, int W, int BN, bool CAUSAL, bool SPLIT,
          int GATE>
inline void attend_rows(
    const device T* q, const device T* k, const device T* v, const device T* gate,
    const device int* ranges, const device float* scale, device T* y, device float* partial,
    device float* stats, threadgroup row_memory<T, D, DV, BN>& m, int tokens, int capacity,
    uint3 position, uint3 counts, uint index) {
  constexpr int M = 16 * W, LK = D + 8, LV = DV + 8, THREADS = 32 * W;
  const uint lane = index % 32;
  const int own = int(index / 32) * 16, group = int(position.y), b = group / HQ, head = group % HQ;
  const int row0 = (int(counts.z) - 1 - int(position.z)) * M;
  const int length = ranges[2 * b + 1], before = CAUSAL ? length - tokens + 1 : length;
  q += size_t(group) * tokens * D;
  const size_t k_row = size_t(b * HKV + head / (HQ / HKV)) * capacity;
  k += k_row * D;
  v += k_row * DV;
  const key_range keys = part_of(
      ranges[2 * b], CAUSAL ? before + metal::min(row0 + M, tokens) - 1 : length, BN, position.x,
      counts.x);
  const int low = keys.low, high = keys.high;
  const float to_base2 = scale[0] * 1.44269504f;

  tile_a<T> queries[D / 16];
  #pragma unroll
  for (int t = 0; t < M; t += BN) {
    stage_rows<T, D, LK, BN, THREADS>(m.keys, q, row0 + t, 0, tokens, index);
    copy_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (own >= t && own < t + BN) {
      #pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        load_a(queries[i], m.keys + (own - t) * LK + 16 * i, LK, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tile_c sums[DV / 8];
  #pragma unroll
  for (int n = 0; n < DV / 8; ++n) {
    fill(sums[n], 0.0f);
  }
  int limit[2];
  float top[2], total[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row0 + own + sums[0].row(2 * i, lane);
    limit[i] = metal::min(CAUSAL ? before + row : length, high);
    top[i] = no_score();
    total[i] = 0.0f;
  }
  const int open = metal::min(CAUSAL ? before + row0 + own : length, high);

  stage_rows<T, D, LK, BN, THREADS>(m.keys, k, low, low, high, index);
  for (int first = low; first < high; first += BN) {
    copy_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_rows<T, DV, LV, BN, THREADS>(m.values, v, first, low, high, index);
    tile_c s[BN / 8];
    #pragma unroll
    for (int n = 0; n < BN / 8; ++n) {
      fill(s[n], 0.0f);
    }
    #pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      #pragma unroll
      for (int n = 0; n < BN / 8; ++n) {
        tile_b<T> keys;
        load_b_t(keys, m.keys + 8 * n * LK + 16 * i, LK, lane);
        mma(s[n], queries[i], keys);
      }
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      float highest = -INFINITY;
      #pragma unroll
      for (int n = 0; n < BN / 8; ++n) {
        #pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
          if (first + BN > open && first + 8 * n + s[n].col(j, lane) >= limit[i]) {
            s[n][j] = -INFINITY;
          }
          highest = metal::max(highest, s[n][j]);
        }
      }
      highest = row_max(highest) * to_base2;
      // A maximum that is up to 2^8 too small does no harm, and spares most rescaling.
      float factor = 1.0f;
      if (highest - top[i] > 8.0f) {
        factor = metal::exp2(top[i] - highest);
        top[i] = highest;
      }
      total[i] *= factor;
      #pragma unroll
      for (int n = 0; n < BN / 8; ++n) {
        #pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
          s[n][j] = metal::exp2(metal::fma(s[n][j], to_base2, -top[i]));
          total[i] += s[n][j];
        }
      }
      if (simd_any(factor != 1.0f)) {
        #pragma unroll
        for (int n = 0; n < DV / 8; ++n) {
          sums[n][2 * i] *= factor;
          sums[n][2 * i + 1] *= factor;
        }
      }
    }
    copy_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first + BN < high) {
      stage_rows<T, D, LK, BN, THREADS>(m.keys, k, first + BN, low, high, index);
    }
    #pragma unroll
    for (int j = 0; j < BN / 16; ++j) {
      const tile_a<T> weights = to_a<T>(s[2 * j], s[2 * j + 1]);
      #pragma unroll
      for (int n = 0; n < DV / 8; ++n) {
        tile_b<T> values;
        load_b(values, m.values + 16 * j * LV + 8 * n, LV, lane);
        mma(sums[n], weights, values);
      }
    }
  }

  copy_wait();
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = row_sum(total[i]);
    const int row = row0 + own + sums[0].row(2 * i, lane);
    const size_t at = (size_t(group) * counts.x + position.x) * tokens + row;
    if (SPLIT && row < tokens && sums[0].col(0, lane) == 0) {
      stats[2 * at] = top[i];
      stats[2 * at + 1] = total[i];
    }
    const float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
    #pragma unroll
    for (int n = 0; n < DV / 8; ++n) {
      #pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) {
        const int column = 8 * n + sums[n].col(j, lane);
        if (row < tokens && SPLIT) {
          partial[at * DV + column] = sums[n][j];
        } else if (row < tokens) {
          write_attended<T, DV, HQ, GATE>(
              y, gate, sums[n][j] * inverse, b, head, row, column, tokens);
        }
      }
    }
  }
}

// LAYOUT says where the value rows of a tile lie: 0 in memory of their own, 1 in the keys' memory
// once the scores are done, 2 they are the first DV columns of the keys.
template <typename T, int D, int DV, int MT, int BN, int LAYOUT>
struct alignas(16) shared_memory {
  T keys[BN * (D + 8)];
  T values[LAYOUT == 0 ? BN * (DV + 8) : 8];
  T weights[16 * MT * (BN + 8)];
  float scores[16 * MT * (BN + 1)];
  float factor[16 * MT];
};

// Keys of two parts, D1 and D2 wide, in rows of LD values.
template <typename T, int D1, int D2, int LD, int COUNT, int THREADS>
inline void stage_both(
    threadgroup T* to, const device T* x, const device T* x2, int first, int low, int high,
    uint index) {
  stage_rows<T, D1, LD, COUNT, THREADS>(to, x, first, low, high, index);
  if (D2 > 0) {
    stage_rows<T, D2, LD, COUNT, THREADS>(to + D1, x2, first, low, high, index);
  }
}

// As attend_rows, with queries and keys in two parts (q2 [B, HQ, T, D2], k2), and rows that are
// (head in the group of PACK) * T + token. Threadgroups: (parts, B * HQ / PACK, blocks of rows).
template <typename T, int D1, int D2, int DV, int HQ, int HKV, int PACK, int MT, int W, int BN,
          int LAYOUT, bool CAUSAL, bool SPLIT, int GATE>
inline void attend_shared(
    const device T* q, const device T* q2, const device T* k, const device T* k2,
    const device T* v, const device T* gate, const device int* ranges, const device float* scale,
    device T* y, device float* partial, device float* stats,
    threadgroup shared_memory<T, D1 + D2, DV, MT, BN, LAYOUT>& m,
    int tokens, int capacity, uint3 position, uint3 counts, uint index) {
  constexpr int D = D1 + D2, M = 16 * MT, LK = D + 8, LV = LAYOUT == 2 ? LK : DV + 8;
  constexpr int LS = BN + 1, LP = BN + 8, THREADS = 32 * W;
  // In the scores WN simdgroups share a row tile, NS tiles of keys each; in the product with the
  // values a simdgroup owns all rows and NV tiles of columns.
  constexpr int WN = W / MT, NS = BN / 8 < WN ? 1 : BN / 8 / WN, NV = DV / 8 / W;
  constexpr int LANES = 2 * WN, EACH = BN / LANES;
  const uint lane = index % 32;
  const int w = int(index / 32), tile = w / WN, key_tile = w % WN * NS;
  const int group = int(position.y), b = group / (HQ / PACK), head = group % (HQ / PACK) * PACK;
  const int rows = PACK * tokens, row0 = (int(counts.z) - 1 - int(position.z)) * M;
  const int length = ranges[2 * b + 1], before = CAUSAL ? length - tokens + 1 : length;

  const size_t q_row = size_t(b * HQ + head) * tokens;
  const size_t k_row = size_t(b * HKV + head / (HQ / HKV)) * capacity;
  q += q_row * D1;
  q2 += q_row * D2;
  k += k_row * D1;
  k2 += k_row * D2;
  v += k_row * DV;

  const int last_row = metal::min(row0 + M, rows) - 1;
  const bool one_head = row0 / tokens == last_row / tokens;
  const int past = CAUSAL ? before + (one_head ? last_row % tokens : tokens - 1) : length;
  const key_range keys = part_of(ranges[2 * b], past, BN, position.x, counts.x);
  const int low = keys.low, high = keys.high;

  // Row `mine` of the softmax belongs to LANES neighbouring lanes.
  const int mine = int(index) / LANES, part = int(index) % LANES;
  const int sees = CAUSAL ? before + (row0 + mine) % tokens : length;
  const int limit = row0 + mine < rows ? metal::min(sees, high) : 0;
  const float to_base2 = scale[0] * 1.44269504f;
  float top = no_score(), total = 0.0f;

  tile_a<T> queries[D / 16];
  #pragma unroll
  for (int t = 0; t < MT; ++t) {
    stage_both<T, D1, D2, LK, 16, THREADS>(m.keys, q, q2, row0 + 16 * t, 0, rows, index);
    copy_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == tile) {
      #pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        load_a(queries[i], m.keys + 16 * i, LK, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tile_c sums[MT][NV];
  #pragma unroll
  for (int t = 0; t < MT; ++t) {
    #pragma unroll
    for (int n = 0; n < NV; ++n) {
      fill(sums[t][n], 0.0f);
    }
  }

  stage_both<T, D1, D2, LK, BN, THREADS>(m.keys, k, k2, low, low, high, index);
  for (int first = low; first < high; first += BN) {
    copy_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (LAYOUT == 0) {
      stage_rows<T, DV, LV, BN, THREADS>(m.values, v, first, low, high, index);
    }
    if (key_tile < BN / 8) {
      tile_c s[NS];
      #pragma unroll
      for (int n = 0; n < NS; ++n) {
        fill(s[n], 0.0f);
      }
      #pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        #pragma unroll
        for (int n = 0; n < NS; ++n) {
          tile_b<T> keys;
          load_b_t(keys, m.keys + (key_tile + n) * 8 * LK + 16 * i, LK, lane);
          mma(s[n], queries[i], keys);
        }
      }
      #pragma unroll
      for (int n = 0; n < NS; ++n) {
        store(s[n], m.scores + 16 * tile * LS + (key_tile + n) * 8, LS, lane);
      }
    }
    // With one simdgroup to a row tile, its rows of the softmax are its own.
    if (WN == 1 && LAYOUT != 1) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (LAYOUT == 1) {
      stage_rows<T, DV, LV, BN, THREADS>(m.keys, v, first, low, high, index);
    }

    float x[EACH];
    float highest = top;
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int key = part + LANES * i;
      x[i] = first + key < limit ? m.scores[mine * LS + key] * to_base2 : no_score();
      highest = metal::max(highest, x[i]);
    }
    #pragma unroll
    for (int i = 1; i < LANES; i *= 2) {
      highest = metal::max(highest, simd_shuffle_xor(highest, ushort(i)));
    }
    // A maximum that is up to 2^8 too small does no harm, and spares most rescaling.
    float factor = 1.0f;
    if (highest - top > 8.0f) {
      factor = metal::exp2(top - highest);
      top = highest;
    }
    total *= factor;
    #pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int key = part + LANES * i;
      const float weight = first + key < limit ? metal::exp2(x[i] - top) : 0.0f;
      total += weight;
      m.weights[mine * LP + key] = T(weight);
    }
    if (part == 0) {
      m.factor[mine] = factor;
    }
    copy_wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (LAYOUT == 0 && first + BN < high) {
      stage_both<T, D1, D2, LK, BN, THREADS>(m.keys, k, k2, first + BN, low, high, index);
    }

    #pragma unroll
    for (int t = 0; t < MT; ++t) {
      float f[4];
      bool same = true;
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        f[i] = m.factor[16 * t + sums[t][0].row(i, lane)];
        same = same && f[i] == 1.0f;
      }
      if (!simd_all(same)) {
        #pragma unroll
        for (int n = 0; n < NV; ++n) {
          #pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[t][n][i] *= f[i];
          }
        }
      }
    }
    threadgroup T* values = (LAYOUT == 0 ? m.values : m.keys) + 8 * NV * w;
    #pragma unroll
    for (int j = 0; j < BN / 16; ++j) {
      tile_a<T> weights[MT];
      #pragma unroll
      for (int t = 0; t < MT; ++t) {
        load_a(weights[t], m.weights + 16 * t * LP + 16 * j, LP, lane);
      }
      #pragma unroll
      for (int n = 0; n < NV; ++n) {
        tile_b<T> rows_of_values;
        load_b(rows_of_values, values + 16 * j * LV + 8 * n, LV, lane);
        #pragma unroll
        for (int t = 0; t < MT; ++t) {
          mma(sums[t][n], weights[t], rows_of_values);
        }
      }
    }
    if (LAYOUT != 0 && first + BN < high) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage_both<T, D1, D2, LK, BN, THREADS>(m.keys, k, k2, first + BN, low, high, index);
    }
  }

  copy_wait();
  #pragma unroll
  for (int i = 1; i < LANES; i *= 2) {
    total += simd_shuffle_xor(total, ushort(i));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const size_t out_row = (size_t(group) * counts.x + position.x) * rows + row0;
  if (part == 0) {
    m.factor[mine] = total > 0.0f ? 1.0f / total : 0.0f;
    if (SPLIT && row0 + mine < rows) {
      stats[2 * (out_row + mine)] = top;
      stats[2 * (out_row + mine) + 1] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  #pragma unroll
  for (int t = 0; t < MT; ++t) {
    #pragma unroll
    for (int n = 0; n < NV; ++n) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * t + sums[t][n].row(i, lane), row = row0 + at;
        const int column = 8 * (NV * w + n) + sums[t][n].col(i, lane);
        if (row < rows && SPLIT) {
          partial[(out_row + at) * DV + column] = sums[t][n][i];
        } else if (row < rows) {
          write_attended<T, DV, HQ, GATE>(
              y, gate, sums[t][n][i] * m.factor[at], b, head, row, column, tokens);
        }
      }
    }
  }
}

// y = sum over parts of 2^(top - highest top) partial / the same sum of totals. A threadgroup of
// 8 simdgroups owns 32 columns of a row; each takes every eighth part.
template <typename T, int DV, int HQ, int PACK, int GATE>
inline void attend_combine(
    const device float* partial, const device float* stats, const device T* gate, device T* y,
    threadgroup float* shared, int parts, int rows, uint3 position, uint index) {
  const int lane = int(index % 32), w = int(index / 32);
  const int column = 32 * int(position.x) + lane, row = int(position.y), group = int(position.z);
  const size_t base = size_t(group) * parts * rows + row;
  float highest = no_score();
  for (int s = lane; s < parts; s += 32) {
    highest = metal::max(highest, stats[2 * (base + size_t(s) * rows)]);
  }
  highest = simd_max(highest);
  float value = 0.0f, total = 0.0f;
  for (int s = w; s < parts; s += 8) {
    const size_t at = base + size_t(s) * rows;
    const float weight = metal::exp2(stats[2 * at] - highest);
    total += weight * stats[2 * at + 1];
    value += weight * partial[at * DV + column];
  }
  shared[index] = value;
  shared[256 + index] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (w == 0) {
    value = 0.0f;
    total = 0.0f;
    for (int i = lane; i < 256; i += 32) {
      value += shared[i];
      total += shared[256 + i];
    }
    const int tokens = rows / PACK, b = group / (HQ / PACK), head = group % (HQ / PACK) * PACK;
    write_attended<T, DV, HQ, GATE>(
        y, gate, total > 0.0f ? value / total : 0.0f, b, head, row, column, tokens);
  }
}
