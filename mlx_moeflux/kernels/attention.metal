// Attention over preallocated keys and values, a tile of BN keys at a time with online softmax:
// no scores in device memory, rows outside a sequence's range are never read.
//
// attend_rows: a simdgroup owns 16 query rows; scores, probabilities and sums stay in its
// registers. attend_shared: a threadgroup owns 16 MT query rows of PACK heads that share a KV
// head; its simdgroups divide keys and value columns and exchange scores. attend_combine: joins
// the results of parts of the keys.

#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); ++i)

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
  EACH(i, 16 / int(sizeof(T))) {
    to[i] = live ? from[i] : T(0.0f);
  }
}
inline void copy_wait() {}
#endif
// What was copied is there for all threads.
inline void arrive() {
  copy_wait();
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Rows first .. first + COUNT of x [*, D1] and beside them x2 [*, D2], into rows of LD values; rows
// outside [low, high) are not read and become zeros. With TAIL rows from `start` on are in `tail`.
// With PAGE the others are in blocks of so many of the rows of x [*, HEADS, D1], which `table` gives
// from row `origin` on.
template <typename T, int D1, int D2, int LD, int COUNT, int THREADS, bool TAIL = false,
          int PAGE = 0, int HEADS = 1>
inline void stage(
    threadgroup T* to, const device T* x, const device T* x2, int first, int low, int high,
    uint index, const device T* tail = nullptr, int start = 0, const device int* table = nullptr,
    int origin = 0) {
  constexpr int WIDE = 16 / int(sizeof(T)), CHUNKS = (D1 + D2) / WIDE;
  for (int i = int(index); i < COUNT * CHUNKS; i += THREADS) {
    const int row = first + i / CHUNKS, at = i % CHUNKS * WIDE;
    const bool live = row >= low && row < high;
    const device T* from = D2 == 0 || at < D1 ? x + row * D1 + at : x2 + row * D2 + at - D1;
    if (PAGE > 0 && live) {
      const int page = metal::max(PAGE, 1), own = row - origin;
      from = x + (size_t(table[own / page]) * page + own % page) * (HEADS * D1) + at;
    }
    if (TAIL && row >= start) {
      from = tail + (row - start) * D1 + at;
    }
    copy_async(to + i / CHUNKS * LD + at, live ? from : x, live);
  }
}

// Below every score; finite, so that differences are never NaN.
inline float no_score() {
  return -3.0e38f;
}

// Raises the maximum to `highest`; returns by what sums shrink. A maximum that is up to 2^8 too
// small does no harm, and spares most rescaling.
inline float raised(thread float& top, float highest) {
  float factor = 1.0f;
  if (highest - top > 8.0f) {
    factor = metal::exp2(top - highest);
    top = highest;
  }
  return factor;
}

// Keys of a part: those from start to high shared out in whole tiles.
struct key_range {
  int low, high;
};
inline key_range part_of(int start, int high, int tile, uint part, uint parts) {
  const int unit = int(parts) * tile;
  const int share = (metal::max(high - start, 0) + unit - 1) / unit * tile;
  const int low = start + int(part) * share;
  return {low, metal::min(high, low + share)};
}

// N neighbours of y [B, T, HQ, DV], through the sigmoid of their gates. GATE 1: the gate is
// [B, T, HQ, DV]; 2: the second half of [B, T, HQ, 2 DV]. row: heads past `head` * tokens + token.
template <typename T, int DV, int HQ, int GATE, int N>
inline void write_attended(
    device T* y, const device T* gate, pack<float, N> x, int b, int head, int row, int column,
    int tokens) {
  const size_t at = (size_t(b) * tokens + row % tokens) * HQ + head + row / tokens;
  pack<T, N> out;
  EACH(e, N) {
    float value = x.at[e];
    if (GATE > 0) {
      value *= sigmoid(float(gate[at * (GATE * DV) + (GATE - 1) * DV + column + e]));
    }
    out.at[e] = T(value);
  }
  store_pack(y + at * DV + column, out);
}

// q [B, HQ, T, D], k [B, HKV, capacity, D], v [B, HKV, capacity, DV]; ranges [B, 2]: first and
// past-the-last key of each sequence; query t sees keys below length - T + t + 1 if CAUSAL.
// Threadgroups: (parts of the keys, B * HQ, blocks of 16 W rows from the last). GATE 3: writes
// sums that are not divided yet [B * HQ, parts, T, DV], and (maximum in base 2, sum of weights).
// Elements 2 i and 2 i + 1 of a tile_c are neighbours in a row.
template <typename T, int D, int DV, int HQ, int HKV, int W, int BN, bool CAUSAL, int GATE>
inline void attend_rows(
    const device T* q, const device T* k, const device T* v, const device T* gate,
    const device int* ranges, const device float* scale, device T* y, device float* partial,
    device float* stats, threadgroup T* key_tile, threadgroup T* value_tile, int tokens,
    int capacity, uint3 position, uint3 counts, uint index) {
  constexpr int M = 16 * W, LK = D + 8, LV = DV + 8, THREADS = 32 * W;
  const uint lane = index % 32;
  const int own = int(index / 32) * 16, group = int(position.y), b = group / HQ, head = group % HQ;
  const int row0 = (int(counts.z) - 1 - int(position.z)) * M;
  const int length = ranges[2 * b + 1], before = CAUSAL ? length - tokens + 1 : length;
  q += size_t(group) * tokens * D;
  const size_t kv_row = size_t(b * HKV + head / (HQ / HKV)) * capacity;
  k += kv_row * D;
  v += kv_row * DV;
  const int past = CAUSAL ? before + metal::min(row0 + M, tokens) - 1 : length;
  const key_range range = part_of(ranges[2 * b], past, BN, position.x, counts.x);
  const int low = range.low, high = range.high;
  const float to_base2 = scale[0] * 1.44269504f;

  tile_a<T> queries[D / 16];
  for (int t = 0; t < M; t += BN) {
    stage<T, D, 0, LK, BN, THREADS>(key_tile, q, q, row0 + t, 0, tokens, index);
    arrive();
    if (own >= t && own < t + BN) {
      EACH(i, D / 16) {
        load_a(queries[i], key_tile + (own - t) * LK + 16 * i, LK, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tile_c sums[DV / 8];
  EACH(n, DV / 8) {
    fill(sums[n], 0.0f);
  }
  int limit[2];
  float top[2], total[2];
  EACH(i, 2) {
    const int row = row0 + own + sums[0].row(2 * i, lane);
    limit[i] = metal::min(CAUSAL ? before + row : length, high);
    top[i] = no_score();
    total[i] = 0.0f;
  }
  // Below it all rows of the simdgroup see every key.
  const int open = metal::min(CAUSAL ? before + row0 + own : length, high);

  stage<T, D, 0, LK, BN, THREADS>(key_tile, k, k, low, low, high, index);
  for (int first = low; first < high; first += BN) {
    arrive();
    stage<T, DV, 0, LV, BN, THREADS>(value_tile, v, v, first, low, high, index);
    tile_c s[BN / 8];
    EACH(n, BN / 8) {
      fill(s[n], 0.0f);
    }
    EACH(i, D / 16) {
      EACH(n, BN / 8) {
        tile_b<T> keys;
        load_b_t(keys, key_tile + 8 * n * LK + 16 * i, LK, lane);
        mma(s[n], queries[i], keys);
      }
    }
    EACH(i, 2) {
      float highest = -INFINITY;
      EACH(n, BN / 8) {
        EACH(e, 2) {
          const int j = 2 * i + e;
          if (first + BN > open && first + 8 * n + s[n].col(j, lane) >= limit[i]) {
            s[n][j] = -INFINITY;
          }
          highest = metal::max(highest, s[n][j]);
        }
      }
      const float factor = raised(top[i], row_max(highest) * to_base2);
      total[i] *= factor;
      EACH(n, BN / 8) {
        EACH(e, 2) {
          const int j = 2 * i + e;
          s[n][j] = metal::exp2(metal::fma(s[n][j], to_base2, -top[i]));
          total[i] += s[n][j];
        }
      }
      if (simd_any(factor != 1.0f)) {
        EACH(n, DV / 8) {
          sums[n][2 * i] *= factor;
          sums[n][2 * i + 1] *= factor;
        }
      }
    }
    arrive();
    if (first + BN < high) {
      stage<T, D, 0, LK, BN, THREADS>(key_tile, k, k, first + BN, low, high, index);
    }
    EACH(j, BN / 16) {
      const tile_a<T> weights = to_a<T>(s[2 * j], s[2 * j + 1]);
      EACH(n, DV / 8) {
        tile_b<T> values;
        load_b(values, value_tile + 16 * j * LV + 8 * n, LV, lane);
        mma(sums[n], weights, values);
      }
    }
  }

  copy_wait();
  EACH(i, 2) {
    total[i] = row_sum(total[i]);
    const int row = row0 + own + sums[0].row(2 * i, lane);
    const size_t at = (size_t(group) * counts.x + position.x) * tokens + row;
    if (GATE == 3 && row < tokens && sums[0].col(0, lane) == 0) {
      stats[2 * at] = top[i];
      stats[2 * at + 1] = total[i];
    }
    const float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
    EACH(n, DV / 8) {
      const int j = 2 * i, column = 8 * n + sums[n].col(j, lane);
      if (row < tokens && GATE == 3) {
        store_pack(partial + at * DV + column, pack<float, 2>{sums[n][j], sums[n][j + 1]});
      } else if (row < tokens) {
        write_attended<T, DV, HQ, GATE, 2>(
            y, gate, {sums[n][j] * inverse, sums[n][j + 1] * inverse}, b, head, row, column,
            tokens);
      }
    }
  }
}

// As attend_rows, with queries and keys in two parts (q2 [B, HQ, T, D2], k2), and rows that are
// (head in the group of PACK) * T + token. Threadgroups: (parts, B * HQ / PACK, blocks of rows).
// LAYOUT says where the value rows of a tile lie: 0 in memory of their own, 1 in the keys' memory
// once the scores are done, 2 they are the first DV columns of the keys. PAGE: k [*, HKV, D1] and v
// are blocks of so many rows, and table [B, pages] says whose.
template <typename T, int D1, int D2, int DV, int HQ, int HKV, int PACK, int MT, int W, int BN,
          int LAYOUT, int TAIL, int PAGE, bool CAUSAL, int GATE>
inline void attend_shared(
    const device T* q, const device T* q2, const device T* k, const device T* k2,
    const device T* v, const device T* tail_k, const device T* tail_v, const device int* table,
    const device T* gate, const device int* ranges, const device float* scale, device T* y, device float* partial, device float* stats, threadgroup T* key_tile,
    threadgroup T* value_tile, threadgroup T* weights, threadgroup float* scores,
    threadgroup float* factors, int tokens, int capacity, uint3 position, uint3 counts,
    uint index) {
  constexpr int D = D1 + D2, M = 16 * MT, LK = D + 8, LV = LAYOUT == 2 ? LK : DV + 8;
  constexpr int LS = BN + 1, LP = BN + 8, THREADS = 32 * W;
  // In the scores WN simdgroups share a row tile, NK 16-wide parts of D each; in the product with
  // the values a simdgroup owns all rows and NV tiles of columns. LANES neighbours own a row of
  // the softmax.
  constexpr int WN = W / MT, NK = (D / 16 + WN - 1) / WN, NV = DV / 8 / W;
  constexpr int LANES = 2 * WN, KEYS = BN / LANES;
  const uint lane = index % 32;
  const int w = int(index / 32), tile = w / WN, k0 = w % WN * NK;
  const int group = int(position.y), b = group / (HQ / PACK), head = group % (HQ / PACK) * PACK;
  const int rows = PACK * tokens, row0 = (int(counts.z) - 1 - int(position.z)) * M;
  const int length = ranges[2 * b + 1], before = CAUSAL ? length - tokens + 1 : length;
  const size_t q_row = size_t(b * HQ + head) * tokens;
  const size_t kv_head = head / (HQ / HKV), kv_row = PAGE ? kv_head : (b * HKV + kv_head) * capacity;
  const int origin = ranges[2 * b];
  table += PAGE ? b * (capacity / metal::max(PAGE, 1)) : 0;
  q += q_row * D1;
  q2 += q_row * D2;
  k += kv_row * D1;
  k2 += kv_row * D2;
  v += kv_row * DV;
  const int tail = TAIL ? (length - 1) / metal::max(TAIL, 1) * TAIL : 0;
  tail_k += size_t(b * HKV + head / (HQ / HKV)) * TAIL * D1;
  tail_v += size_t(b * HKV + head / (HQ / HKV)) * TAIL * DV;

  const int last_row = metal::min(row0 + M, rows) - 1;
  const bool one_head = row0 / tokens == last_row / tokens;
  const int past = CAUSAL ? before + (one_head ? last_row % tokens : tokens - 1) : length;
  const key_range range = part_of(origin, past, BN, position.x, counts.x);
  const int low = range.low, high = range.high;
  const int mine = int(index) / LANES, part = int(index) % LANES;
  const int sees = CAUSAL ? before + (row0 + mine) % tokens : length;
  const int limit = row0 + mine < rows ? metal::min(sees, high) : 0;
  const float to_base2 = scale[0] * 1.44269504f;
  float top = no_score(), total = 0.0f;

  tile_a<T> queries[NK];
  EACH(t, MT) {
    stage<T, D1, D2, LK, 16, THREADS>(key_tile, q, q2, row0 + 16 * t, 0, rows, index);
    arrive();
    EACH(i, NK) {
      if (t == tile && k0 + i < D / 16) {
        load_a(queries[i], key_tile + 16 * (k0 + i), LK, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  tile_c sums[MT][NV];
  EACH(t, MT) {
    EACH(n, NV) {
      fill(sums[t][n], 0.0f);
    }
  }

  stage<T, D1, D2, LK, BN, THREADS, (TAIL > 0), PAGE, HKV>(
      key_tile, k, k2, low, low, high, index, tail_k, tail, table, origin);
  for (int first = low; first < high; first += BN) {
    arrive();
    if (LAYOUT == 0) {
      stage<T, DV, 0, LV, BN, THREADS, (TAIL > 0), PAGE, HKV>(
          value_tile, v, v, first, low, high, index, tail_v, tail, table, origin);
    }
    tile_c s[BN / 8];
    EACH(n, BN / 8) {
      fill(s[n], 0.0f);
    }
    EACH(i, NK) {
      if (k0 + i < D / 16) {
        EACH(n, BN / 8) {
          tile_b<T> keys;
          load_b_t(keys, key_tile + 8 * n * LK + 16 * (k0 + i), LK, lane);
          mma(s[n], queries[i], keys);
        }
      }
    }
    EACH(n, BN / 8) {
      store(s[n], scores + (w % WN * M + 16 * tile) * LS + 8 * n, LS, lane);
    }
    // With one simdgroup to a row tile, its rows of the softmax are its own.
    if (WN == 1 && LAYOUT != 1) {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (LAYOUT == 1) {
      stage<T, DV, 0, LV, BN, THREADS, (TAIL > 0), PAGE, HKV>(
          key_tile, v, v, first, low, high, index, tail_v, tail, table, origin);
    }

    float x[KEYS];
    float highest = no_score();
    EACH(i, KEYS) {
      const int key = part + LANES * i;
      float score = 0.0f;
      EACH(p, WN) {
        score += scores[(p * M + mine) * LS + key];
      }
      x[i] = first + key < limit ? score * to_base2 : -INFINITY;
      highest = metal::max(highest, x[i]);
    }
    for (int i = 1; i < LANES; i *= 2) {
      highest = metal::max(highest, simd_shuffle_xor(highest, ushort(i)));
    }
    const float factor = raised(top, highest);
    total *= factor;
    EACH(i, KEYS) {
      const float weight = metal::exp2(x[i] - top);
      total += weight;
      weights[mine * LP + part + LANES * i] = T(weight);
    }
    if (part == 0) {
      factors[mine] = factor;
    }
    arrive();
    if (LAYOUT == 0 && first + BN < high) {
      stage<T, D1, D2, LK, BN, THREADS, (TAIL > 0), PAGE, HKV>(
          key_tile, k, k2, first + BN, low, high, index, tail_k, tail, table, origin);
    }

    EACH(t, MT) {
      float f[4];
      bool same = true;
      EACH(i, 4) {
        f[i] = factors[16 * t + sums[t][0].row(i, lane)];
        same = same && f[i] == 1.0f;
      }
      if (!simd_all(same)) {
        EACH(n, NV) {
          EACH(i, 4) {
            sums[t][n][i] *= f[i];
          }
        }
      }
    }
    threadgroup T* values = (LAYOUT == 0 ? value_tile : key_tile) + 8 * NV * w;
    EACH(j, BN / 16) {
      tile_a<T> left[MT];
      EACH(t, MT) {
        load_a(left[t], weights + 16 * t * LP + 16 * j, LP, lane);
      }
      EACH(n, NV) {
        tile_b<T> right;
        load_b(right, values + 16 * j * LV + 8 * n, LV, lane);
        EACH(t, MT) {
          mma(sums[t][n], left[t], right);
        }
      }
    }
    if (LAYOUT != 0 && first + BN < high) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage<T, D1, D2, LK, BN, THREADS, (TAIL > 0), PAGE, HKV>(
          key_tile, k, k2, first + BN, low, high, index, tail_k, tail, table, origin);
    }
  }

  arrive();
  for (int i = 1; i < LANES; i *= 2) {
    total += simd_shuffle_xor(total, ushort(i));
  }
  const size_t out_row = (size_t(group) * counts.x + position.x) * rows + row0;
  if (part == 0) {
    factors[mine] = total > 0.0f ? 1.0f / total : 0.0f;
    if (GATE == 3 && row0 + mine < rows) {
      stats[2 * (out_row + mine)] = top;
      stats[2 * (out_row + mine) + 1] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  EACH(t, MT) {
    EACH(n, NV) {
      EACH(i, 2) {
        const int j = 2 * i, at = 16 * t + sums[t][n].row(j, lane), row = row0 + at;
        const int column = 8 * (NV * w + n) + sums[t][n].col(j, lane);
        const float x0 = sums[t][n][j], x1 = sums[t][n][j + 1];
        if (row < rows && GATE == 3) {
          store_pack(partial + (out_row + at) * DV + column, pack<float, 2>{x0, x1});
        } else if (row < rows) {
          write_attended<T, DV, HQ, GATE, 2>(
              y, gate, {x0 * factors[at], x1 * factors[at]}, b, head, row, column, tokens);
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
    write_attended<T, DV, HQ, GATE, 1>(
        y, gate, {total > 0.0f ? value / total : 0.0f}, b, head, row, column, tokens);
  }
}
