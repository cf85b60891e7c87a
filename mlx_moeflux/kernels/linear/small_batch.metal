// Products of some dozens of rows of x ("tokens") with matrices [out, in] as MLX stores them, in
// tiles: each weight is read once for all tokens of a threadgroup.
//
// A threadgroup owns 16 MT rows of a matrix and 8 NT tokens. Its W simdgroups share the columns: a
// step takes N neighbours of each of the 4 lanes that hold a row of a tile, so that a lane loads
// 16 bytes of a row at once, and a product's columns may be any, if they are the same on both
// sides. What a token gets does not depend on which others are there, nor on MT and NT.

// What a row of x goes through, with another beside it: nothing; times the norm's weight (the
// factor comes at the end); silu(x) other.
#define PLAIN 0
#define NORM 1
#define SWIGLU 2

// Which of 8 neighbours of a lane stand in columns e, e + 1 of half m of product s. 4-bit numbers
// go by pairs four apart, as two 16-bit halves of a word have them.
template <int BITS>
inline int place(int s, int m, int e) {
  return BITS == 4 ? 2 * s + m + 4 * e : 4 * s + 2 * m + e;
}

template <int FORM>
inline float formed(float x, float other) {
  return FORM == NORM ? x * other : FORM == SWIGLU ? silu(x) * other : x;
}

// Where token `first` + n is, no later than `last`; `listed` says it where LISTED.
template <bool LISTED>
inline ulong token_at(int n, int first, int last, const threadgroup uint* listed) {
  return LISTED ? listed[n] : metal::min(first + n, last);
}

// The right sides of two products: 8 neighbours from `at` on, N later for the next lane.
template <int NT, int IN, int BITS, int N, int FORM, bool LISTED, typename T, typename U>
inline void load_tokens(
    thread tile_b<T>* b,
    const device T* x,
    const device U* other,
    int first,
    int last,
    const threadgroup uint* listed,
    int at,
    uint lane) {
#ifdef MOEFLUX_CUDA
  at += fragment_col(lane) / 2 * N;
  pack<U, 8> beside;
  if (FORM == NORM) {
    beside = load_pack<8>(other + at);
  }
  for (int n = 0; n < NT; ++n) {
    const ulong from =
        token_at<LISTED>(8 * n + fragment_row(lane), first, last, listed) * IN + at;
    pack<T, 8> values = load_pack<8>(x + from);
    if (FORM == SWIGLU) {
      beside = load_pack<8>(other + from);
    }
    for (int i = 0; i < 8; i += 2) {
      const int s = i / 4, m = i / 2 % 2, p = place<BITS>(s, m, 0), q = place<BITS>(s, m, 1);
      if (FORM == PLAIN) {
        b[2 * n + s].e[2 * m] = values.at[p];
        b[2 * n + s].e[2 * m + 1] = values.at[q];
      } else {
        narrow(b[2 * n + s].e + 2 * m, formed<FORM>(float(values.at[p]), float(beside.at[p])),
               formed<FORM>(float(values.at[q]), float(beside.at[q])));
      }
    }
  }
#else
  for (int n = 0; n < NT; ++n) {
    for (int s = 0; s < 2; ++s) {
      for (int i = 0; i < 4; ++i) {
        const int k = b[2 * n + s].row(i, lane);
        const int column = at + k % 8 / 2 * N + place<BITS>(s, k / 8, k % 2);
        const int n8 = 8 * n + b[2 * n + s].col(i, lane);
        const ulong from = token_at<LISTED>(n8, first, last, listed) * IN + column;
        float beside = 0.0f;
        if (FORM != PLAIN) {
          beside = float(other[FORM == NORM ? ulong(column) : from]);
        }
        b[2 * n + s].e[i] = T(formed<FORM>(float(x[from]), beside));
      }
    }
  }
#endif
}

// N neighbours of a row as they are stored.
template <int V, typename Q, typename S>
struct stored {
  pack<Q, V> words;
  S scale, bias;
};

// A lane's part of two rows of each tile, 8 apart.
template <int MT, int IN, int BITS, int GROUP, int N, int V, typename Q, typename S>
inline void fetch_tile(
    thread stored<V, Q, S>* next,
    const device Q* w,
    const device S* scales,
    const device S* biases,
    int row,
    int last,
    int at,
    uint lane) {
  const int per = per_word<BITS>();
  at += fragment_col(lane) / 2 * N;
  for (int i = 0; i < 2 * MT; ++i) {
    const ulong from = metal::min(row + 8 * i + fragment_row(lane), last);
    next[i].words = load_pack<V>(w + from * (IN / per) + at / per);
    if (BITS != 0) {
      next[i].scale = scales[from * (IN / GROUP) + at / GROUP];
      next[i].bias = biases[from * (IN / GROUP) + at / GROUP];
    }
  }
}

