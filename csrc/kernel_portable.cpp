// 4 floats in the compiler's own vector type: SSE2, NEON or whatever the processor has.
#include <cstring>

#include "recurrence.h"

namespace {

#include "vec.inl"

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));

struct Vec {
  static constexpr int lanes = 4;
  Floats v;
  static ALWAYS_INLINE Vec set(float a) { return {Floats{a, a, a, a}}; }
};

ALWAYS_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
ALWAYS_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
ALWAYS_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
ALWAYS_INLINE Vec reciprocal(Vec a) { return {1.0f / a.v}; }
ALWAYS_INLINE Vec select(Ints where, Vec yes, Vec no) {
  return {(Floats)((where & (Ints)yes.v) | (~where & (Ints)no.v))};
}
ALWAYS_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return select(a.v < b.v, yes, no); }

ALWAYS_INLINE Vec exp2(Vec t) {
  // Within what the exponent's bits can say. Comparing with NaN is false, which leaves it.
  Vec bounded = select(t.v > 126.0f, Vec::set(126.0f), t);
  bounded = select(t.v < -126.0f, Vec::set(-126.0f), bounded);
  // Adding 1.5 * 2^23 leaves no bits for a fraction, and the whole part in the lowest ones; half less rounds down.
  const Floats shifted = (bounded.v - 0.5f) + 12582912.0f;
  const Floats r = bounded.v - (shifted - 12582912.0f);
  Floats p = Vec::set(kExp2[4]).v;
  for (int i = 3; i >= 0; --i) p = p * r + kExp2[i];
  p = p * r + 1.0f;
  const Words exponent = ((Words)shifted - 0x4b400000u + 127u) << 23;
  return {p * (Floats)exponent};
}

ALWAYS_INLINE Vec load(const float* p) {
  Vec a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
ALWAYS_INLINE void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
ALWAYS_INLINE void load(const float* p, Vec* a) { a[0] = load(p); }
ALWAYS_INLINE void store(float* p, const Vec* a) { store(p, a[0]); }

// 8 bfloat16: even places, then odd ones. Written for any order of bytes.
ALWAYS_INLINE void load(const bf16* p, Vec* a) {
  for (int q = 0; q < 2; ++q)
    a[q] = {(Floats)(Words{p[q].bits, p[2 + q].bits, p[4 + q].bits, p[6 + q].bits} << 16)};
}
// Rounded to nearest, ties to even. NaN stays NaN, since only plain ones get here.
ALWAYS_INLINE void store(bf16* p, const Vec* a) {
  for (int q = 0; q < 2; ++q) {
    const Words bits = (Words)a[q].v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    for (int i = 0; i < Vec::lanes; ++i) p[2 * i + q].bits = static_cast<uint16_t>(rounded[i]);
  }
}

template <class E>
ALWAYS_INLINE void load_n(const E* p, Vec* a, int n) {
  E whole[Vec::lanes * sizeof(float) / sizeof(E)] = {};
  for (int i = 0; i < n; ++i) whole[i] = p[i];
  load(whole, a);
}
template <class E>
ALWAYS_INLINE void store_n(E* p, const Vec* a, int n) {
  E whole[Vec::lanes * sizeof(float) / sizeof(E)];
  store(whole, a);
  for (int i = 0; i < n; ++i) p[i] = whole[i];
}
template <class E>
ALWAYS_INLINE void stream(E* p, const Vec* a) {
  store(p, a);
}
ALWAYS_INLINE void stream_fence() {}

// 4 elements, one after the other.
ALWAYS_INLINE Vec wide(const float* p) { return load(p); }
ALWAYS_INLINE Vec wide(const bf16* p) { return {(Floats)(Words{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16)}; }
ALWAYS_INLINE float sum(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }

// Sums of products of whole numbers.
struct Whole {
  static constexpr int64_t size = 8;
  using Bytes = const int8_t*;
  int32_t v[size];
  static ALWAYS_INLINE Whole zero() { return {}; }
  static ALWAYS_INLINE Bytes bytes(const int8_t* p) { return p; }
  ALWAYS_INLINE void add(Bytes w, const int16_t* x) {
    for (int i = 0; i < size; ++i) v[i] += w[i] * x[i];
  }
  ALWAYS_INLINE float total() const {
    float all = 0;
    for (int i = 0; i < size; ++i) all += static_cast<float>(v[i]);
    return all;
  }
};

#include "kernel.inl"
#include "decode.inl"

}  // namespace

const undertow::Kernels undertow::kPortable = {"portable", forward, backward, {arrange, product, scores, softmax, sums}};
