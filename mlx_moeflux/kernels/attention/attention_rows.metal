// A simdgroup owns R tiles of 16 query rows; scores, probabilities and sums stay in its registers.
#include "attention.metal"

// Copies since the last call are a group; all groups but the newest are there for all threads. What
// is not copied meanwhile is there after any barrier.
#ifdef MOEFLUX_CUDA
inline void copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
inline void arrive_but_newest() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
#else
inline void copy_group() {}
inline void arrive_but_newest() {}
#endif

// stage() of COUNT rows that lie in one array, where each thread keeps to its columns: addresses are
// constants apart, and of a tile that is there as a whole nothing is asked. It compiles for sizes that
// are not even() too, but does not run: C++14 has no `if constexpr`. No columns are no rows to copy.
template <typename T, int D, int LD, int COUNT, int THREADS, int X = D>
inline void stage_columns(
    threadgroup T* to, const device T* x, int first, int low, int high, uint index) {
  constexpr int WIDE = 16 / int(sizeof(T)), CHUNKS = D / WIDE ? D / WIDE : 1;
  constexpr int STEP = THREADS / CHUNKS, ROWS = COUNT * (D / WIDE) / THREADS;
  const int own = int(index) / CHUNKS, at = int(index) % CHUNKS * WIDE;
  const device T* from = x + (first + own) * X + at;
  to += own * LD + at;
  if (first >= low && first + COUNT <= high) {
    EACH(i, ROWS) {
      copy_async(to + i * STEP * LD, from + i * STEP * X, true);
    }
  } else {
    EACH(i, ROWS) {
      const int row = first + own + i * STEP;
      const bool live = row >= low && row < high;
      copy_async(to + i * STEP * LD, live ? from + i * STEP * X : x, live);
    }
  }
}

// Whether threads come out even over the columns, and over COUNT rows.
template <typename T, int D, int COUNT, int THREADS>
inline constexpr bool even() {
  return THREADS % (D == 0 ? 1 : D * int(sizeof(T)) / 16) == 0 &&
         COUNT * D * int(sizeof(T)) / 16 % THREADS == 0;
}

// Rows of x [*, D1], X apart, and beside them of x2 [*, D2].
template <typename T, int D1, int D2, int LD, int COUNT, int THREADS, int X = D1>
inline void stage_rows(
    threadgroup T* to, const device T* x, const device T* x2, int first, int low, int high,
    uint index) {
  if (even<T, D1, COUNT, THREADS>() && even<T, D2, COUNT, THREADS>()) {
    stage_columns<T, D1, LD, COUNT, THREADS, X>(to, x, first, low, high, index);
    stage_columns<T, D2, LD, COUNT, THREADS>(to + D1, x2, first, low, high, index);
  } else {
    stage<T, D1, D2, LD, COUNT, THREADS, false, 0, 1, X>(to, x, x2, first, low, high, index);
  }
}

// q [B, HQ, T, D1], k [B, HKV, capacity, D1], v [B, HKV, capacity, DV]; beside them q2 [B, HQ, T, D2]
// and k2 [B, 1, capacity, D2], which heads share. If QH > 0 q is [B, T, QH, D1 + D2], and numbers[1]
// its first head; numbers[0]: by what scores are multiplied. ranges [B, 2]: first and past-the-last
// key of each sequence; query t sees keys below length - T + t + 1 if CAUSAL.
// Threadgroups: (parts of the keys, B * HQ, blocks of 16 R W rows from the last). GATE 3: writes
// sums that are not divided yet [B * HQ, parts, T, DV], and (maximum in base 2, sum of weights).
// Elements 2 i and 2 i + 1 of a tile_c are neighbours in a row.
template <typename T, int D1, int D2, int DV, int HQ, int HKV, int W, int R, int BN, int QH,
          bool CAUSAL, int GATE>
