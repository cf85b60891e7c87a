// What surrounds the delta rule, and for a few tokens all of it. Formulas: causal_conv.py,
// delta_gates.py, gated_delta.py; launches: delta_mixer_fused.py.
//
// Channels lie as q [Hk, Dk], k [Hk, Dk], v [Hv, Dv]. A simdgroup takes one head: every lane P
// neighbours of every 32 P channels.

// Rows of the window of a convolution, from `t` = 1 - W on: first the state, then the tokens,
// zero where masked. p, state: at the sequence and the head's first channel.
template <typename T, int W, int P, bool Masked, typename M>
inline pack<T, P> window_row(
    const device T* p, const device T* state, const device M* mask, int dims, int t) {
  if (t < 0) {
    return load_pack<P>(state + (t + W - 1) * dims);
  }
  pack<T, P> row = load_pack<P>(p + (long)t * dims);
  if (Masked && !is_set(mask[t])) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      row.at[i] = T(0.0f);
    }
  }
  return row;
}

// Unit length where Norm, then scaled.
template <bool Norm, int E>
inline void finish_head(thread float* x, float scale) {
  if (Norm) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < E; ++e) {
      squares += x[e] * x[e];
    }
    scale *= metal::precise::rsqrt(simd_sum(squares) + 1e-6f);
#pragma unroll
    for (int e = 0; e < E; ++e) {
      x[e] *= scale;
    }
  }
}

// log(1 + exp(x)) without loss where exp(x) is small.
inline float softplus(float x) {
  const float e = metal::precise::exp(-metal::abs(x)), u = 1.0f + e;
  const float log1p = u == 1.0f ? e : metal::precise::log(u) * (e / (u - 1.0f));
  return metal::max(x, 0.0f) + log1p;
}
template <typename A>
inline float log_decay_of(float a, A a_log, A dt_bias) {
  return -metal::precise::exp(float(a_log)) * softplus(a + float(dt_bias));
}

// ---- Prefill: Run tokens of one head

template <typename T, int W, int D, int P, int Run, bool Norm, bool Masked, typename V, typename M>
inline void convolve_run(
    const device T* p, const device T* state, const device V* weight, const device M* mask,
    device T* out, int dims, int out_dims, int from, int tokens, float scale, uint lane) {
  constexpr int J = D / (32 * P), E = D / 32;
  float taps[E][W];
  pack<T, P> rows[Run + W - 1][J];
#pragma unroll
  for (int j = 0; j < J; ++j) {
    const int c = (32 * j + lane) * P;
#pragma unroll
    for (int r = 0; r < Run + W - 1; ++r) {
      const int t = metal::min(from + r, tokens + W - 2) - (W - 1);
      rows[r][j] = window_row<T, W, P, Masked>(p + c, state + c, mask, dims, t);
    }
#pragma unroll
    for (int i = 0; i < P * W; ++i) {
      taps[j * P + i / W][i % W] = float(weight[c * W + i]);
    }
  }
#pragma unroll
  for (int r = 0; r < Run; ++r) {
    float x[E];
#pragma unroll
    for (int e = 0; e < E; ++e) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        total += float(rows[r + w][e / P].at[e % P]) * taps[e][w];
      }
      x[e] = silu(total);
    }
    finish_head<Norm, E>(x, scale);
    if (from + r < tokens) {
#pragma unroll
      for (int j = 0; j < J; ++j) {
        pack<T, P> packed;
#pragma unroll
        for (int i = 0; i < P; ++i) {
          packed.at[i] = T(x[j * P + i]);
        }
        store_pack(out + (long)(from + r) * out_dims + (32 * j + lane) * P, packed);
      }
    }
  }
}

// The new state: the W - 1 rows that end with the last token.
template <typename T, int W, int D, int P, bool Masked, typename M>
inline void keep_window(
    const device T* p, const device T* state, const device M* mask, device T* new_state, int dims,
    int length, uint lane) {
#pragma unroll
  for (int c = 0; c < D; c += 32 * P) {
#pragma unroll
    for (int w = 0; w < W - 1; ++w) {
      const int at = c + lane * P;
      store_pack(
          new_state + w * dims + at,
          window_row<T, W, P, Masked>(p + at, state + at, mask, dims, length + w - (W - 1)));
    }
  }
}

