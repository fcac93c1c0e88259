// What one token at a time is made of: matrices times a few vectors, and one query's attention. Both are bound by how
// fast the weights, or the keys and values, can be read: each is read once, in the precision in which it is kept.
#pragma once

#include <cstdint>

namespace undertow {

enum class Stored : int { float32 = 0, bfloat16 = 1, int8 = 2 };

inline int64_t size_of(Stored stored) { return stored == Stored::float32 ? 4 : stored == Stored::bfloat16 ? 2 : 1; }

// weight (out, in), rows one after the other; int8 rows count scale[o] times.
struct Matrix {
  int64_t in, out;
  Stored stored;
  const void* weight;
  const float* scale;  // (out); null: ones
};

constexpr int64_t kProductRows = 8;  // of x, at most
constexpr int64_t kInt8In = 16384;   // inputs of int8 weights, at most

// Rows x (rows, in) in the order and the type in which the kernels multiply them with weights of one kind.
struct Arranged {
  const void* x;
  float factor[kProductRows];  // what a row counts
};

// out[n] = softmax(q[n] keys[n]^T) values[n], for each of N = B H heads; q is scaled already. Strides count elements.
struct Attention {
  int64_t N, H, S, e;
  Stored stored;
  const float* q;  // (N, e)
  const void *keys, *values;
  int64_t keys_b, keys_h, keys_s, values_b, values_h, values_s;
  float* weights;  // (N, S), scratch
  float* out;      // (N, e)
};

struct DecodeKernels {
  // Into `room`, of rows * in floats.
  Arranged (*arrange)(const float* x, int64_t rows, int64_t in, Stored, float* room);
  // y[i, o] for the outputs [o0, o1) of all rows; y (rows, out).
  void (*product)(const Matrix&, const Arranged&, int64_t rows, float* y, int64_t o0, int64_t o1);
  void (*scores)(const Attention&, int64_t n, int64_t s0, int64_t s1);
  void (*softmax)(const Attention&, int64_t n);
  void (*sums)(const Attention&, int64_t n, int64_t j0, int64_t j1);
};

}  // namespace undertow
