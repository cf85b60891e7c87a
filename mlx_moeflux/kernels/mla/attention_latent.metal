// Attention of one token a sequence over a part of the positions, whose latents all heads share: a
// threadgroup owns 16 or 32 heads. Its simdgroups share positions and the columns of the scores'
// sums, then the columns of the result, and exchange scores.
#include "attention.metal"

// BN rows of latents [*, R] and beside them rotary keys [*, DR], the first of which is `first`, into
// rows of LD values; rows outside [low, high) are not read and become zeros.
template <typename T, int R, int DR, int LD, int BN, int THREADS>
inline void stage_latents(
    threadgroup T* to, const device T* latents, const device T* keys, int first, int low, int high,
    int index) {
  constexpr int WIDE = 16 / int(sizeof(T)), STEP = THREADS * WIDE;
  EACH(i, (BN * R + STEP - 1) / STEP) {
    const int at = index * WIDE + i * STEP, row = at / R;
    if (BN * R % STEP == 0 || at < BN * R) {
      copy_async(to + row * LD + at % R, latents + at, first + row >= low && first + row < high);
    }
  }
  EACH(i, (BN * DR + STEP - 1) / STEP) {
    const int at = index * WIDE + i * STEP, row = at / DR;
    if (BN * DR % STEP == 0 || at < BN * DR) {
      copy_async(to + row * LD + R + at % DR, keys + at, first + row >= low && first + row < high);
    }
  }
}

// As stage_latents, of the rows that `chosen` names from `first` on, each in the tail or not.
template <typename T, int R, int DR, int LD, int BN, int THREADS>
inline void stage_chosen(
    threadgroup T* to, const device T* latents, const device T* keys,
    const device T* tail_latents, const device T* tail_keys, int tail, const device int* chosen,
    key_range range, int first, int index) {
  constexpr int WIDE = 16 / int(sizeof(T)), CHUNKS = (R + DR) / WIDE;
  constexpr int EACH_HAS = (BN * CHUNKS + THREADS - 1) / THREADS;
  EACH(i, EACH_HAS) {
    const int chunk = index + i * THREADS, row = chunk / CHUNKS, at = chunk % CHUNKS * WIDE;
    if (BN * CHUNKS % THREADS == 0 || row < BN) {
      const bool live = first + row >= range.low && first + row < range.high;
      const int place = live ? chosen[first + row] : 0, newest = place - tail;
      const device T* from = newest >= 0 ? tail_latents + newest * R : latents + size_t(place) * R;
      const device T* beside = newest >= 0 ? tail_keys + newest * DR : keys + size_t(place) * DR;
      copy_async(to + row * LD + at, at < R ? from + at : beside + at - R, live);
    }
  }
}

// A tile of positions from `first` on, which is in the tail as a whole or not at all; or, with
// CHOSEN, of those that `chosen` names.
template <typename T, int R, int DR, int LD, int BN, int THREADS, bool CHOSEN>
inline void stage_tile(
    threadgroup T* to, const device T* latents, const device T* keys,
    const device T* tail_latents, const device T* tail_keys, int tail, const device int* chosen,
    key_range range, int first, int index) {
  if (CHOSEN) {
    stage_chosen<T, R, DR, LD, BN, THREADS>(
        to, latents, keys, tail_latents, tail_keys, tail, chosen, range, first, index);
    return;
  }
  const bool newest = first >= tail;
  const device T* const coming = newest ? tail_latents + (first - tail) * R : latents + first * R;
  const device T* const beside = newest ? tail_keys + (first - tail) * DR : keys + first * DR;
  stage_latents<T, R, DR, LD, BN, THREADS>(
      to, coming, beside, first, range.low, range.high, index);
}

// q [B, HEADS, R], q2 [B, HEADS, DR]; latents [B, capacity, R], keys [B, capacity, DR], of which the
// newest rows are in tails [B, TAIL, *]; -> partial [B, parts, HEADS, R], not divided by totals, and
// stats [B, parts, HEADS, 2]: tops and totals. tiles: BUFFERS of BN rows, 16 MT at least; with two
// the next comes while one is multiplied. Threadgroups: (parts, B, HEADS / (16 MT)). With CHOSEN the
// positions are the first of a row of chosen [B, CHOSEN], as many as there are up to the token; and B
// counts tokens, of which a sequence's last TOKENS are neighbours.
template <typename T, int R, int DR, int HEADS, int MT, int W, int WC, int BN, int BUFFERS,
          int TAIL, int CHOSEN, int TOKENS>