// The left sides of two products: 8 neighbours, from the c-th of N / 8 on, of two rows.
template <int BITS, int V, typename T, typename Q, typename S>
inline void spread_tile(
    thread tile_a<T>* a, const thread stored<V, Q, S>* rows, int c) {
  const int per = per_word<BITS>();
  for (int h = 0; h < 2; ++h) {
#ifdef MOEFLUX_CUDA
    if constexpr (BITS == 4 && same<T, S>::value) {
      for (int p = 0; p < 4; ++p) {
        *(uint*)(a[p / 2].e + 4 * (p % 2) + 2 * h) =
            spread_pair(rows[h].words.at[c] >> (4 * p), rows[h].scale, rows[h].bias);
      }
      continue;
    }
#endif
    for (int i = 0; i < 8; ++i) {
      const int s = i / 4, m = i / 2 % 2, e = i % 2, at = 8 * c + place<BITS>(s, m, e);
      float value = number<BITS>(rows[h].words.at[at / per], at % per, 0.0f);
      if (BITS != 0) {
        value = metal::fma(float(rows[h].scale), value, float(rows[h].bias));
      }
      a[s].e[4 * m + 2 * h + e] = T(value);
    }
  }
}

// 1 / sqrt(mean x^2 + eps) of each token.
template <int NT, int W, int IN, typename T>
inline void inverse_roots(
    threadgroup float* inverse,
    const device T* x,
    float eps,
    int first,
    int tokens,
    uint simdgroup,
    uint lane) {
  for (int n = simdgroup; n < 8 * NT && first + n < tokens; n += W) {
    float square = 0.0f;
    for (int from = 8 * lane; from < IN; from += 8 * 256) {
      // Loads first: each takes longer than all that is done with them.
      pack<T, 8> parts[8];
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (from + 256 * j < IN) {
          parts[j] = load_pack<8>(x + ulong(first + n) * IN + from + 256 * j);
        }
      }
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        for (int i = 0; from + 256 * j < IN && i < 8; ++i) {
          square = metal::fma(float(parts[j].at[i]), float(parts[j].at[i]), square);
        }
      }
    }
    square = simd_sum(square);
    if (lane == 0) {
      inverse[n] = metal::precise::rsqrt(square / float(IN) + eps);
    }
  }
}

// The threadgroup's part of w form(x): the sums of simdgroup i for row r and token n are
// partial[(8 NT i + n) LD + r], LD = 16 MT + 4.
template <int MT, int NT, int W, int IN, int BITS, int GROUP, int V, int FORM, bool LISTED,
          typename T, typename U, typename Q, typename S>
inline void multiply_tile(
    threadgroup float* partial,
    const device T* x,
    const device U* other,
    const device Q* w,
    const device S* scales,
    const device S* biases,
    int row,
    int last_row,
    int first,
    int tokens,
    const threadgroup uint* listed,
    uint simdgroup,
    uint lane) {
  const int N = V * per_word<BITS>(), STEPS = IN / (4 * N), LD = 16 * MT + 4;
  tile_c acc[MT][NT];
  for (int i = 0; i < MT; ++i) {
    for (int n = 0; n < NT; ++n) {
      fill(acc[i][n], 0.0f);
    }
  }
  stored<V, Q, S> rows[2][2 * MT];
  if (int(simdgroup) < STEPS) {
    fetch_tile<MT, IN, BITS, GROUP, N>(
        rows[0], w, scales, biases, row, last_row, 4 * N * simdgroup, lane);
  }
  // More copies of the loop take longer to fetch than they save: weights push them out of caches.
  #pragma unroll 2
  for (int i = 0; i < (STEPS + W - 1) / W; ++i) {
    const int step = i * W + simdgroup;
    if (step < STEPS) {
      if (step + W < STEPS) {
        fetch_tile<MT, IN, BITS, GROUP, N>(
            rows[(i + 1) % 2], w, scales, biases, row, last_row, 4 * N * (step + W), lane);
      }
      #pragma unroll
      for (int c = 0; c < N / 8; ++c) {
        tile_b<T> b[2 * NT];
        load_tokens<NT, IN, BITS, N, FORM, LISTED>(
            b, x, other, first, tokens - 1, listed, 4 * N * step + 8 * c, lane);
        #pragma unroll
        for (int m = 0; m < MT; ++m) {
          tile_a<T> a[2];
          spread_tile<BITS>(a, rows[i % 2] + 2 * m, c);
          #pragma unroll
          for (int n = 0; n < NT; ++n) {
            mma(acc[m][n], a[0], b[2 * n]);
            mma(acc[m][n], a[1], b[2 * n + 1]);
          }
        }
      }
    }
  }
  partial += 8 * NT * simdgroup * LD;
  for (int m = 0; m < MT; ++m) {
    for (int n = 0; n < NT; ++n) {
      for (int i = 0; i < 4; ++i) {
        partial[(8 * n + acc[m][n].col(i, lane)) * LD + 16 * m + acc[m][n].row(i, lane)] =
            acc[m][n][i];
      }
    }
  }
}

