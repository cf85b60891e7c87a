// Products of few rows of x with matrices [out, in] as MLX stores them: numbers of BITS bits in
// words, the lowest first, with a scale and a bias for every GROUP neighbours. BITS = 0: floats.
//
// A simdgroup computes ROWS rows of a matrix. Its lanes share the columns: one takes V words, N
// numbers of one group, at a time, and needs the N values of x in registers.
//
// Where tiny floats are not flushed to zero, a number in the low bits of a word is a float by
// itself: 2^(at - 149) times what it says, `at` being its first bit. x carries 2^(100 - at), and
// the product is read for nothing. The sum loses what is below 2^-77, and terms that cancel in a
// group: so not for x of float (EXACT).

#ifdef MOEFLUX_CUDA
template <int BITS, bool EXACT>
inline constexpr bool reads_tiny() {
  return BITS != 0 && !EXACT;
}
#endif

// What the i-th of N values of x is multiplied with.
template <int BITS, bool EXACT>
inline float factor(int i) {
#ifdef MOEFLUX_CUDA
  return reads_tiny<BITS, EXACT>() ? as_type<float>(uint(227 - i * BITS % 16) << 23) : 1.0f;
#else
  return 1.0f;
#endif
}

// N columns of a row as they are stored.
template <int V, typename W, typename S>
struct slice {
  pack<W, V> words;
  S scale, bias;
};

// ONCE: CUDA is told that nobody else reads the words.
template <int ROWS, int IN, int BITS, int GROUP, bool ONCE = false, int V, typename W, typename S>
inline void fetch_rows(
    thread slice<V, W, S>* next,
    const device W* w,
    const device S* scales,
    const device S* biases,
    uint at) {
  const int per = per_word<BITS>();
  if (IN % (32 * V * per) == 0 || at < IN) {
    for (int r = 0; r < ROWS; ++r) {
#ifdef MOEFLUX_CUDA
      const device W* words = w + r * (IN / per) + at / per;
      next[r].words = ONCE ? load_once<V>(words) : load_pack<V>(words);
#else
      next[r].words = load_pack<V>(w + r * (IN / per) + at / per);
#endif
      if (BITS != 0) {
        next[r].scale = scales[r * (IN / GROUP) + at / GROUP];
        next[r].bias = biases[r * (IN / GROUP) + at / GROUP];
      }
    }
  }
}

// What a row's numbers are multiplied with until `scaled`: around zero, since the two terms of a
// group's sum would else cancel, or tiny.
template <int BITS, bool EXACT, typename W>
inline float as_read(W word, int i) {
#ifdef MOEFLUX_CUDA
  if (reads_tiny<BITS, EXACT>()) {
    return bare_number<BITS>(word, i);
  }
#endif
  return number<BITS>(word, i, float(1 << BITS >> 1));
}

// The product of a row's numbers and x, of what as_read gives: `dot`; sum: of the values of x.
template <int BITS, bool EXACT, int V, typename W, typename S>
inline float scaled(const thread slice<V, W, S>& row, float dot, float sum) {
  if (BITS == 0) {
    return dot;
  }
  float middle = float(1 << BITS >> 1), unit = 1.0f;
#ifdef MOEFLUX_CUDA
  if (reads_tiny<BITS, EXACT>()) {
    middle = 0.0f;
    unit = 562949953421312.0f;
  }
#endif
  const float scale = float(row.scale), bias = metal::fma(middle, scale, float(row.bias));
  return metal::fma(scale * unit, dot, bias * sum);
}

// acc[t * ROWS + r] += this lane's part of row r times that of token t, whose values of x lie behind
// those of token t - 1; sums: of each token's.
template <int ROWS, int BITS, bool EXACT, int TOKENS = 1, int V, typename W, typename S>
inline void add_rows(
    thread float* acc,
    const thread slice<V, W, S>* rows,
    const thread float* x,
    const thread float* sums) {
  const int per = per_word<BITS>();
  for (int r = 0; r < ROWS; ++r) {
    float dots[TOKENS] = {};
    for (int i = 0; i < V * per; ++i) {
      const float q = as_read<BITS, EXACT>(rows[r].words.at[i / per], i % per);
      for (int t = 0; t < TOKENS; ++t) {
        dots[t] = metal::fma(q, x[t * V * per + i], dots[t]);
      }
    }
    for (int t = 0; t < TOKENS; ++t) {
      acc[t * ROWS + r] += scaled<BITS, EXACT>(rows[r], dots[t], sums[t]);
    }
  }
}