inline void attend_latents(
    const device T* q, const device T* q2, const device T* latents, const device T* keys,
    const device T* tail_latents, const device T* tail_keys, const device int* chosen,
    const device int* ranges, const device float* scale, device float* partial, device float* stats, threadgroup T* tiles,
    threadgroup T* weights, threadgroup float* scores, threadgroup float* factors, int capacity,
    uint3 position, uint3 counts, uint index) {
  constexpr int D = R + DR, LD = D + 8, LS = BN + 1, LP = BN + 8, THREADS = 32 * W, M = 16 * MT;
  // In the scores simdgroup w has NS tiles of 8 positions and, of their sums, every WC-th tile of 16
  // columns; of the result NV tiles of 8 columns. LANES neighbours own a row of the softmax.
  constexpr int NS = BN / 8 * WC / W, NK = (D / 16 + WC - 1) / WC, NV = R / 8 / W;
  constexpr int LANES = THREADS / M, KEYS = BN / LANES;
  // So many products of a sum apart: each would else wait for the one before.
  constexpr int APART = MT * NS > 2 ? 2 : 3;
  const int lane = int(index % 32), w = int(index / 32), b = int(position.y);
  const int own_columns = 16 * (w % WC), own_keys = w / WC * (8 * NS);
  const int row0 = M * int(position.z), mine = int(index) / LANES, part = int(index) % LANES;
  const int sequence = b / TOKENS, length = ranges[2 * sequence + 1];
  const int own_length = length - (TOKENS - 1 - b % TOKENS) - ranges[2 * sequence];
  const int start = CHOSEN > 0 ? 0 : ranges[2 * sequence];
  const int end = CHOSEN > 0 ? metal::min(metal::max(own_length, 1), CHOSEN) : length;
  const key_range range = part_of(start, end, BN, position.x, counts.x);
  const int tail = TAIL > 0 ? (length - 1) / metal::max(TAIL, 1) * TAIL : length;
  const float to_base2 = scale[0] * 1.44269504f;
  const size_t own = size_t(b) * HEADS + row0;
  latents += size_t(sequence) * capacity * R;
  keys += size_t(sequence) * capacity * DR;
  tail_latents += size_t(sequence) * TAIL * R;
  tail_keys += size_t(sequence) * TAIL * DR;
  chosen += size_t(b) * CHOSEN;
  threadgroup T* now = tiles;
  threadgroup T* then = tiles + (BUFFERS - 1) * BN * LD;
  float top = no_score(), total = 0.0f;

  // Queries come by way of a tile's place.
  stage_latents<T, R, DR, LD, M, THREADS>(then, q + own * R, q2 + own * DR, 0, 0, M, int(index));
  // Tiles begin at multiples of BN.
  const int begin = range.low / BN * BN;
  if (BUFFERS == 2 && begin < range.high) {
    stage_tile<T, R, DR, LD, BN, THREADS, (CHOSEN > 0)>(
        now, latents, keys, tail_latents, tail_keys, tail, chosen, range, begin, int(index));
  }
  arrive();
  tile_a<T> queries[MT][NK];
  EACH(m, MT) {
    EACH(i, NK) {
      const int at = metal::min(own_columns + 16 * WC * i, D - 16);
      load_a(queries[m][i], then + 16 * m * LD + at, LD, lane);
    }
  }
  tile_c sums[MT][NV];
  EACH(m, MT) {
    EACH(n, NV) {
      fill(sums[m][n], 0.0f);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  #pragma unroll 1
  for (int first = begin; first < range.high; first += BN) {
    if (BUFFERS == 1 || first + BN < range.high) {
      stage_tile<T, R, DR, LD, BN, THREADS, (CHOSEN > 0)>(
          then, latents, keys, tail_latents, tail_keys, tail, chosen, range,
          first + (BUFFERS - 1) * BN, int(index));
    }
    if (BUFFERS == 1) {
      arrive();
    }
    tile_c s[APART][MT][NS];
    EACH(c, APART) {
      EACH(m, MT) {
        EACH(n, NS) {
          fill(s[c][m][n], 0.0f);
        }
      }
    }
    EACH(i, NK) {
      const int at = own_columns + 16 * WC * i;
      if (16 * WC * (i + 1) <= D || at < D) {
        EACH(n, NS) {
          tile_b<T> columns;
          load_b_t(columns, now + (own_keys + 8 * n) * LD + at, LD, lane);
          EACH(m, MT) {
            mma(s[i % APART][m][n], queries[m][i], columns);
          }
        }
      }
    }
    EACH(m, MT) {
      EACH(n, NS) {
        EACH(i, 4) {
          for (int c = 1; c < APART; ++c) {
            s[0][m][n][i] += s[c][m][n][i];
          }
        }
        store(s[0][m][n], scores + (own_columns * MT + 16 * m) * LS + own_keys + 8 * n, LS, lane);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float x[KEYS];
    float highest = no_score();
    EACH(i, KEYS) {
      const int key = part + LANES * i;
      float score = 0.0f;
      EACH(p, WC) {
        score += scores[(M * p + mine) * LS + key];
      }
      const bool seen = first + key >= range.low && first + key < range.high;
      x[i] = seen ? score * to_base2 : -INFINITY;
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
    threadgroup_barrier(mem_flags::mem_threadgroup);

    EACH(m, MT) {
      const float above = factors[16 * m + sums[m][0].row(0, lane)];
      const float below = factors[16 * m + sums[m][0].row(2, lane)];
      EACH(n, NV) {
        EACH(i, 4) {
          sums[m][n][i] *= i < 2 ? above : below;
        }
      }
    }
    EACH(j, BN / 16) {
      tile_a<T> left[MT];
      EACH(m, MT) {
        load_a(left[m], weights + 16 * m * LP + 16 * j, LP, lane);
      }
      EACH(n, NV) {
        tile_b<T> right;
        load_b(right, now + 16 * j * LD + 8 * (NV * w + n), LD, lane);
        EACH(m, MT) {
          mma(sums[m][n], left[m], right);
        }
      }
    }
    arrive();
    threadgroup T* const done = now;
    now = then;
    then = done;
  }

  for (int i = 1; i < LANES; i *= 2) {
    total += simd_shuffle_xor(total, ushort(i));
  }
  const size_t to = (size_t(b) * counts.x + position.x) * HEADS + row0;
  if (part == 0) {
    store_pack(stats + 2 * (to + mine), pack<float, 2>{top, total});
  }
  EACH(m, MT) {
    EACH(n, NV) {
      EACH(i, 2) {
        const int row = 16 * m + sums[m][n].row(2 * i, lane);
        const int column = 8 * (NV * w + n) + sums[m][n].col(2 * i, lane);
        store_pack(
            partial + (to + row) * R + column,
            pack<float, 2>{sums[m][n][2 * i], sums[m][n][2 * i + 1]});
      }
    }
  }
}
