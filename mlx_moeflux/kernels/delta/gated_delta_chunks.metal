// The gated delta rule, chunk by chunk: the algebra of gated_delta_chunked in gated_delta.py. What
// does not depend on the state is computed first, for all chunks at once. For a chunk of C tokens,
// with G[l, i] = exp(log decay over (i, l]) and A[l, i] = beta_l G[l, i] (k_l . k_i):
//   M = (I + A)^-1 diag(beta),  P[l, i] = G[l, i] (q_l . k_i),  since_l = exp(decay up to l),
//   left_i = G[C - 1, i].
// Then every simdgroup walks the chunks with 16 rows of the state in registers:
//   U = (V - since K S^T) M^T,  y = since Q S^T + U P^T,  S = since_(C-1) S + (left U) K,
// all transposed, so that results are the left sides of the next products. X and Parts say how
// float matrices enter products: as tiles of float (Parts 1) or as two bfloats that sum to them
// up to 2^-17 (Parts 2; q and k are bfloat then, and enter exactly).

// ---- Rows of device memory on their way to threadgroup memory, in pieces of 16 bytes: of uint,
// because CUDA's compiler takes apart those of bfloat where a row may be missing

template <typename T, int Rows, int Cols, int Threads>
struct rows_in_flight {
  pack<uint, 4> at[(Rows * Cols * (int)sizeof(T) / 16 + Threads - 1) / Threads];
};

// Rows from `count` <= Rows on are zero.
template <typename T, int Rows, int Cols, int Threads>
inline void fetch(
    thread rows_in_flight<T, Rows, Cols, Threads>& rows, const device T* p, int stride, int count,
    uint index) {
  constexpr int N = 16 / sizeof(T), Row = Cols / N;
#pragma unroll
  for (int i = 0; i * Threads < Rows * Row; ++i) {
    const int n = i * Threads + index, row = n / Row;
    pack<uint, 4> piece = {{0, 0, 0, 0}};
    if (row < count) {
      piece = load_pack<4>((const device uint*)(p + (long)row * stride + n % Row * N));
    }
    rows.at[i] = piece;
  }
}

template <typename T, int Rows, int Cols, int Threads>
inline void put(
    const thread rows_in_flight<T, Rows, Cols, Threads>& rows, threadgroup T* p, int ld,
    uint index) {
  constexpr int N = 16 / sizeof(T), Row = Cols / N;
#pragma unroll
  for (int i = 0; i * Threads < Rows * Row; ++i) {
    const int n = i * Threads + index;
    if (n < Rows * Row) {
      store_pack((threadgroup uint*)(p + n / Row * ld + n % Row * N), rows.at[i]);
    }
  }
}

// ---- Products of float matrices

template <typename X, int Parts>
struct split_a {
  tile_a<X> part[Parts];
};

template <typename X, int Parts>
inline split_a<X, Parts> split(const thread tile_c& left, const thread tile_c& right) {
  split_a<X, Parts> a;
  a.part[0] = to_a<X>(left, right);
#pragma unroll
  for (int p = 1; p < Parts; ++p) {
    tile_c rest_left, rest_right;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rest_left.e[i] = left.e[i] - float(a.part[0].e[i]);
      rest_right.e[i] = right.e[i] - float(a.part[0].e[i + 4]);
    }
    a.part[p] = to_a<X>(rest_left, rest_right);
  }
  return a;
}

// By an exact right side.
template <typename X, int Parts>
inline void mma_split(
    thread tile_c& c, const thread split_a<X, Parts>& a, const thread tile_b<X>& b) {
#pragma unroll
  for (int p = Parts - 1; p >= 0; --p) {
    mma(c, a.part[p], b);
  }
}

// By the transpose of a lower triangular matrix of C columns: Parts planes of C rows of `ld`.
// c and a are its 8-column and 16-column pieces.
template <typename X, int Parts, int C>
inline void mma_triangular(
    thread tile_c* c, const thread split_a<X, Parts>* a, const threadgroup X* p, int ld,
    uint lane) {
#pragma unroll
  for (int n = 0; n < C / 8; ++n) {
#pragma unroll
    for (int k = 0; k <= n / 2; ++k) {
#pragma unroll
      for (int plane = Parts - 1; plane >= 0; --plane) {
        tile_b<X> b;
        load_b_t(b, p + (plane * C + 8 * n) * ld + 16 * k, ld, lane);
#pragma unroll
        for (int part = Parts - 1 - plane; part >= 0; --part) {
          mma(c[n], a[k].part[part], b);
        }
      }
    }
  }
}

