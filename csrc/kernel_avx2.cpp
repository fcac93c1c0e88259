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
ALWAYS_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}

ALWAYS_INLINE Vec exp2(Vec t) {
  // Within what the exponent's bits can say. Where one operand is NaN these return the second.
  const __m256 bounded = _mm256_max_ps(_mm256_set1_ps(-126.0f), _mm256_min_ps(_mm256_set1_ps(126.0f), t.v));
  const __m256 whole = _mm256_floor_ps(bounded);
  const __m256 r = _mm256_sub_ps(bounded, whole);
  __m256 p = _mm256_set1_ps(kExp2[4]);
  for (int i = 3; i >= 0; --i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExp2[i]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

ALWAYS_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
ALWAYS_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }

ALWAYS_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
ALWAYS_INLINE void load(const float* p, Vec* a) { a[0] = load(p); }
ALWAYS_INLINE void load_n(const float* p, Vec* a, int n) { a[0] = {_mm256_maskload_ps(p, first(n))}; }
ALWAYS_INLINE void store(float* p, const Vec* a) { store(p, a[0]); }
ALWAYS_INLINE void store_n(float* p, const Vec* a, int n) { _mm256_maskstore_ps(p, first(n), a[0].v); }
ALWAYS_INLINE void stream(float* p, const Vec* a) { _mm256_stream_ps(p, a[0].v); }

// 16 bfloat16: those at even places are the lower halves of 8 words, those at odd places the upper ones.
ALWAYS_INLINE void load(const bf16* p, Vec* a) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  a[0] = {_mm256_castsi256_ps(_mm256_slli_epi32(halves, 16))};
  a[1] = {_mm256_castsi256_ps(_mm256_and_si256(halves, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
// Rounded to nearest, ties to even, in the upper halves. NaN stays NaN, since only plain ones get here.
ALWAYS_INLINE __m256i rounded(Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
ALWAYS_INLINE __m256i narrow(const Vec* a) {
  return _mm256_blend_epi16(_mm256_srli_epi32(rounded(a[0]), 16), rounded(a[1]), 0xaa);
}
ALWAYS_INLINE void store(bf16* p, const Vec* a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
ALWAYS_INLINE void stream(bf16* p, const Vec* a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
ALWAYS_INLINE void load_n(const bf16* p, Vec* a, int n) {
  bf16 whole[2 * Vec::lanes] = {};
  for (int i = 0; i < n; ++i) whole[i] = p[i];
  load(whole, a);
}
ALWAYS_INLINE void store_n(bf16* p, const Vec* a, int n) {
  bf16 whole[2 * Vec::lanes];
  store(whole, a);
  for (int i = 0; i < n; ++i) p[i] = whole[i];
}
ALWAYS_INLINE void stream_fence() { _mm_sfence(); }

// 8 elements, one after the other.
ALWAYS_INLINE Vec wide(const float* p) { return load(p); }
ALWAYS_INLINE Vec wide(const bf16* p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16))};
}
ALWAYS_INLINE float sum(Vec a) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// Sums of products of whole numbers.
struct Whole {
  static constexpr int64_t size = 16;
  using Bytes = __m256i;  // widened to 16 bits
  __m256i v;
  static ALWAYS_INLINE Whole zero() { return {_mm256_setzero_si256()}; }
  static ALWAYS_INLINE Bytes bytes(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  ALWAYS_INLINE void add(Bytes w, const int16_t* x) {
    v = _mm256_add_epi32(v, _mm256_madd_epi16(w, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
  }
  ALWAYS_INLINE float total() const { return sum(Vec{_mm256_cvtepi32_ps(v)}); }
};

#include "kernel.inl"
#include "decode.inl"

}  // namespace

const undertow::Kernels undertow::kAvx2 = {"avx2", forward, backward, {arrange, product, scores, softmax, sums}};
