// 16 floats in an AVX-512 register. Compiled for processors that have AVX-512 F, BW, DQ and VL; never called on others.
#include <immintrin.h>

#include "recurrence.h"

namespace {

#include "vec.inl"

struct Vec {
  static constexpr int lanes = 16;
  __m512 v;
  static ALWAYS_INLINE Vec set(float a) { return {_mm512_set1_ps(a)}; }
};

ALWAYS_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ALWAYS_INLINE Vec reciprocal(Vec a) { return {_mm512_div_ps(_mm512_set1_ps(1.0f), a.v)}; }
// Where one operand is NaN the instruction returns the second.
ALWAYS_INLINE Vec at_most(Vec a, float bound) { return {_mm512_min_ps(_mm512_set1_ps(bound), a.v)}; }
ALWAYS_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

ALWAYS_INLINE Vec exp2(Vec t) {
  const __m512 whole = _mm512_roundscale_ps(t.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(t.v, whole);
  __m512 p = _mm512_set1_ps(kExp2[4]);
  for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp2[i]));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return {_mm512_scalef_ps(p, whole)};
}

ALWAYS_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

ALWAYS_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
ALWAYS_INLINE Vec load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
ALWAYS_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
ALWAYS_INLINE void store_n(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
ALWAYS_INLINE void stream(float* p, Vec a) { _mm512_stream_ps(p, a.v); }

ALWAYS_INLINE Vec widen(__m256i half) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
// To nearest, ties to even; NaN stays NaN.
ALWAYS_INLINE __m256i narrow(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i out = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16));
}
ALWAYS_INLINE Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
ALWAYS_INLINE Vec load_n(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
ALWAYS_INLINE void store(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
ALWAYS_INLINE void store_n(bf16* p, Vec a, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(a)); }
ALWAYS_INLINE void stream(bf16* p, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
ALWAYS_INLINE void stream_fence() { _mm_sfence(); }

#include "kernel.inl"

}  // namespace

const undertow::Kernels undertow::kAvx512 = {"avx512", forward, backward};