// position: (lane, head of q, k, v, then the gates, then unused, Run tokens of a sequence, then
// its state).
template <
    typename T, int Hk, int Hv, int Dk, int Dv, int W, int Pk, int Pv, int Run, bool Masked,
    bool Ragged, typename V, typename M, typename A>
inline void delta_prepare(
    const device T* qkv, const device T* state, const device V* weight, const device T* a,
    const device T* b, const device A* a_log, const device A* dt_bias, const device M* mask,
    const device int* lengths, device T* q, device T* k, device T* v, device float* log_decay,
    device float* beta, device T* new_state, int tokens, uint3 position, uint lane) {
  constexpr int dims = 2 * Hk * Dk + Hv * Dv;
  const int runs = (tokens + Run - 1) / Run, n = position.z / (runs + 1);
  const int from = position.z % (runs + 1) * Run, head = position.y;
  const bool is_key = head < 2 * Hk;
  const int channel = is_key ? head * Dk : 2 * Hk * Dk + (head - 2 * Hk) * Dv;
  qkv += (long)n * tokens * dims + channel;
  state += n * (W - 1) * dims + channel;
  mask += Masked ? n * tokens : 0;
  if (from >= runs * Run) {
    const int length = Ragged ? metal::clamp(lengths[n], 0, tokens) : tokens;
    new_state += n * (W - 1) * dims + channel;
    if (is_key) {
      keep_window<T, W, Dk, Pk, Masked>(qkv, state, mask, new_state, dims, length, lane);
    } else if (head < 2 * Hk + Hv) {
      keep_window<T, W, Dv, Pv, Masked>(qkv, state, mask, new_state, dims, length, lane);
    }
  } else if (is_key) {
    device T* out = head < Hk ? q + channel : k + channel - Hk * Dk;
    const float scale = head < Hk ? metal::precise::rsqrt(float(Dk)) : 1.0f;
    convolve_run<T, W, Dk, Pk, Run, true, Masked>(
        qkv, state, weight + channel * W, mask, out + (long)n * tokens * Hk * Dk, dims, Hk * Dk,
        from, tokens, scale, lane);
  } else if (head < 2 * Hk + Hv) {
    device T* out = v + (long)n * tokens * Hv * Dv + (head - 2 * Hk) * Dv;
    convolve_run<T, W, Dv, Pv, Run, false, Masked>(
        qkv, state, weight + channel * W, mask, out, dims, Hv * Dv, from, tokens, 1.0f, lane);
  } else if (head == 2 * Hk + Hv) {
    const int to = metal::min(from + Run, tokens);
    for (int i = from * Hv + lane; i < to * Hv; i += 32) {
      const long at = (long)n * tokens * Hv + i;
      const bool real = !Masked || is_set(mask[i / Hv]);
      const float g = log_decay_of(float(a[at]), a_log[i % Hv], dt_bias[i % Hv]);
      log_decay[at] = real ? g : 0.0f;
      beta[at] = real ? sigmoid(float(b[at])) : 0.0f;
    }
  }
}

// ---- Gated norm: a simdgroup takes a row

// The activation of an output's gate.
template <bool Sigmoid>
inline float gate_of(float z) {
  return Sigmoid ? sigmoid(z) : silu(z);
}

template <typename T, int D, int P, bool Sigmoid, typename U, typename V>
inline void gated_rms_norm(
    const device U* x, const device T* z, const device V* weight, device T* y, float epsilon,
    uint row, uint lane) {
  constexpr int J = D / (32 * P);
  const long first = (long)row * D;
  float value[D / 32], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < J; ++j) {
    const pack<U, P> packed = load_pack<P>(x + first + (32 * j + lane) * P);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      value[j * P + i] = float(packed.at[i]);
      squares += value[j * P + i] * value[j * P + i];
    }
  }
  const float scale = metal::precise::rsqrt(simd_sum(squares) / D + epsilon);
#pragma unroll
  for (int j = 0; j < J; ++j) {
    const int c = (32 * j + lane) * P;
    pack<T, P> gate = load_pack<P>(z + first + c);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const float g = float(gate.at[i]);
      gate.at[i] = T(value[j * P + i] * scale * float(weight[c + i]) * gate_of<Sigmoid>(g));
    }
    store_pack(y + first + c, gate);
  }
}