// How many times 32 lanes take N of IN columns.
template <int IN, int N>
inline constexpr int steps() {
  return (IN + 32 * N - 1) / (32 * N);
}

// What a row goes through before it meets a matrix, with another row beside it: nothing;
// x other, with the sum of squares of x; silu(x) other.
#define PLAIN 0
#define NORM 1
#define SWIGLU 2

template <int FORM>
inline float formed(float x, float other, thread float& squares) {
  if (FORM == NORM) {
    squares = metal::fma(x, x, squares);
  }
  return FORM == PLAIN ? x : FORM == NORM ? x * other : silu(x) * other;
}

// Rows of x into threadgroup memory in the order in which lanes want them, four values at a time, and
// the sum of every lane's N. A row's values lie behind those of the row before, and so do its sums; rows
// of `other` are BESIDE apart. square: This thread's part of each sum of squares.
template <int IN, int BITS, bool EXACT, int N, int FORM, int TOKENS = 1, int BESIDE = 0, typename T,
          typename U>
inline void stage(
    threadgroup float* values,
    threadgroup float* sums,
    thread float* square,
    const device T* x,
    const device U* other,
    uint index,
    uint threads) {
  const int STAGED = steps<IN, N>() * 32;
  for (int t = 0; t < TOKENS; ++t) {
    square[t] = 0.0f;
  }
  for (uint p = index; p < STAGED * N / 4; p += threads) {
    const uint chunk = 4 * p / N, part = p % (N / 4), at = 4 * p;
    const bool there = IN % (32 * N) == 0 || at < IN;
    pack<T, 4> in[TOKENS];
    pack<U, 4> beside[TOKENS];
    for (int t = 0; there && t < TOKENS; ++t) {
      in[t] = load_pack<4>(x + t * IN + at);
      if (t == 0 || BESIDE > 0) {
        beside[t] = load_pack<4>(other + t * BESIDE + at);
      }
    }
    for (int t = 0; t < TOKENS; ++t) {
      pack<float, 4> out;
      float sum = 0.0f;
      for (int c = 0; there && c < 4; ++c) {
        const float with = float(beside[BESIDE > 0 ? t : 0].at[c]);
        const float value = formed<FORM>(float(in[t].at[c]), with, square[t]);
        sum += value;
        out.at[c] = value * factor<BITS, EXACT>(4 * part + c);
      }
      for (int m = 1; m < N / 4; m *= 2) {
        sum += simd_shuffle_xor(sum, m);
      }
      if (there) {
        const uint place = (chunk / 32 * (N / 4) + part) * 32 + chunk % 32;
        store_pack(values + t * STAGED * N + place * 4, out);
        if (part == 0) {
          sums[t * STAGED + chunk] = sum;
        }
      }
    }
  }
}

// Four of a staged row's values for a lane, from `first` on of a step's N.
template <int N>
inline pack<float, 4> take(const threadgroup float* values, int step, int first, uint lane) {
  return load_pack<4>(values + ((step * N + first) * 8 + lane) * 4);
}

// As add_rows, of staged tokens, APART values behind one another. Of one all values are in registers,
// of several four at a time (docs/notes/kernels.md).
template <int ROWS, int BITS, bool EXACT, int TOKENS, int APART, int V, typename W, typename S>
inline void add_staged(
    thread float* acc,
    const thread slice<V, W, S>* rows,
    const threadgroup float* values,
    const threadgroup float* sums,
    int step,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per;
  if (TOKENS == 1) {
    float x[N];
    for (int j = 0; j < N; j += 4) {
      const pack<float, 4> part = take<N>(values, step, j, lane);
      for (int c = 0; c < 4; ++c) {
        x[j + c] = part.at[c];
      }
    }
    const float sum = sums[step * 32 + lane];
    add_rows<ROWS, BITS, EXACT>(acc, rows, x, &sum);
    return;
  }
  float dots[TOKENS * ROWS] = {};
  for (int j = 0; j < N; j += 4) {
    pack<float, 4> x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) {
      x[t] = take<N>(values + t * APART, step, j, lane);
    }
    for (int r = 0; r < ROWS; ++r) {
      for (int i = j; i < j + 4; ++i) {
        const float q = as_read<BITS, EXACT>(rows[r].words.at[i / per], i % per);
        for (int t = 0; t < TOKENS; ++t) {
          dots[t * ROWS + r] = metal::fma(q, x[t].at[i - j], dots[t * ROWS + r]);
        }
      }
    }
  }
  for (int i = 0; i < TOKENS * ROWS; ++i) {
    const float sum = sums[i / ROWS * (APART / N) + step * 32 + lane];
    acc[i] += scaled<BITS, EXACT>(rows[i % ROWS], dots[i], sum);
  }
}

