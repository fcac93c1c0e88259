// What an x86-64 processor, and the system on it, can do.
#pragma once

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <intrin.h>
#include <windows.h>
#endif

namespace undertow {

#if defined(_WIN32)

// The compiler's own answer, below, lies in a library that clang-cl does not link. Windows says what it keeps the
// registers of; what goes without new registers is asked of the processor.
inline bool has_avx2() {
  int a[4];
  __cpuid(a, 1);
  return IsProcessorFeaturePresent(40) && (a[2] >> 12 & 1);  // PF_AVX2_INSTRUCTIONS_AVAILABLE; FMA
}

inline bool has_avx512() {
  int a[4];
  __cpuidex(a, 7, 0);
  constexpr unsigned wanted = 1u << 17 | 1u << 30 | 1u << 31;  // DQ, BW, VL
  return IsProcessorFeaturePresent(41) && (static_cast<unsigned>(a[1]) & wanted) == wanted;  // PF_AVX512F_…
}

#else

inline bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

inline bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#endif

}  // namespace undertow