// ---- A few tokens: everything between the projections in one launch

// The same in gated_delta.metal: a kernel sees common.metal and its own file.
inline float eight_lanes_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  x += simd_shuffle_xor(x, 2);
  return x + simd_shuffle_xor(x, 4);
}

// One channel of one token: the convolution over rows `t` - W + 1 to `t`, and SiLU. p, state: at
// the sequence and the channel, rows `stride` and `dims` apart; those before the first token are
// the state.
template <typename T, int W, bool Masked, typename V, typename M>
inline float convolve(
    const device T* p, const device T* state, const device V* weight, const device M* mask,
    int stride, int dims, int t) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const int row = t + w + 1 - W;
    const float x = row < 0 ? state[(t + w) * dims] : p[row * stride];
    total += (Masked && row >= 0 && !is_set(mask[row]) ? 0.0f : x) * float(weight[w]);
  }
  return silu(total);
}

// A lane's part of a row of the state, or of q or k: four neighbours of every 32.
template <int E, typename P>
inline void load_row(thread float* x, P p, float scale) {
#pragma unroll
  for (int i = 0; i < E; i += 4) {
    const auto four = load_pack<4>(p + 8 * i);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[i + e] = four.at[e] * scale;
    }
  }
}

// The reverse of load_row for Rows rows, Apart numbers apart. p: At the lane's part of the first.
template <int Rows, int Apart, int E>
inline void store_rows(device float* p, const thread float s[Rows][E]) {
#pragma unroll
  for (int i = 0; i < Rows * E / 4; ++i) {
    const int r = i / (E / 4), e = i % (E / 4) * 4;
    const pack<float, 4> four = {{s[r][e], s[r][e + 1], s[r][e + 2], s[r][e + 3]}};
    store_pack(p + r * Apart + 8 * e, four);
  }
}

// A threadgroup of Simdgroups takes a value head: eight lanes hold a row of the state, Rows rows
// each. The lengths of q and k are known once all simdgroups have met: `token` holds q and k as
// they come out of the convolution, v, the sums of squares of 32 channels each, decay and beta.
// scratch: a float for each simdgroup. head: sequence and value head. Row: how far apart rows of
// qkv, z, a and b are, where they lie in one; else 0. Every: the states after each token are
// written, one behind the other; heads: sequences times value heads.
template <
    typename T, int Hk, int Hv, int Dk, int Dv, int W, int Row, int Simdgroups, bool Masked,
    bool Ragged, bool Sigmoid, bool Every, typename V, typename M, typename A, typename U>