// N values of x as add_rows wants them; returns their sum.
template <int BITS, bool EXACT, int N, typename T>
inline float load_x(thread float* x, const device T* p) {
  const int most = 16 / sizeof(T), M = N < most ? N : most;
  float sum = 0.0f;
  for (int i = 0; i < N; i += M) {
    pack<T, M> part = load_pack<M>(p + i);
    for (int c = 0; c < M; ++c) {
      float value = float(part.at[c]);
      sum += value;
      x[i + c] = value * factor<BITS, EXACT>(i + c);
    }
  }
  return sum;
}

// ---- Simdgroups that share a row's columns: PARTS of them have SHARE times 32 N each

template <int IN, int N, int PARTS>
inline constexpr int share() {
  return (steps<IN, N>() + PARTS - 1) / PARTS;
}

// A lane's columns of form(x), from `first` on, as add_rows wants them, and their sums.
template <int SHARE, int N, int TOKENS = 1>
struct columns {
  float values[SHARE][TOKENS * N];
  float sums[SHARE][TOKENS];
  uint first;
};

// Those of token t. As many at a time as 16 bytes hold: lanes are N columns apart, and a request
// takes as long as they are many. Returns this lane's part of the sum of squares.
template <int PARTS, int IN, int BITS, bool EXACT, int FORM, int SHARE, int N, int TOKENS,
          typename T, typename U>
inline float take_columns(
    thread columns<SHARE, N, TOKENS>& own,
    const device T* x,
    const device U* other,
    uint part,
    uint lane,
    int t = 0) {
  const int M = sizeof(T) + sizeof(U) == 4 && N > 4 ? 8 : 4;
  float square = 0.0f;
  own.first = (part * SHARE * 32 + lane) * N;
  #pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const uint at = own.first + i * 32 * N;
    own.sums[i][t] = 0.0f;
    for (int j = 0; j < N; j += M) {
      if (PARTS * SHARE * 32 * N == IN || at < IN) {
        const pack<T, M> in = load_pack<M>(x + at + j);
        const pack<U, M> beside = load_pack<M>(other + at + j);
        for (int c = 0; c < M; ++c) {
          const float value = formed<FORM>(float(in.at[c]), float(beside.at[c]), square);
          own.sums[i][t] += value;
          own.values[i][t * N + j + c] = value * factor<BITS, EXACT>(j + c);
        }
      }
    }
  }
  return square;
}

#ifdef MOEFLUX_CUDA
// What fetch_rows reads comes closer.
template <int ROWS, int IN, int BITS, int GROUP, typename W, typename S>
inline void prefetch_rows(
    const device W* w, const device S* scales, const device S* biases, uint at) {
  for (int r = 0; r < ROWS; ++r) {
    prefetch(w + r * (IN / per_word<BITS>()) + at / per_word<BITS>());
    if (BITS != 0) {
      prefetch(scales + r * (IN / GROUP) + at / GROUP);
      prefetch(biases + r * (IN / GROUP) + at / GROUP);
    }
  }
}

// How many times M rows ahead part_of_rows lets rows come closer, 0 being not at all. H100, rows of
// 7168: 49 us for experts that took 51; with 3 simdgroups, and with 16 and more, it does not pay.
template <int PARTS>
inline constexpr int ahead() {
  return PARTS > 4 && PARTS < 16 ? 2 : 0;
}
// Whether words are read as ONCE says: 16384 -> 7168 in 26 us instead of 28.6; rows of 18432 gain
// nothing, narrower ones lose 5 %.
template <int PARTS>
inline constexpr bool reads_once() {
  return PARTS >= 16;
}
#else
template <int PARTS>
inline constexpr bool reads_once() {
  return false;
}
#endif

// partial[(t * ROWS + r) * STRIDE] = this simdgroup's part of row r times token t, for ROWS rows: M
// neighbours at a time, while those APART rows on are on their way.
template <int ROWS, int M, int APART, int PARTS, int STRIDE, int IN, int BITS, int GROUP, int V,
          bool EXACT, int SHARE, int N, int TOKENS, typename W, typename S>