inline void attend_rows(
    const device T* q, const device T* q2, const device T* k, const device T* k2,
    const device T* v, const device T* gate, const device int* ranges,
    const device float* numbers, device T* y, device float* partial, device float* stats,
    threadgroup T* key_tile, threadgroup T* value_tile, threadgroup T* query_tile, int tokens,
    int capacity, uint3 position, uint3 counts, uint index) {
  constexpr int D = D1 + D2, M = 16 * R * W, LK = D + 8, LV = DV + 8, THREADS = 32 * W;
  constexpr int LQ = QH == 0 ? D1 : QH * D;
  const uint lane = index % 32;
  const int own = int(index / 32) * 16 * R, group = int(position.y);
  const int b = group / HQ, head = group % HQ;
  const int row0 = (int(counts.z) - 1 - int(position.z)) * M;
  const int length = ranges[2 * b + 1], before = CAUSAL ? length - tokens + 1 : length;
  if (QH == 0) {
    q += size_t(group) * tokens * D1;
  } else {
    q += size_t(b) * tokens * LQ + (int(numbers[1]) + head) * D;
  }
  q += size_t(row0) * LQ;
  q2 += (size_t(group) * tokens + row0) * D2;
  const size_t kv_row = size_t(b * HKV + head / (HQ / HKV)) * capacity;
  k += kv_row * D1;
  k2 += size_t(b) * capacity * D2;
  v += kv_row * DV;
  const int past = CAUSAL ? before + metal::min(row0 + M, tokens) - 1 : length;
  const key_range range = part_of(ranges[2 * b], past, BN, position.x, counts.x);
  const int low = range.low, high = range.high;
  const float to_base2 = numbers[0] * 1.44269504f;

  // One tile of rows stays in registers, of more each part is fetched when it is multiplied.
  tile_a<T> queries[R == 1 ? D / 16 : 1][R];
  if (R == 1) {
    for (int t = 0; t < M; t += BN) {
      stage_rows<T, D1, D2, LK, BN, THREADS, LQ>(key_tile, q, q2, t, 0, tokens - row0, index);
      arrive();
      if (own >= t && own < t + BN) {
        EACH(i, D / 16) {
          load_a(queries[i][0], key_tile + (own - t) * LK + 16 * i, LK, lane);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  } else {
    stage_rows<T, D1, D2, LK, M, THREADS, LQ>(query_tile, q, q2, 0, 0, tokens - row0, index);
  }
  tile_c sums[R][DV / 8];
  EACH(r, R) {
    EACH(n, DV / 8) {
      fill(sums[r][n], 0.0f);
    }
  }
  int limit[2 * R];
  float top[2 * R], total[2 * R];
  EACH(i, 2 * R) {
    const int row = row0 + own + i / 2 * 16 + sums[0][0].row(i % 2 * 2, lane);
    limit[i] = metal::min(CAUSAL ? before + row : length, high);
    top[i] = no_score();
    total[i] = 0.0f;
  }
  // Below it all rows of the simdgroup see every key.
  const int open = metal::min(CAUSAL ? before + row0 + own : length, high);

  stage_rows<T, D1, D2, LK, BN, THREADS>(key_tile, k, k2, low, low, high, index);
  for (int first = low; first < high; first += BN) {
    arrive();
    stage_rows<T, DV, 0, LV, BN, THREADS>(value_tile, v, v, first, low, high, index);
    copy_group();
    tile_c s[R][BN / 8];
    EACH(r, R) {
      EACH(n, BN / 8) {
        fill(s[r][n], 0.0f);
      }
    }
    EACH(i, D / 16) {
      const int kept = R == 1 ? i : 0;
      if (R > 1) {
        EACH(r, R) {
          load_a(queries[0][r], query_tile + (own + 16 * r) * LK + 16 * i, LK, lane);
        }
      }
      EACH(n, BN / 8) {
        tile_b<T> keys;
        load_b_t(keys, key_tile + 8 * n * LK + 16 * i, LK, lane);
        EACH(r, R) {
          mma(s[r][n], queries[kept][r], keys);
        }
      }
    }
    // The next keys come while weights are computed and values multiplied.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first + BN < high) {
      stage_rows<T, D1, D2, LK, BN, THREADS>(key_tile, k, k2, first + BN, low, high, index);
    }
    copy_group();
    if (first + BN > open) {
      EACH(r, R) {
        EACH(n, BN / 8) {
          EACH(j, 4) {
            if (first + 8 * n + s[r][n].col(j, lane) >= limit[2 * r + j / 2]) {
              s[r][n][j] = -INFINITY;
            }
          }
        }
      }
    }
    EACH(i, 2 * R) {
      const int r = i / 2, at = i % 2 * 2;
      float highest = -INFINITY;
      EACH(n, BN / 8) {
        highest = metal::max(highest, metal::max(s[r][n][at], s[r][n][at + 1]));
      }
      const float factor = raised(top[i], row_max(highest) * to_base2);
      total[i] *= factor;
      EACH(n, BN / 8) {
        EACH(e, 2) {
          const int j = at + e;
          s[r][n][j] = metal::fast::exp2(metal::fma(s[r][n][j], to_base2, -top[i]));
          total[i] += s[r][n][j];
        }
      }
      if (simd_any(factor != 1.0f)) {
        EACH(n, DV / 8) {
          sums[r][n][at] *= factor;
          sums[r][n][at + 1] *= factor;
        }
      }
    }
    arrive_but_newest();
    EACH(j, BN / 16) {
      tile_a<T> weights[R];
      EACH(r, R) {
        weights[r] = to_a<T>(s[r][2 * j], s[r][2 * j + 1]);
      }
      EACH(n, DV / 8) {
        tile_b<T> values;
        load_b(values, value_tile + 16 * j * LV + 8 * n, LV, lane);
        EACH(r, R) {
          mma(sums[r][n], weights[r], values);
        }
      }
    }
  }

  copy_wait();
  EACH(i, 2 * R) {
    total[i] = row_sum(total[i]);
    const int r = i / 2, j = i % 2 * 2, row = row0 + own + 16 * r + sums[r][0].row(j, lane);
    const size_t at = (size_t(group) * counts.x + position.x) * tokens + row;
    if (GATE == 3 && row < tokens && sums[r][0].col(0, lane) == 0) {
      stats[2 * at] = top[i];
      stats[2 * at + 1] = total[i];
    }
    const float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
    EACH(n, DV / 8) {
      const int column = 8 * n + sums[r][n].col(j, lane);
      if (row < tokens && GATE == 3) {
        store_pack(partial + at * DV + column, pack<float, 2>{sums[r][n][j], sums[r][n][j + 1]});
      } else if (row < tokens) {
        write_attended<T, DV, HQ, GATE, 2>(
            y, gate, {sums[r][n][j] * inverse, sums[r][n][j + 1] * inverse}, b, head, row, column,
            tokens);
      }
    }
  }
}
