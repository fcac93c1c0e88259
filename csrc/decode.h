// What one token at a time is made of: matrices times a few vectors, and one query's attention. Both are bound by how
// fast the weights, or the keys and values, can be read: each is read once, in the precision in which it is kept.
#pragma once

#include <cstdint>

namespace undertow {

enum class Stored : int { float32 = 0, bfloat16 = 1, int8 = 2 };

// y[i, o] = scale[o] * sum_k x[i, k] weight[o, k], for few rows i.
struct Product {
  int64_t rows, in, out;
  Stored stored;
  const float* x;      // (rows, in)
  const void* weight;  // (out, in), rows one after the other
  const float* scale;  // (out); null: ones
  float* y;            // (rows, out)
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

constexpr int64_t kProductRows = 8;  // of x, at most
constexpr int64_t kSums = 128;       // columns of values that a task sums

struct DecodeKernels {
  void (*product)(const Product&, int64_t o0, int64_t o1);
  void (*scores)(const Attention&, int64_t n, int64_t s0, int64_t s1);
  void (*softmax)(const Attention&, int64_t n);
  void (*sums)(const Attention&, int64_t n, int64_t j0, int64_t j1);
};

}  // namespace undertow
