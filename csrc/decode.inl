// Matrix times vector and one query's attention, over the vector type of an instruction set; see kernel.inl.

using undertow::Arranged;
using undertow::Attention;
using undertow::Matrix;
using undertow::Stored;

ALWAYS_INLINE float number(float a) { return a; }
ALWAYS_INLINE float number(bf16 a) {
  const uint32_t bits = static_cast<uint32_t>(a.bits) << 16;
  float b;
  __builtin_memcpy(&b, &bits, sizeof b);
  return b;
}

// What a weight of type E is multiplied with: numbers, those for a block of bfloat16 in the order in which it is widened;
// for int8 whole numbers of 14 bits, of which the sums of 16,384 products (kInt8In) fit into the 8 or 16 counters.
template <class E>
struct With {
  using x = float;
};
template <>
struct With<int8_t> {
  using x = int16_t;
};
constexpr float kMostX = 8191.0f;

// Sums of one row of weights with one row of x, block by block.
template <class E>
struct Sum {
  static constexpr int64_t size = Pack<E>::size;
  Vec v[Pack<E>::n];
  ALWAYS_INLINE void clear() {
    for (Vec& a : v) a = Vec::set(0.0f);
  }
  ALWAYS_INLINE void add(const Pack<E>& w, const float* x) {
    for (int q = 0; q < Pack<E>::n; ++q) v[q] = fma(w.v[q], load(x + q * Vec::lanes), v[q]);
  }
  ALWAYS_INLINE static Pack<E> weights(const E* w) { return get<false>(w, 0); }
  ALWAYS_INLINE float total() const {
    Vec a = v[0];
    for (int q = 1; q < Pack<E>::n; ++q) a = a + v[q];
    return sum(a);
  }
  ALWAYS_INLINE static float one(E w, float x) { return number(w) * x; }
};
template <>
struct Sum<int8_t> {
  static constexpr int64_t size = Whole::size;
  Whole v;
  ALWAYS_INLINE void clear() { v = Whole::zero(); }
  ALWAYS_INLINE void add(Whole::Bytes w, const int16_t* x) { v.add(w, x); }
  ALWAYS_INLINE static Whole::Bytes weights(const int8_t* w) { return Whole::bytes(w); }
  ALWAYS_INLINE float total() const { return v.total(); }
  ALWAYS_INLINE static float one(int8_t w, int16_t x) { return static_cast<float>(w * x); }
};

Arranged arrange(const float* x, int64_t rows, int64_t in, Stored stored, float* room) {
  Arranged a{};
  for (int64_t n = 0; n < rows; ++n) a.factor[n] = 1.0f;
  a.x = stored == Stored::float32 ? x : room;
  constexpr int64_t size = Pack<bf16>::size, parts = Pack<bf16>::n;
  if (stored == Stored::bfloat16)
    for (int64_t n = 0; n < rows; ++n) {
      const float* const from = x + n * in;
      float* const to = room + n * in;
      int64_t j = 0;
      for (; j + size <= in; j += size)
        for (int64_t i = 0; i < size; ++i) to[j + i % parts * Vec::lanes + i / parts] = from[j + i];
      for (; j < in; ++j) to[j] = from[j];
    }
  if (stored == Stored::int8)
    for (int64_t n = 0; n < rows; ++n) {
      const float* const from = x + n * in;
      int16_t* const to = reinterpret_cast<int16_t*>(room) + n * in;
      float most = 0;
      bool finite = true;
      for (int64_t j = 0; j < in; ++j) {
        const float size = __builtin_fabsf(from[j]);
        most = size > most ? size : most;
        finite &= size <= 3.4e38f;
      }
      const float scale = most > 1e-30f ? kMostX / most : 0.0f;
      for (int64_t j = 0; j < in; ++j)
        to[j] = finite ? static_cast<int16_t>(from[j] * scale + (from[j] < 0 ? -0.5f : 0.5f)) : int16_t{0};
      a.factor[n] = !finite ? __builtin_nanf("") : scale > 0 ? most / kMostX : 0.0f;
    }
  return a;
}

// R rows of weights times N rows of x, each weight read once. A result does not depend on what it is computed beside.
template <int R, int N, class E>
ALWAYS_INLINE void dots(const E* w, int64_t w_row, const typename With<E>::x* x, int64_t x_row, int64_t k,
                        float (&y)[R][N]) {
  Sum<E> sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n].clear();
  int64_t j = 0;
  for (; j + Sum<E>::size <= k; j += Sum<E>::size)
    for (int r = 0; r < R; ++r) {
      const E* const place = w + r * w_row + j;
      prefetch(place + R * w_row);  // the next rows: the hardware does not follow where they are short
      const auto ws = Sum<E>::weights(place);
      for (int n = 0; n < N; ++n) sums[r][n].add(ws, x + n * x_row + j);
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float total = sums[r][n].total();
      for (int64_t i = j; i < k; ++i) total += Sum<E>::one(w[r * w_row + i], x[n * x_row + i]);
      y[r][n] = total;
    }
}

template <int N, class E>
void product_rows(const Matrix& m, const Arranged& a, int64_t i, float* y, int64_t o0, int64_t o1) {
  constexpr int R = 4;
  const E* const weight = static_cast<const E*>(m.weight);
  const auto* const x = static_cast<const typename With<E>::x*>(a.x) + i * m.in;
  const auto put = [&](int64_t o, const float* values) {
    const float scale = m.scale ? m.scale[o] : 1.0f;
    for (int n = 0; n < N; ++n) y[(i + n) * m.out + o] = values[n] * (a.factor[i + n] * scale);
  };
  int64_t o = o0;
  for (; o + R <= o1; o += R) {
    float results[R][N];
    dots<R, N>(weight + o * m.in, m.in, x, m.in, m.in, results);
    for (int r = 0; r < R; ++r) put(o + r, results[r]);
  }
  for (; o < o1; ++o) {
    float results[1][N];
    dots<1, N>(weight + o * m.in, m.in, x, m.in, m.in, results);
    put(o, results[0]);
  }
}

template <class E>
void product_of(const Matrix& m, const Arranged& a, int64_t rows, float* y, int64_t o0, int64_t o1) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) product_rows<4, E>(m, a, i, y, o0, o1);
  for (; i < rows; ++i) product_rows<1, E>(m, a, i, y, o0, o1);
}

void product(const Matrix& m, const Arranged& a, int64_t rows, float* y, int64_t o0, int64_t o1) {
  if (m.stored == Stored::int8) product_of<int8_t>(m, a, rows, y, o0, o1);
  else if (m.stored == Stored::bfloat16) product_of<bf16>(m, a, rows, y, o0, o1);
  else product_of<float>(m, a, rows, y, o0, o1);
}

template <class E>
void scores_of(const Attention& p, int64_t n, int64_t s0, int64_t s1) {
  const E* const keys = static_cast<const E*>(p.keys) + n / p.H * p.keys_b + n % p.H * p.keys_h;
  const float* const q = p.q + n * p.e;  // arranged
  for (int64_t s = s0; s < s1; ++s) {
    float result[1][1];
    dots<1, 1>(keys + s * p.keys_s, p.keys_s, q, 0, p.e, result);
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
