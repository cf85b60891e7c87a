// Attention of one token a sequence over a part of the positions, whose latents all heads share: a
// threadgroup owns 16 heads. Its simdgroups share the columns, of the scores' sums and of the
// result's, and exchange scores.
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

// A tile of positions from `first` on, which is in the tail as a whole or not at all.
template <typename T, int R, int DR, int LD, int BN, int THREADS>
inline void stage_tile(
    threadgroup T* to, const device T* latents, const device T* keys,
    const device T* tail_latents, const device T* tail_keys, int tail, key_range range, int first,
    int index) {
  const bool newest = first >= tail;
  const device T* const coming = newest ? tail_latents + (first - tail) * R : latents + first * R;
  const device T* const beside = newest ? tail_keys + (first - tail) * DR : keys + first * DR;
  stage_latents<T, R, DR, LD, BN, THREADS>(
      to, coming, beside, first, range.low, range.high, index);
}

// q [B, HEADS, R], q2 [B, HEADS, DR]; latents [B, capacity, R], keys [B, capacity, DR], of which the
// newest rows are in tails [B, TAIL, *]; -> partial [B, parts, HEADS, R], not divided by totals, and
// stats [B, parts, HEADS, 2]: tops and totals. tiles: BUFFERS of BN rows; with two the next comes
// while one is multiplied. Threadgroups: (parts, B, HEADS / 16).
template <typename T, int R, int DR, int HEADS, int W, int BN, int BUFFERS, int TAIL>
inline void attend_latents(
    const device T* q, const device T* q2, const device T* latents, const device T* keys,
    const device T* tail_latents, const device T* tail_keys, const device int* ranges,
    const device float* scale, device float* partial, device float* stats, threadgroup T* tiles,
    threadgroup T* weights, threadgroup float* scores, threadgroup float* factors, int capacity,
    uint3 position, uint3 counts, uint index) {
  constexpr int D = R + DR, LD = D + 8, LS = BN + 1, LP = BN + 8, THREADS = 32 * W;
  // Simdgroup w has every W-th tile of 16 columns of the scores' sums, and NV tiles of 8 of the
  // result's. LANES neighbours own a row of the softmax.
  constexpr int NK = (D / 16 + W - 1) / W, NV = R / 8 / W, LANES = THREADS / 16, KEYS = BN / LANES;
  const int lane = int(index % 32), w = int(index / 32), b = int(position.y);
  const int row0 = 16 * int(position.z), mine = int(index) / LANES, part = int(index) % LANES;
  const int length = ranges[2 * b + 1];
  const key_range range = part_of(ranges[2 * b], length, BN, position.x, counts.x);
  const int tail = (length - 1) / TAIL * TAIL;
  const float to_base2 = scale[0] * 1.44269504f;
  const size_t own = size_t(b) * HEADS + row0;
  latents += size_t(b) * capacity * R;
  keys += size_t(b) * capacity * DR;
  tail_latents += size_t(b) * TAIL * R;
  tail_keys += size_t(b) * TAIL * DR;
  threadgroup T* now = tiles;
  threadgroup T* then = tiles + (BUFFERS - 1) * BN * LD;
  float top = no_score(), total = 0.0f;

  // Queries come by way of a tile's place.
  stage_latents<T, R, DR, LD, 16, THREADS>(
      then, q + own * R, q2 + own * DR, 0, 0, 16, int(index));
  // Tiles begin at multiples of BN.
  const int begin = range.low / BN * BN;
  if (BUFFERS == 2 && begin < range.high) {
    stage_tile<T, R, DR, LD, BN, THREADS>(
        now, latents, keys, tail_latents, tail_keys, tail, range, begin, int(index));
  }
  arrive();
  tile_a<T> queries[NK];
  EACH(i, NK) {
    load_a(queries[i], then + metal::min(16 * (w + W * i), D - 16), LD, lane);
  }
  tile_c sums[NV];
  EACH(n, NV) {
    fill(sums[n], 0.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  #pragma unroll 1
  for (int first = begin; first < range.high; first += BN) {
    if (BUFFERS == 1 || first + BN < range.high) {
      stage_tile<T, R, DR, LD, BN, THREADS>(
          then, latents, keys, tail_latents, tail_keys, tail, range,
          first + (BUFFERS - 1) * BN, int(index));
    }
    if (BUFFERS == 1) {
      arrive();
    }
    // Every third product of a sum, apart: each would else wait for the one before.
    tile_c s[3][BN / 8];
    EACH(n, BN / 8) {
      EACH(c, 3) {
        fill(s[c][n], 0.0f);
      }
    }
    EACH(i, NK) {
      const int at = 16 * (w + W * i);
      if (16 * W * (i + 1) <= D || at < D) {
        EACH(n, BN / 8) {
          tile_b<T> columns;
          load_b_t(columns, now + 8 * n * LD + at, LD, lane);
          mma(s[i % 3][n], queries[i], columns);
        }
      }
    }
    EACH(n, BN / 8) {
      EACH(i, 4) {
        s[0][n][i] += s[1][n][i] + s[2][n][i];
      }
      store(s[0][n], scores + 16 * w * LS + 8 * n, LS, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float x[KEYS];
    float highest = no_score();
    EACH(i, KEYS) {
      const int key = part + LANES * i;
      float score = 0.0f;
      EACH(p, W) {
        score += scores[(16 * p + mine) * LS + key];
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

    const float above = factors[sums[0].row(0, lane)], below = factors[sums[0].row(2, lane)];
    EACH(n, NV) {
      EACH(i, 4) {
        sums[n][i] *= i < 2 ? above : below;
      }
    }
    EACH(j, BN / 16) {
      tile_a<T> left;
      load_a(left, weights + 16 * j, LP, lane);
      EACH(n, NV) {
        tile_b<T> right;
        load_b(right, now + 16 * j * LD + 8 * (NV * w + n), LD, lane);
        mma(sums[n], left, right);
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
  EACH(n, NV) {
    EACH(i, 2) {
      const int row = sums[n].row(2 * i, lane), column = 8 * (NV * w + n) + sums[n].col(2 * i, lane);
      store_pack(
          partial + (to + row) * R + column, pack<float, 2>{sums[n][2 * i], sums[n][2 * i + 1]});
    }
  }
}