// ---- Factors of a chunk, which need no state

// Two neighbours of a column to each of Parts planes of C rows of C.
template <typename X, int Parts, int C>
inline void put_factor(device X* p, float first, float second) {
#pragma unroll
  for (int plane = 0; plane < Parts; ++plane) {
    alignas(4) X pair[2];
    narrow(pair, first, second);
    p[plane * C * C] = pair[0];
    p[plane * C * C + C] = pair[1];
    first -= float(pair[0]);
    second -= float(pair[1]);
  }
}

// One value head: its lane i owns column i. `a` holds C rows of C + 4.
template <typename X, int Parts, int C>
inline void chunk_factors(
    float log_decay, float beta, const threadgroup float* kk, const threadgroup float* qk,
    threadgroup float* a, device X* m, device X* p, device float* since, device float* left,
    int lane) {
  constexpr int L = C + 4;
  const float total = metal::precise::exp(simd_prefix_inclusive_sum(log_decay));
  // a is kept transposed, so that a lane writes, and all read, neighbours; its diagonal is not
  // read.
  float between = 0.0f, decay = 0.0f;
#pragma unroll
  for (int l = 0; l < C; l += 4) {
    float decays[4], rates[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float step = simd_broadcast(log_decay, l + e);
      rates[e] = simd_broadcast(beta, l + e);
      between += l + e > lane ? step : 0.0f;
      decay = l + e < lane ? 0.0f : metal::precise::exp(between);
      decays[e] = decay;
    }
    if (lane < C) {
      pack<float, 4> four;
      float score[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        four.at[e] = rates[e] * decays[e] * kk[(l + e) * L + lane];
        score[e] = decays[e] * qk[(l + e) * L + lane];
      }
      store_pack(a + lane * L + l, four);
      put_factor<X, Parts, C>(p + l * C + lane, score[0], score[1]);
      put_factor<X, Parts, C>(p + (l + 2) * C + lane, score[2], score[3]);
    }
  }
  if (lane < C) {
    since[lane] = total;
    left[lane] = decay;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float x[C];
#pragma unroll
  for (int l = 0; l < C; ++l) {
    x[l] = l == lane ? 1.0f : 0.0f;
  }
#pragma unroll
  for (int l = 0; l < C; ++l) {
#pragma unroll
    for (int r = l / 4 * 4; r < C; r += 4) {
      const pack<float, 4> four = load_pack<4>(a + l * L + r);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (r + e > l) {
          x[r + e] -= four.at[e] * x[l];
        }
      }
    }
  }
  if (lane < C) {
#pragma unroll
    for (int l = 0; l < C; l += 2) {
      put_factor<X, Parts, C>(m + l * C + lane, x[l] * beta, x[l + 1] * beta);
    }
  }
}

// group: (0, chunk, sequence and key head). work: 2 C rows of Dk + 16 bytes of T, later one A for
// each simdgroup; scores: 2 C rows of C + 4.
template <
    typename T, typename X, int Parts, int Hk, int Hv, int Dk, int C, int Simdgroups, bool Masked,
    typename M>