inline void delta_step(
    const device T* qkv, const device T* conv, const device V* weight, const device T* z,
    const device T* a, const device T* b, const device A* a_log, const device A* dt_bias,
    const device float* state, const device U* norm, const device M* mask,
    const device int* lengths, device T* y, device T* new_conv, device float* new_state,
    float epsilon, int tokens, threadgroup float* token, threadgroup float* scratch, int head,
    int heads, int index) {
  constexpr int dims = 2 * Hk * Dk + Hv * Dv, R = Hv / Hk, N = Dk / 32, Own = 2 * Dk + Dv;
  constexpr int Threads = 32 * Simdgroups, Each = (Own + Threads - 1) / Threads;
  constexpr int Step = 4 * Simdgroups, Rows = Dv / Step, E = 4 * N;
  constexpr int stride = Row ? Row : dims;
  const int n = head / Hv, h = head % Hv, row = index / 8, col = index % 8 * 4;
  threadgroup float* squares = token + Own;
  threadgroup float* gates = squares + Own / 32;
  qkv += n * tokens * stride;
  conv += n * (W - 1) * dims;
  new_conv += n * (W - 1) * dims;
  mask += Masked ? n * tokens : 0;
  // The channels of this thread.
  int channel[Each];
  float x[Each];
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    const int c = metal::min(index + i * Threads, Own - 1), head = c / Dk * Hk + h / R;
    channel[i] = c < 2 * Dk ? head * Dk + c % Dk : 2 * (Hk - 1) * Dk + h * Dv + c;
    x[i] = convolve<T, W, Masked>(
        qkv + channel[i], conv + channel[i], weight + channel[i] * W, mask, stride, dims, 0);
  }
  float s[Rows][E];
  const long at = ((long)head * Dv + row) * Dk + col;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    load_row<E>(s[r], state + at + r * Step * Dk, 1.0f);
  }
  int length = Ragged ? metal::clamp(lengths[n], 0, tokens) : tokens;
  for (int left = Every ? tokens : 1; left > 0; --left) {
    length = Every ? left : length;
    device T* window = new_conv + (Every ? (left - 1) * (heads / Hv) * (W - 1) * dims : 0);
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int c = index + i * Threads;
      for (int w = length; c < Own && (h % R == 0 || c >= 2 * Dk) && w < length + W - 1; ++w) {
        const int from = w + 1 - W;
        const T kept = from < 0 ? conv[w * dims + channel[i]] : qkv[from * stride + channel[i]];
        window[(w - length) * dims + channel[i]] =
            Masked && from >= 0 && !is_set(mask[from]) ? T(0.0f) : kept;
      }
    }
  }
  for (int t = 0; t < tokens; ++t) {
    const int at_token = n * tokens + t, now = at_token * (Row ? Row : Hv) + h;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int c = index + i * Threads;
      const float sum = simd_sum(x[i] * x[i]);
      if (c < Own) {
        token[c] = x[i];
        if (c % 32 == 0) {
          squares[c / 32] = sum;
        }
      }
    }
    if (index == Threads - 1) {
      const float g = log_decay_of(float(a[now]), a_log[h], dt_bias[h]);
      gates[0] = Masked && !is_set(mask[t]) ? 1.0f : metal::precise::exp(g);
      gates[1] = Masked && !is_set(mask[t]) ? 0.0f : sigmoid(float(b[now]));
    }
    float gate[Rows];
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const int c = row + r * Step;
      const float g = float(z[at_token * (Row ? Row : Hv * Dv) + h * Dv + c]);
      gate[r] = float(norm[c]) * gate_of<Sigmoid>(g);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float q_squares = 1e-6f, k_squares = 1e-6f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      q_squares += squares[i];
      k_squares += squares[N + i];
    }
    float q[E], k[E], product = 0.0f, total = 0.0f, out[Rows];
    load_row<E>(q, token + col, metal::precise::rsqrt(q_squares * Dk));
    load_row<E>(k, token + Dk + col, metal::precise::rsqrt(k_squares));
#pragma unroll
    for (int i = 0; i < E; ++i) {
      product += q[i] * k[i];
    }
    product = eight_lanes_sum(product);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      float recalled = 0.0f, read = 0.0f;
#pragma unroll
      for (int i = 0; i < E; ++i) {
        s[r][i] *= gates[0];
        recalled += s[r][i] * k[i];
        read += s[r][i] * q[i];
      }
      const float old = eight_lanes_sum(recalled);
      const float delta = (token[2 * Dk + row + r * Step] - old) * gates[1];
      out[r] = eight_lanes_sum(read) + delta * product;
      total += col == 0 ? out[r] * out[r] : 0.0f;
#pragma unroll
      for (int i = 0; i < E; ++i) {
        s[r][i] += delta * k[i];
      }
    }
    total = simd_sum(total);
    if (index % 32 == 0) {
      scratch[index / 32] = total;
    }
    if (t + 1 < tokens) {
#pragma unroll
      for (int i = 0; i < Each; ++i) {
        const int c = channel[i];
        x[i] = convolve<T, W, Masked>(
            qkv + c, conv + c, weight + c * W, mask, stride, dims, t + 1);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    total = 0.0f;
    for (int i = 0; i < Simdgroups; ++i) {
      total += scratch[i];
    }
    const float scale = metal::precise::rsqrt(total / Dv + epsilon);
#pragma unroll
    for (int r = 0; r < Rows && col == 0; ++r) {
      y[(at_token * Hv + h) * Dv + row + r * Step] = T(out[r] * scale * gate[r]);
    }
    if (Every) {
      store_rows<Rows, Step * Dk, E>(new_state + at + (long)t * heads * Dv * Dk, s);
    }
  }
  if (!Every) {
    store_rows<Rows, Step * Dk, E>(new_state + at, s);
  }
}
