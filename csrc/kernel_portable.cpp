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
// Comparing with NaN is false, which leaves it.
ALWAYS_INLINE Vec at_most(Vec a, float bound) { return select(a.v > bound, Vec::set(bound), a); }

ALWAYS_INLINE Vec exp2(Vec t) {
  // Below 2^-126 the exponent's bits would wrap around.
  const Floats bounded = select(t.v < -126.0f, Vec::set(-126.0f), t).v;
  // Adding 1.5 * 2^23 leaves no bits for a fraction, and the whole part in the lowest ones.
  const Floats shifted = bounded + 12582912.0f;
  const Floats whole = shifted - 12582912.0f;
  const Floats r = bounded - whole;
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

ALWAYS_INLINE Vec load(const bf16* p) {
  return {(Floats)(Words{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16)};
}
// To nearest, ties to even; NaN stays NaN.
ALWAYS_INLINE void store(bf16* p, Vec a) {
  const Words bits = (Words)a.v, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Words nan = (Words)(a.v != a.v), out = ((rounded & ~nan) | (nan & 0x7fc00000u)) >> 16;
  for (int i = 0; i < Vec::lanes; ++i) p[i].bits = static_cast<uint16_t>(out[i]);
}

template <class E>
ALWAYS_INLINE Vec load_n(const E* p, int n) {
  E whole[Vec::lanes] = {};
  for (int i = 0; i < n; ++i) whole[i] = p[i];
  return load(whole);
}
template <class E>
ALWAYS_INLINE void store_n(E* p, Vec a, int n) {
  E whole[Vec::lanes];
  store(whole, a);
  for (int i = 0; i < n; ++i) p[i] = whole[i];
}
template <class E>
ALWAYS_INLINE void stream(E* p, Vec a) {
  store(p, a);
}
ALWAYS_INLINE void stream_fence() {}

#include "kernel.inl"

}  // namespace

const undertow::Kernels undertow::kPortable = {"portable", forward, backward};
