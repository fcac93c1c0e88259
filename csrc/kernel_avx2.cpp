// 8 floats in an AVX register. Compiled for processors that have AVX2 and FMA; never called on others.
#include <immintrin.h>

#include "recurrence.h"

namespace {

#include "vec.inl"

struct Vec {
  static constexpr int lanes = 8;
  __m256 v;
  static ALWAYS_INLINE Vec set(float a) { return {_mm256_set1_ps(a)}; }
};

ALWAYS_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
ALWAYS_INLINE Vec reciprocal(Vec a) { return {_mm256_div_ps(_mm256_set1_ps(1.0f), a.v)}; }
// Where one operand is NaN the instruction returns the second.
ALWAYS_INLINE Vec at_most(Vec a, float bound) { return {_mm256_min_ps(_mm256_set1_ps(bound), a.v)}; }
ALWAYS_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}

ALWAYS_INLINE Vec exp2(Vec t) {
  // Below 2^-126 the exponent's bits would wrap around.
  const __m256 bounded = _mm256_max_ps(_mm256_set1_ps(-126.0f), t.v);
  const __m256 whole = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 r = _mm256_sub_ps(bounded, whole);
  __m256 p = _mm256_set1_ps(kExp2[4]);
  for (int i = 3; i >= 0; --i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp2[i]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

ALWAYS_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

ALWAYS_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
ALWAYS_INLINE Vec load_n(const float* p, int n) { return {_mm256_maskload_ps(p, first(n))}; }
ALWAYS_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
ALWAYS_INLINE void store_n(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first(n), a.v); }
ALWAYS_INLINE void stream(float* p, Vec a) { _mm256_stream_ps(p, a.v); }

ALWAYS_INLINE Vec widen(__m128i half) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
// To nearest, ties to even; NaN stays NaN.
ALWAYS_INLINE __m128i narrow(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i out = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
}
ALWAYS_INLINE Vec load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
ALWAYS_INLINE Vec load_n(const bf16* p, int n) {
  bf16 whole[Vec::lanes] = {};
  for (int i = 0; i < n; ++i) whole[i] = p[i];
  return load(whole);
}
ALWAYS_INLINE void store(bf16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a)); }
ALWAYS_INLINE void store_n(bf16* p, Vec a, int n) {
  bf16 whole[Vec::lanes];
  store(whole, a);
  for (int i = 0; i < n; ++i) p[i] = whole[i];
}
ALWAYS_INLINE void stream(bf16* p, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow(a)); }
ALWAYS_INLINE void stream_fence() { _mm_sfence(); }

#include "kernel.inl"

}  // namespace

const undertow::Kernels undertow::kAvx2 = {"avx2", forward, backward};