inline void gated_delta_factors(
    const device T* q, const device T* k, const device float* log_decay, const device float* beta,
    const device M* mask, device X* factors, device float* gains, int tokens, int chunks,
    threadgroup float* work, threadgroup float* scores, uint3 group, uint index, uint lane,
    uint simdgroup) {
  constexpr int LK = Dk + 16 / sizeof(T), LC = C + 4, R = Hv / Hk, Threads = 32 * Simdgroups;
  const int b = group.z / Hk, hk = group.z % Hk, start = group.y * C;
  const int count = metal::min(C, tokens - start);
  const long first = (long)b * tokens + start;
  threadgroup T* rows = (threadgroup T*)work;
  rows_in_flight<T, C, Dk, Threads> moving;
  fetch(moving, k + (first * Hk + hk) * Dk, Hk * Dk, count, index);
  put(moving, rows, LK, index);
  fetch(moving, q + (first * Hk + hk) * Dk, Hk * Dk, count, index);
  put(moving, rows + C * LK, LK, index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // k k^T and q k^T, the tiles that reach the lower triangle.
  for (int task = simdgroup; task < C / 8; task += Simdgroups) {
    const int m = task / 2, which = task % 2;
    tile_c c[C / 8] = {};
#pragma unroll 2
    for (int d = 0; d < Dk; d += 16) {
      tile_a<T> left;
      load_a(left, rows + (which * C + 16 * m) * LK + d, LK, lane);
#pragma unroll
      for (int n = 0; n < C / 8; ++n) {
        if (n < 2 * m + 2) {
          tile_b<T> right;
          load_b_t(right, rows + 8 * n * LK + d, LK, lane);
          mma(c[n], left, right);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
      store(c[n], scores + (which * C + 16 * m) * LC + 8 * n, LC, lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int r = simdgroup; r < R; r += Simdgroups) {
    const int h = hk * R + r;
    const bool real = int(lane) < count && (!Masked || is_set(mask[first + lane]));
    const float g = real ? log_decay[(first + lane) * Hv + h] : 0.0f;
    const float rate = real ? beta[(first + lane) * Hv + h] : 0.0f;
    const long at = ((long)b * chunks + group.y) * Hv + h;
    device X* m = factors + at * 2 * Parts * C * C;
    device float* gain = gains + at * 2 * C;
    chunk_factors<X, Parts, C>(
        g, rate, scores, scores + C * LC, work + simdgroup * C * LC, m, m + Parts * C * C, gain,
        gain + C, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// ---- The walk over the chunks

template <typename T, typename X, int Parts, int Dk, int Rows, int C, int Threads>
struct chunk_in_flight {
  rows_in_flight<T, C, Dk, Threads> q, k;
  rows_in_flight<X, 2 * Parts * C, C, Threads> factors;
  rows_in_flight<T, C, Rows, Threads> v;
  rows_in_flight<float, 1, 2 * C, Threads> gains;
};

// group: (Rows = 16 Simdgroups rows of the state, sequence and value head, 0). Threadgroup memory:
// k then q, 2 C rows of Dk + pad; M then P, 2 Parts C rows of C + pad; v, C rows of Rows + pad;
// gains, 2 C floats; a pad is 16 bytes. With Prefetch the next chunk is read while one is
// computed.
template <
    typename T, typename X, int Parts, int Hk, int Hv, int Dk, int Dv, int C, int Simdgroups,
    bool Prefetch>
inline void gated_delta_walk(
    const device T* q, const device T* k, const device T* v, const device X* factors,
    const device float* gains, const device float* state, device T* y, device float* new_state,
    int tokens, int chunks, threadgroup T* keys, threadgroup X* lower, threadgroup T* values,
    threadgroup float* gain, uint3 group, uint index, uint lane, uint simdgroup) {
  constexpr int Rows = 16 * Simdgroups, Threads = 32 * Simdgroups, N = 16 / sizeof(T);
  constexpr int LK = Dk + N, LX = C + 16 / sizeof(X), LV = Rows + N;
  const int b = group.y / Hv, h = group.y % Hv, row = 16 * simdgroup;
  const long first = (long)b * tokens;
  q += (first * Hk + h / (Hv / Hk)) * Dk;
  k += (first * Hk + h / (Hv / Hk)) * Dk;
  v += (first * Hv + h) * Dv + group.x * Rows;
  y += (first * Hv + h) * Dv + group.x * Rows;
  factors += ((long)b * chunks * Hv + h) * 2 * Parts * C * C;
  gains += ((long)b * chunks * Hv + h) * 2 * C;
  const long at = ((long)group.y * Dv + group.x * Rows + row) * Dk;
  tile_c s[Dk / 8];
#pragma unroll
  for (int j = 0; j < Dk / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[j][i] = state[at + s[j].row(i, lane) * Dk + 8 * j + s[j].col(i, lane)];
    }
  }
  chunk_in_flight<T, X, Parts, Dk, Rows, C, Threads> moving;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int count = metal::min(C, tokens - chunk * C);
    if (!Prefetch || chunk == 0) {
      fetch(moving.k, k, Hk * Dk, count, index);
      fetch(moving.q, q, Hk * Dk, count, index);
      fetch(moving.factors, factors, C, 2 * Parts * C, index);
      fetch(moving.v, v, Hv * Dv, count, index);
      fetch(moving.gains, gains, 2 * C, 1, index);
    }
    put(moving.k, keys, LK, index);
    put(moving.q, keys + C * LK, LK, index);
    put(moving.factors, lower, LX, index);
    put(moving.v, values, LV, index);
    put(moving.gains, gain, 2 * C, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    q += C * Hk * Dk;
    k += C * Hk * Dk;
    v += C * Hv * Dv;
    factors += Hv * 2 * Parts * C * C;
    gains += Hv * 2 * C;
    if (Prefetch && chunk + 1 < chunks) {
      const int next = metal::min(C, tokens - (chunk + 1) * C);
      fetch(moving.k, k, Hk * Dk, next, index);
      fetch(moving.q, q, Hk * Dk, next, index);
      fetch(moving.factors, factors, C, 2 * Parts * C, index);
      fetch(moving.v, v, Hv * Dv, next, index);
      fetch(moving.gains, gains, 2 * C, 1, index);
    }
    tile_c u[C / 8] = {}, out[C / 8] = {};
#pragma unroll
    for (int j = 0; j < Dk / 16; ++j) {
      const split_a<X, Parts> a = split<X, Parts>(s[2 * j], s[2 * j + 1]);
#pragma unroll
      for (int n = 0; n < C / 8; ++n) {
        tile_b<X> right;
        load_b_t(right, keys + 8 * n * LK + 16 * j, LK, lane);
        mma_split(u[n], a, right);
        load_b_t(right, keys + (C + 8 * n) * LK + 16 * j, LK, lane);
        mma_split(out[n], a, right);
      }
    }
    split_a<X, Parts> a[C / 16];
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = 8 * n + u[n].col(i, lane);
        u[n][i] = float(values[t * LV + row + u[n].row(i, lane)]) - gain[t] * u[n][i];
        out[n][i] *= gain[t];
      }
    }
#pragma unroll
    for (int n = 0; n < C / 16; ++n) {
      a[n] = split<X, Parts>(u[2 * n], u[2 * n + 1]);
      fill(u[2 * n], 0.0f);
      fill(u[2 * n + 1], 0.0f);
    }
    mma_triangular<X, Parts, C>(u, a, lower, LX, lane);
#pragma unroll
    for (int n = 0; n < C / 16; ++n) {
      a[n] = split<X, Parts>(u[2 * n], u[2 * n + 1]);
    }
    mma_triangular<X, Parts, C>(out, a, lower + Parts * C * LX, LX, lane);
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = 8 * n + u[n].col(i, lane);
        values[t * LV + row + u[n].row(i, lane)] = T(out[n][i]);
        u[n][i] *= gain[C + t];
      }
    }
#pragma unroll
    for (int n = 0; n < C / 16; ++n) {
      a[n] = split<X, Parts>(u[2 * n], u[2 * n + 1]);
    }
    const float kept = gain[C - 1];
#pragma unroll
    for (int j = 0; j < Dk / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[j][i] *= kept;
      }
#pragma unroll
      for (int n = 0; n < C / 16; ++n) {
        tile_b<X> right;
        load_b(right, keys + 16 * n * LK + 8 * j, LK, lane);
        mma_split(s[j], a[n], right);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Where a thread reads y here, it alone puts the next v.
    for (int n = index; n < count * (Rows / N); n += Threads) {
      const int t = n / (Rows / N), c = n % (Rows / N) * N;
      store_pack(y + (long)t * Hv * Dv + c, load_pack<N>(values + t * LV + c));
    }
    y += C * Hv * Dv;
  }
#pragma unroll
  for (int j = 0; j < Dk / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      new_state[at + s[j].row(i, lane) * Dk + 8 * j + s[j].col(i, lane)] = s[j][i];
    }
  }
}
