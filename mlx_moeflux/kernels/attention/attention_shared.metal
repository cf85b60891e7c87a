// A threadgroup owns 16 MT query rows of PACK heads that share a KV head; its simdgroups divide keys
// and value columns and exchange scores.
#include "attention.metal"

// As attend_rows, but rows are (head in the group of PACK) * T + token. Threadgroups: (parts, B * HQ / PACK, blocks of rows).
// LAYOUT says where the value rows of a tile lie: 0 in memory of their own, 1 in the keys' memory
// once the scores are done, 2 they are the first DV columns of the keys, and `tail_v` is of k2.
// PAGE: k [*, HKV, D1] and v are blocks of so many rows, and table [B, pages] says whose. CHOSEN: they
// are blocks of a sequence's own keys, from its first one on. The last number of a row of the table, c,
// is the block of the newest keys; it stands behind min(c, pages - 1) others. APART: A token gets the
// bits of a call by itself: those that come together share their keys out alike.
template <typename T, int D1, int D2, int DV, int HQ, int HKV, int PACK, int MT, int W, int BN,
          int LAYOUT, int TAIL, int PAGE, bool CAUSAL, int GATE, bool CHOSEN, bool APART>
inline void attend_shared(
    const device T* q, const device T* q2, const device T* k, const device T* k2,
    const device T* v, const device T* tail_k, const device T* tail_v, const device int* table,
    const device T* gate, const device int* ranges, const device float* scale, device T* y,
    device float* partial, device float* stats, threadgroup T* key_tile,
    threadgroup T* value_tile, threadgroup T* weights, threadgroup float* scores,
    threadgroup float* factors, int tokens, int capacity, uint3 position, uint3 counts,
    uint index, int pages) {
  constexpr int D = D1 + D2, M = 16 * MT, LK = D + 8, LV = LAYOUT == 2 ? LK : DV + 8;
  constexpr int LS = BN + 1, LP = BN + 8, THREADS = 32 * W, HEADS = CHOSEN ? 0 : HKV;
  // In the scores WN simdgroups share a row tile, NK 16-wide parts of D each; in the product with
  // the values a simdgroup owns all rows and NV tiles of columns. LANES neighbours own a row of
  // the softmax.
  constexpr int WN = W / MT, NK = (D / 16 + WN - 1) / WN, NV = DV / 8 / W;
  constexpr int LANES = 2 * WN, KEYS = BN / LANES;
  const uint lane = index % 32;
  const int w = int(index / 32), tile = w / WN, k0 = w % WN * NK;
  const int group = int(position.y), b = group / (HQ / PACK), head = group % (HQ / PACK) * PACK;
  const int rows = PACK * tokens, row0 = (int(counts.z) - 1 - int(position.z)) * M;
  const int origin = ranges[2 * b], newest = ranges[2 * b + 1];
  table += PAGE ? b * pages : 0;
  const int complete = CHOSEN ? table[pages - 1] : 0, taken = metal::min(complete, pages - 1);
  const int behind = newest - (complete - taken) * PAGE;
  const int length = CHOSEN ? metal::min(behind, origin + (taken + 1) * PAGE) : newest;
  const int before = CAUSAL ? length - tokens + 1 : length;
  const size_t q_row = size_t(b * HQ + head) * tokens;
  const size_t kv_head = head / (HQ / HKV);
  const size_t own_row = (b * HKV + kv_head) * capacity;
  const size_t kv_row = CHOSEN ? own_row + origin : PAGE ? kv_head : own_row;
  q += q_row * D1;
  q2 += q_row * D2;
  k += kv_row * D1;
  k2 += size_t(b) * capacity * D2;
  v += kv_row * DV;
  const int tail =
      TAIL ? (newest - 1) / metal::max(TAIL, 1) * TAIL - (CHOSEN ? origin : 0) : 0;
  tail_k += size_t(b * HKV + head / (HQ / HKV)) * TAIL * D1;
  tail_v += size_t(b * HKV + head / (HQ / HKV)) * TAIL * (LAYOUT == 2 ? D2 : DV);

  const int last_row = metal::min(row0 + M, rows) - 1;
  const bool one_head = row0 / tokens == last_row / tokens;
  const int mine = int(index) / LANES, part = int(index) % LANES, own = (row0 + mine) % tokens;
  const int sees = CAUSAL ? before + own : length;
  const float to_base2 = scale[0] * 1.44269504f;

  // Rows that are all there come at once, while the first keys are on their way.
  tile_a<T> queries[NK];
  const bool whole = row0 + M <= rows;
  EACH(t, MT) {
    if (!whole) {
      stage<T, D1, D2, LK, 16, THREADS>(key_tile, q, q2, row0 + 16 * t, 0, rows, index);
      arrive();
      EACH(i, NK) {
        if (t == tile && k0 + i < D / 16) {
          load_a(queries[i], key_tile + 16 * (k0 + i), LK, lane);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  // Tokens [begin, end), nearly always all.
  for (int begin = 0, end = tokens; begin < tokens; begin = end, end = tokens) {
    int past = CAUSAL ? before + (one_head ? last_row % tokens : tokens - 1) : length;
    if (APART) {
      const int share = share_of(origin, before + begin, BN, counts.x);
      while (share_of(origin, before + end - 1, BN, counts.x) != share) {
        --end;
      }
      past = before + end - 1;
    }
    const key_range range = part_of(origin, past, BN, position.x, counts.x);
    const int low = range.low, high = range.high;
    const bool takes = row0 + mine < rows && (!APART || (own >= begin && own < end));
    const int limit = takes ? metal::min(sees, high) : 0;
    float top = no_score(), total = 0.0f;
    tile_c sums[MT][NV];
    EACH(t, MT) {
      EACH(n, NV) {
        fill(sums[t][n], 0.0f);
      }
    }

    stage<T, D1, D2, LK, BN, THREADS, (TAIL > 0), PAGE, HEADS>(
        key_tile, k, k2, low, low, high, index, tail_k, tail, tail_v, table, origin);
    if (whole) {
      EACH(i, NK) {
        const int at = 16 * (k0 + i), from = row0 + 16 * tile;
        if (at < D1) {
          load_a(queries[i], q + from * D1 + at, D1, lane);
        } else if (at < D) {
          load_a(queries[i], q2 + from * D2 + at - D1, D2, lane);
        }
      }
    }
    for (int first = low; first < high; first += BN) {
      arrive();
      if (LAYOUT == 0) {
        stage<T, DV, 0, LV, BN, THREADS, (TAIL > 0), PAGE, HEADS>(
            value_tile, v, v, first, low, high, index, tail_v, tail, nullptr, table,
            origin);
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
        stage<T, DV, 0, LV, BN, THREADS, (TAIL > 0), PAGE, HEADS>(
            key_tile, v, v, first, low, high, index, tail_v, tail, nullptr, table,
            origin);
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
        stage<T, D1, D2, LK, BN, THREADS, (TAIL > 0), PAGE, HEADS>(
            key_tile, k, k2, first + BN, low, high, index, tail_k, tail, tail_v, table,
        origin);
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
        stage<T, D1, D2, LK, BN, THREADS, (TAIL > 0), PAGE, HEADS>(
            key_tile, k, k2, first + BN, low, high, index, tail_k, tail, tail_v, table,
        origin);
      }
    }

    arrive();
    for (int i = 1; i < LANES; i *= 2) {
      total += simd_shuffle_xor(total, ushort(i));
    }
    const size_t out_row = (size_t(group) * counts.x + position.x) * rows + row0;
    if (part == 0) {
      factors[mine] = total > 0.0f ? 1.0f / total : 0.0f;
      if (GATE == 3 && takes) {
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
          const bool taken = !APART || (row % tokens >= begin && row % tokens < end);
          if (row >= rows || !taken) {
            continue;
          }
          if (GATE == 3) {
            store_pack(partial + (out_row + at) * DV + column, pack<float, 2>{x0, x1});
          } else {
            write_attended<T, DV, HQ, GATE, 2>(
                y, gate, {x0 * factors[at], x1 * factors[at]}, b, head, row, column, tokens);
          }
        }
      }
    }
  }
}