inline void part_of_rows(
    threadgroup float* partial,
    const thread columns<SHARE, N, TOKENS>& own,
    const device W* w,
    const device S* scales,
    const device S* biases,
    uint lane) {
  const bool FULL = PARTS * SHARE * 32 * N == IN, ONCE = reads_once<PARTS>();
  slice<V, W, S> rows[M], next[M];
  if (FULL || own.first < IN) {
    fetch_rows<M, IN, BITS, GROUP, ONCE>(next, w, scales, biases, own.first);
  }
  #pragma unroll 1
  for (int r = 0; r < ROWS; r += M) {
    float acc[TOKENS * M] = {};
    #pragma unroll
    for (int i = 0; i < SHARE; ++i) {
      for (int j = 0; j < M; ++j) {
        rows[j] = next[j];
      }
      const uint at = own.first + i * 32 * N;
      uint after = at + 32 * N;
      if (i + 1 == SHARE) {
        after = own.first;
        w += ulong(APART) * (IN / per_word<BITS>());
        scales += APART * (IN / GROUP);
        biases += APART * (IN / GROUP);
      }
      if ((i + 1 < SHARE || r + M < ROWS) && (FULL || after < IN)) {
        fetch_rows<M, IN, BITS, GROUP, ONCE>(next, w, scales, biases, after);
      }
#ifdef MOEFLUX_CUDA
      const int AHEAD = ahead<PARTS>();
      if (AHEAD > 0 && r + AHEAD * M < ROWS && (FULL || at < IN)) {
        const ulong far = ulong(i + 1 == SHARE ? AHEAD - 1 : AHEAD) * APART;
        prefetch_rows<M, IN, BITS, GROUP>(
            w + far * (IN / per_word<BITS>()), scales + far * (IN / GROUP),
            biases + far * (IN / GROUP), at);
      }
#endif
      if (FULL || at < IN) {
        add_rows<M, BITS, EXACT, TOKENS>(acc, rows, own.values[i], own.sums[i]);
      }
    }
    for (int i = 0; i < TOKENS * M; ++i) {
      const float total = simd_sum(acc[i]);
      if (lane == 0) {
        partial[(i / M * ROWS + r + i % M) * STRIDE] = total;
      }
    }
  }
}

// ---- Narrow rows: IN / N lanes have one, a simdgroup 32 N / IN at a time

// The same from threadgroup memory.
template <int BITS, bool EXACT, int N>
inline float load_x(thread float* x, const threadgroup float* p) {
  float sum = 0.0f;
  for (int i = 0; i < N; i += 4) {
    pack<float, 4> part = load_pack<4>(p + i);
    for (int c = 0; c < 4; ++c) {
      sum += part.at[c];
      x[i + c] = part.at[c] * factor<BITS, EXACT>(i + c);
    }
  }
  return sum;
}

// How many times a simdgroup takes rows until it has ROWS.
template <int ROWS, int IN, int N>
inline constexpr int narrow_steps() {
  return ROWS * IN / (32 * N);
}

// A lane's parts of ROWS rows.
template <int ROWS, int IN, int BITS, int GROUP, int V, typename W, typename S>
inline void fetch_narrow(
    thread slice<V, W, S>* parts,
    const device W* w,
    const device S* scales,
    const device S* biases,
    uint lane) {
  const int per = per_word<BITS>(), N = V * per, LANES = IN / N;
  #pragma unroll
  for (int i = 0; i < narrow_steps<ROWS, IN, N>(); ++i) {
    const uint row = i * (32 / LANES) + lane / LANES;
    fetch_rows<1, IN, BITS, GROUP>(
        parts + i, w + row * (IN / per), scales + row * (IN / GROUP), biases + row * (IN / GROUP),
        lane % LANES * N);
  }
}

// y[row] = w x; own: this lane's N numbers of x.
template <int ROWS, int IN, int BITS, bool EXACT, int V, typename W, typename S, typename P,
          typename Y>
inline void multiply_narrow(const thread slice<V, W, S>* parts, P own, device Y* y, uint lane) {
  const int N = V * per_word<BITS>(), LANES = IN / N;
  float values[N];
  const float sum = load_x<BITS, EXACT, N>(values, own);
  #pragma unroll
  for (int i = 0; i < narrow_steps<ROWS, IN, N>(); ++i) {
    float acc[1] = {0.0f};
    add_rows<1, BITS, EXACT>(acc, parts + i, values, &sum);
    for (int mask = 1; mask < LANES; mask *= 2) {
      acc[0] += simd_shuffle_xor(acc[0], ushort(mask));
    }
    if (lane % LANES == 0) {
      y[i * (32 / LANES) + lane / LANES] = Y(acc[0]);
    }
  }
}
