// Matrix times vector and one query's attention, over the vector type of an instruction set; see kernel.inl.

using undertow::Attention;
using undertow::Product;
using undertow::Stored;

ALWAYS_INLINE float number(float a) { return a; }
ALWAYS_INLINE float number(int8_t a) { return a; }
ALWAYS_INLINE float number(bf16 a) {
  const uint32_t bits = static_cast<uint32_t>(a.bits) << 16;
  float b;
  __builtin_memcpy(&b, &bits, sizeof b);
  return b;
}

// R rows of weights times N rows of x, each weight read once. A result does not depend on what it is computed beside.
template <int R, int N, class E>
ALWAYS_INLINE void dots(const E* w, int64_t w_row, const float* x, int64_t x_row, int64_t k, float (&y)[R][N]) {
  constexpr int U = R * N <= 4 ? 2 : 1;  // sums side by side, so that an addition need not wait for the one before
  Vec sums[R][N][U];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      for (int q = 0; q < U; ++q) sums[r][n][q] = Vec::set(0.0f);
  int64_t j = 0;
  for (; j + U * Vec::lanes <= k; j += U * Vec::lanes)
    for (int q = 0; q < U; ++q) {
      Vec xs[N];
      for (int n = 0; n < N; ++n) xs[n] = load(x + n * x_row + j + q * Vec::lanes);
      for (int r = 0; r < R; ++r) {
        const E* const place = w + r * w_row + j + q * Vec::lanes;
        prefetch(place + R * w_row);  // the next rows: the hardware does not follow where they are short
        const Vec ws = wide(place);
        for (int n = 0; n < N; ++n) sums[r][n][q] = fma(ws, xs[n], sums[r][n][q]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      Vec all = sums[r][n][0];
      if constexpr (U == 2) all = all + sums[r][n][1];
      float y_rn = sum(all);
      for (int64_t i = j; i < k; ++i) y_rn += number(w[r * w_row + i]) * x[n * x_row + i];
      y[r][n] = y_rn;
    }
}

template <int N, class E>
void product_rows(const Product& p, int64_t i, int64_t o0, int64_t o1) {
  constexpr int R = 4;
  const E* const weight = static_cast<const E*>(p.weight);
  const float* const x = p.x + i * p.in;
  float* const y = p.y + i * p.out;
  const auto put = [&](int64_t o, const float* values) {
    for (int n = 0; n < N; ++n) y[n * p.out + o] = p.scale ? values[n] * p.scale[o] : values[n];
  };
  int64_t o = o0;
  for (; o + R <= o1; o += R) {
    float results[R][N];
    dots<R, N>(weight + o * p.in, p.in, x, p.in, p.in, results);
    for (int r = 0; r < R; ++r) put(o + r, results[r]);
  }
  for (; o < o1; ++o) {
    float results[1][N];
    dots<1, N>(weight + o * p.in, p.in, x, p.in, p.in, results);
    put(o, results[0]);
  }
}

template <class E>
void product_of(const Product& p, int64_t o0, int64_t o1) {
  int64_t i = 0;
  for (; i + 4 <= p.rows; i += 4) product_rows<4, E>(p, i, o0, o1);
  for (; i < p.rows; ++i) product_rows<1, E>(p, i, o0, o1);
}

void product(const Product& p, int64_t o0, int64_t o1) {
  if (p.stored == Stored::int8) product_of<int8_t>(p, o0, o1);
  else if (p.stored == Stored::bfloat16) product_of<bf16>(p, o0, o1);
  else product_of<float>(p, o0, o1);
}

template <class E>
void scores_of(const Attention& p, int64_t n, int64_t s0, int64_t s1) {
  const E* const keys = static_cast<const E*>(p.keys) + n / p.H * p.keys_b + n % p.H * p.keys_h;
  for (int64_t s = s0; s < s1; ++s) {
    float result[1][1];
    dots<1, 1>(keys + s * p.keys_s, 0, p.q + n * p.e, 0, p.e, result);
    p.weights[n * p.S + s] = result[0][0];
  }
}

void scores(const Attention& p, int64_t n, int64_t s0, int64_t s1) {
  if (p.stored == Stored::bfloat16) scores_of<bf16>(p, n, s0, s1);
  else scores_of<float>(p, n, s0, s1);
}

void softmax(const Attention& p, int64_t n) {
  float* const w = p.weights + n * p.S;
  float most = w[0];
  for (int64_t s = 1; s < p.S; ++s) most = w[s] > most || w[s] != w[s] ? w[s] : most;
  const Vec log2e = Vec::set(-kMinusLog2e), top = Vec::set(most);
  float total = 0;
  int64_t s = 0;
  Vec totals = Vec::set(0.0f);
  for (; s + Vec::lanes <= p.S; s += Vec::lanes) {
    const Vec e = exp2((load(w + s) - top) * log2e);
    store(w + s, e);
    totals = totals + e;
  }
  if (s < p.S) {
    float rest[Vec::lanes];
    for (int i = 0; i < Vec::lanes; ++i) rest[i] = s + i < p.S ? w[s + i] : most;
    store(rest, exp2((load(rest) - top) * log2e));
    for (int i = 0; s + i < p.S; ++i) total += w[s + i] = rest[i];
  }
  total += sum(totals);
  for (s = 0; s < p.S; ++s) w[s] /= total;
}

// V vectors of columns, summed over all positions.
template <int V, class E>
ALWAYS_INLINE void columns(const E* values, int64_t row, const float* weights, int64_t S, float* out) {
  Vec totals[V];
  for (int v = 0; v < V; ++v) totals[v] = Vec::set(0.0f);
  for (int64_t s = 0; s < S; ++s) {
    const Vec weight = Vec::set(weights[s]);
    for (int v = 0; v < V; ++v) totals[v] = fma(weight, wide(values + s * row + v * Vec::lanes), totals[v]);
  }
  for (int v = 0; v < V; ++v) store(out + v * Vec::lanes, totals[v]);
}

template <class E>
void sums_of(const Attention& p, int64_t n, int64_t j0, int64_t j1) {
  const E* const values = static_cast<const E*>(p.values) + n / p.H * p.values_b + n % p.H * p.values_h;
  const float* const w = p.weights + n * p.S;
  float* const out = p.out + n * p.e;
  int64_t j = j0;
  for (; j + 8 * Vec::lanes <= j1; j += 8 * Vec::lanes) columns<8>(values + j, p.values_s, w, p.S, out + j);
  for (; j + Vec::lanes <= j1; j += Vec::lanes) columns<1>(values + j, p.values_s, w, p.S, out + j);
  for (; j < j1; ++j) {
    float total = 0;
    for (int64_t s = 0; s < p.S; ++s) total += w[s] * number(values[s * p.values_s + j]);
    out[j] = total;
  }
}

void sums(const Attention& p, int64_t n, int64_t j0, int64_t j1) {
  if (p.stored == Stored::bfloat16) sums_of<bf16>(p, n, j0, j1);
  else sums_of<float>(p, n, j0, j1);
}
