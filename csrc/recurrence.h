// The elementwise recurrence of SRU and SRU++: what a call is made of, and who can serve it.
//
//   f = sigmoid(u1 + v_f c + b_f)      r = sigmoid(u2 + v_r c + b_r)
//   c' = f c + (1 - f) u0              h = x' + m r (g(c') - x'),  x' = scale * x
//
// Elementwise over rows (B) and hidden units (d), sequential over time (T).
#pragma once

#include <cstdint>

#include "decode.h"

namespace undertow {

enum class Dtype : int { float32 = 0, bfloat16 = 1 };
enum class Highway : int { none = 0, x = 1, u3 = 2 };

// Steps between two saved states. The backward pass starts from them and computes anew what lies between: cheaper than
// saving every state, since the gates are needed again anyway and the chunk stays in the cache.
constexpr int64_t kChunk = 16;

// The state before step 0, kChunk, 2 kChunk, ... up to T, in the order in which steps are taken, then the last state.
// (Never fewer than two rows: compilers of torch programs take sizes 0 and 1 for special and would compile for each.)
constexpr int64_t saved_rows(int64_t T) { return T / kChunk + 2; }

// Strides count elements; the last dimension (d) is always contiguous. A null pointer means "not there".
// Tensors marked `data` are in the call's dtype, all others in float32. What is written is contiguous.
struct Problem {
  int64_t B, T, d;
  Dtype dtype;
  Highway highway;
  bool tanh, reverse;
  bool stream;  // write past the caches: right where the outputs would not stay in them anyway
  float scale;

  const void* u;  // data (B, T, k, d)
  int64_t u_b, u_t, u_k;
  const void* x;  // data (B, T, d)
  int64_t x_b, x_t;
  const float* weight;     // (2, d)
  const float* bias;       // (2, d)
  const float* c0;         // (B, d)
  const float* mask;       // (B, d): dropout
  const uint8_t* padding;  // (B, T)
  const uint8_t* resets;   // (B, T)

  // Forward writes (`saved` only if asked); backward reads `saved`.
  void* h;       // data (B, T, d)
  float* c;      // (B, d)
  float* saved;  // (B, saved_rows, d)

  // Backward only.
  const void* grad_h;  // data (B, T, d)
  int64_t gh_b, gh_t;
  const float* grad_c;  // (B, d)
  void* grad_u;         // data (B, T, k, d)
  void* grad_x;         // data (B, T, d)
  float* grad_c0;       // (B, d)
  float* grad_params;   // (B, 4, d), row by row: forget weight, highway weight, forget bias, highway bias
};

// One instruction set's kernels. Each call computes the units [j0, j1) of row b, at most kMaxWidth of them; j0 is a
// multiple of kAlign. Backward needs scratch of kScratch floats a unit: three numbers of each step of two chunks.
constexpr int64_t kMaxWidth = 4096, kAlign = 64, kScratch = 2 * 3 * kChunk;
struct Kernels {
  const char* name;
  void (*forward)(const Problem&, int64_t b, int64_t j0, int64_t j1);
  void (*backward)(const Problem&, int64_t b, int64_t j0, int64_t j1, float* scratch);
  DecodeKernels decode;
};

extern const Kernels kPortable;
#if defined(UNDERTOW_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace undertow