template <int MT, int NT, int W>
inline float whole_sum(const threadgroup float* partial, int n, int row) {
  float total = 0.0f;
  for (int i = 0; i < W; ++i) {
    total += partial[(8 * NT * i + n) * (16 * MT + 4) + row];
  }
  return total;
}

// y[token, row ...] = (residual +) w form(x); y and residual are [tokens, out], row counts from
// the first of the `out` rows of w at `base`.
template <int MT, int NT, int W, int IN, int BITS, int GROUP, int V, int FORM, bool RESIDUAL,
          typename T, typename U, typename Q, typename S>
inline void project_rows(
    const device T* x,
    const device U* norm_weight,
    float eps,
    const device T* residual,
    const device Q* w,
    const device S* scales,
    const device S* biases,
    device T* y,
    threadgroup float* partial,
    threadgroup float* inverse,
    int base,
    int row,
    int out,
    int first,
    int tokens,
    uint index) {
  const uint simdgroup = index / 32, lane = index % 32;
  if (FORM == NORM) {
    inverse_roots<NT, W, IN>(inverse, x, eps, first, tokens, simdgroup, lane);
  }
  multiply_tile<MT, NT, W, IN, BITS, GROUP, V, FORM, false>(
      partial, x, norm_weight, w, scales, biases, base + row, base + out - 1, first, tokens,
      nullptr, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = index; p < 16 * MT * 8 * NT; p += 32 * W) {
    const int n = p / (16 * MT), r = p % (16 * MT);
    if (first + n < tokens && row + r < out) {
      const ulong at = ulong(first + n) * out + row + r;
      float total = whole_sum<MT, NT, W>(partial, n, r);
      if (FORM == NORM) {
        total *= inverse[n];
      }
      y[at] = T(RESIDUAL ? float(residual[at]) + total : total);
    }
  }
}

// y = norm(x) of 8 NT tokens.
template <int NT, int W, int IN, typename T, typename U>
inline void norm_rows(
    const device T* x,
    const device U* norm_weight,
    float eps,
    device T* y,
    threadgroup float* inverse,
    int first,
    int tokens,
    uint index) {
  inverse_roots<NT, W, IN>(inverse, x, eps, first, tokens, index / 32, index % 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int rows = metal::min(tokens - first, 8 * NT);
  for (int p = 8 * index; p < rows * IN; p += 8 * 32 * W) {
    const ulong at = ulong(first) * IN + p;
    pack<T, 8> part = load_pack<8>(x + at);
    pack<U, 8> scale = load_pack<8>(norm_weight + p % IN);
    for (int i = 0; i < 8; ++i) {
      part.at[i] = T(float(part.at[i]) * inverse[p / IN] * float(scale.at[i]));
    }
    store_pack(y + at, part);
  }
}

// y = residual + experts + sigmoid(score) w (silu(gate) up); no experts without ROUTED, and without
// SCORED the factor is 1.
template <int MT, int NT, int W, int IN, int OUT, int BITS, int GROUP, int V, bool ROUTED,
          bool SCORED, typename T, typename Q, typename S>
inline void add_shared_rows(
    const device T* residual,
    const device float* experts,
    const device T* gate,
    const device T* up,
    const device T* score,
    const device Q* w,
    const device S* scales,
    const device S* biases,
    device T* y,
    threadgroup float* partial,
    int row,
    int first,
    int tokens,
    uint index) {
  multiply_tile<MT, NT, W, IN, BITS, GROUP, V, SWIGLU, false>(
      partial, gate, up, w, scales, biases, row, OUT - 1, first, tokens, nullptr, index / 32,
      index % 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int p = index; p < 16 * MT * 8 * NT; p += 32 * W) {
    const int n = p / (16 * MT), r = p % (16 * MT);
    if (first + n < tokens && row + r < OUT) {
      const ulong at = ulong(first + n) * OUT + row + r;
      const float factor = SCORED ? sigmoid(float(score[first + n])) : 1.0f;
      const float before = float(residual[at]) + (ROUTED ? experts[at] : 0.0f);
      y[at] = T(before + factor * whole_sum<MT, NT, W>(partial, n, r));
    }
  }
}
