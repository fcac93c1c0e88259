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
ALWAYS_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}

ALWAYS_INLINE Vec exp2(Vec t) {
  // The fraction (that of infinity is zero), then 2^fraction times 2^floor(t), which may overflow or vanish.
  const __m512 r = _mm512_reduce_ps(t.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(kExp2[4]);
  for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp2[i]));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return {_mm512_scalef_ps(p, t.v)};
}

ALWAYS_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
ALWAYS_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }

ALWAYS_INLINE __mmask16 first16(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
ALWAYS_INLINE void load(const float* p, Vec* a) { a[0] = load(p); }
ALWAYS_INLINE void load_n(const float* p, Vec* a, int n) { a[0] = {_mm512_maskz_loadu_ps(first16(n), p)}; }
ALWAYS_INLINE void store(float* p, const Vec* a) { store(p, a[0]); }
ALWAYS_INLINE void store_n(float* p, const Vec* a, int n) { _mm512_mask_storeu_ps(p, first16(n), a[0].v); }
ALWAYS_INLINE void stream(float* p, const Vec* a) { _mm512_stream_ps(p, a[0].v); }

// 32 bfloat16: those at even places are the lower halves of 16 words, those at odd places the upper ones.
ALWAYS_INLINE void widen(__m512i halves, Vec* a) {
  a[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(halves, 16))};
  a[1] = {_mm512_castsi512_ps(_mm512_and_si512(halves, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
// Rounded to nearest, ties to even, in the upper halves. NaN stays NaN, since only plain ones get here.
ALWAYS_INLINE __m512i rounded(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}
ALWAYS_INLINE __m512i narrow(const Vec* a) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(rounded(a[0]), 16), rounded(a[1]));
}
ALWAYS_INLINE __mmask32 first32(int n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1u); }
ALWAYS_INLINE void load(const bf16* p, Vec* a) { widen(_mm512_loadu_si512(p), a); }
ALWAYS_INLINE void load_n(const bf16* p, Vec* a, int n) { widen(_mm512_maskz_loadu_epi16(first32(n), p), a); }
ALWAYS_INLINE void store(bf16* p, const Vec* a) { _mm512_storeu_si512(p, narrow(a)); }
ALWAYS_INLINE void store_n(bf16* p, const Vec* a, int n) { _mm512_mask_storeu_epi16(p, first32(n), narrow(a)); }
ALWAYS_INLINE void stream(bf16* p, const Vec* a) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow(a)); }
ALWAYS_INLINE void stream_fence() { _mm_sfence(); }

// 16 elements, one after the other.
ALWAYS_INLINE Vec wide(const float* p) { return load(p); }
ALWAYS_INLINE Vec wide(const bf16* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16))};
}
ALWAYS_INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }

// Sums of products of whole numbers.
struct Whole {
  static constexpr int64_t size = 32;
  using Bytes = __m512i;  // widened to 16 bits
  __m512i v;
  static ALWAYS_INLINE Whole zero() { return {_mm512_setzero_si512()}; }
  static ALWAYS_INLINE Bytes bytes(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  ALWAYS_INLINE void add(Bytes w, const int16_t* x) {
    v = _mm512_add_epi32(v, _mm512_madd_epi16(w, _mm512_loadu_si512(x)));
  }
  ALWAYS_INLINE float total() const { return sum(Vec{_mm512_cvtepi32_ps(v)}); }
};

#include "kernel.inl"
#include "decode.inl"

}  // namespace

const undertow::Kernels undertow::kAvx512 = {"avx512", forward, backward, {arrange, product, scores, softmax, sums}};
