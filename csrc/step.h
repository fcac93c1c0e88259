// One token at a time: products, attention, and a whole stack of SRU++ layers in a single call. See decode.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "decode.h"
#include "parallel.h"
#include "recurrence.h"

namespace undertow {

// Below this many bytes read a second thread costs more than it brings.
constexpr int64_t kWorthReading = 64 << 10;

inline int threads_for(int threads, int64_t bytes) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, bytes / kWorthReading)));
}

inline int64_t bytes_of(const Matrix& m) { return m.in * m.out * size_of(m.stored); }

// How `out` outputs are cut: long pieces, which prefetchers like, but enough of them that a thread that comes late does
// not hold up the others.
inline int64_t piece_of(int64_t out, int threads, int64_t align) {
  const int64_t pieces = threads == 1 ? 1 : 4 * threads;
  return ((out + pieces - 1) / pieces + align - 1) / align * align;
}

// y (rows, out) = x (rows, in) W^T; at most kProductRows rows; `room` holds rows * in floats.
inline void multiply(const Kernels& kernels, const Matrix& m, const float* x, int64_t rows, float* y, float* room,
                     int threads) {
  const Arranged a = kernels.decode.arrange(x, rows, m.in, m.stored, room);
  threads = threads_for(threads, bytes_of(m));
  const int64_t piece = piece_of(m.out, threads, 4);
  parallel((m.out + piece - 1) / piece, threads, [&](int64_t i, int) {
    kernels.decode.product(m, a, rows, y, i * piece, std::min(m.out, (i + 1) * piece));
  });
}

// `p.q` is scaled and in plain order; `room` holds N * e floats.
inline void attend(const Kernels& kernels, Attention p, float* room, int threads) {
  if (p.stored != Stored::float32) {
    for (int64_t n = 0; n < p.N; ++n) kernels.decode.arrange(p.q + n * p.e, 1, p.e, p.stored, room + n * p.e);
    p.q = room;
  }
  threads = threads_for(threads, p.N * p.S * p.e * size_of(p.stored));
  const int64_t cuts = threads == 1 ? 1 : (2 * threads + p.N - 1) / p.N, cut = (p.S + cuts - 1) / cuts;
  const int64_t of_keys = (p.S + cut - 1) / cut;
  parallel(p.N * of_keys, threads, [&](int64_t i, int) {
    const int64_t s0 = i % of_keys * cut;
    kernels.decode.scores(p, i / of_keys, s0, std::min(p.S, s0 + cut));
  });
  for (int64_t n = 0; n < p.N; ++n) kernels.decode.softmax(p, n);
  const int64_t width = piece_of(p.e, p.N >= threads ? 1 : threads, 16), of_values = (p.e + width - 1) / width;
  parallel(p.N * of_values, threads, [&](int64_t i, int) {
    const int64_t j0 = i % of_values * width;
    kernels.decode.sums(p, i / of_values, j0, std::min(p.e, j0 + width));
  });
}

// A layer of SRU++, its parameters in float32 but for the matrices. Null pointers: not there.
struct Layer {
  Matrix w1, w2, w3;          // w2.weight null: no attention
  int64_t heads, parts;       // parts of u
  bool skip, tanh;
  float scale, alpha;         // of the highway's x; of attention
  const float *weight, *bias; // (2, d), of the gates
  struct Norm {
    const float *weight, *bias;
    float eps;
  } before, inner, after;     // over x, over z + alpha a, over h
  int64_t width() const { return w3.out / parts; }
};

// What a layer remembers: c (rows, d), and keys and values, whose last position, S - 1, is to be written.
struct Memory {
  const float* c;
  float* new_c;
  void *keys, *values;
  Stored stored;
  int64_t keys_b, keys_h, values_b, values_h, S;  // (rows, heads, S, e), positions one after the other
};

inline void norm(const Layer::Norm& by, const float* x, int64_t rows, int64_t n, float* out) {
  for (int64_t i = 0; i < rows; ++i, x += n, out += n) {
    double mean = 0, square = 0;
    for (int64_t j = 0; j < n; ++j) mean += x[j];
    mean /= static_cast<double>(n);
    for (int64_t j = 0; j < n; ++j) square += (x[j] - mean) * (x[j] - mean);
    const float m = static_cast<float>(mean);
    const float s = static_cast<float>(1 / std::sqrt(square / static_cast<double>(n) + by.eps));
    for (int64_t j = 0; j < n; ++j) out[j] = (x[j] - m) * s * by.weight[j] + by.bias[j];
  }
}

inline uint16_t rounded_bf16(float a) {
  uint32_t bits;
  __builtin_memcpy(&bits, &a, sizeof bits);
  if (a != a) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void put(void* to, int64_t at, Stored stored, const float* from, int64_t n) {
  if (stored == Stored::float32) std::copy(from, from + n, static_cast<float*>(to) + at);
  else std::transform(from, from + n, static_cast<uint16_t*>(to) + at, rounded_bf16);
}

// One position of `rows` texts through all layers: x (rows, in of the first), out (rows, d of the last).
inline void step(const Kernels& kernels, const std::vector<Layer>& layers, const std::vector<Memory>& memories,
                 int64_t rows, const float* x, float* out, int threads) {
  int64_t widest = 0, widest_p = 0, widest_u = 0, longest = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& l = layers[i];
    widest = std::max({widest, l.w1.in, l.width()});
    widest_p = std::max(widest_p, l.w3.in);
    widest_u = std::max(widest_u, l.w3.out);
    longest = std::max(longest, memories[i].S * l.heads);
  }
  const int64_t sizes[] = {widest, widest, widest, 3 * widest_p, widest_p, widest_u, std::max(widest, widest_p), longest};
  int64_t all = 0;
  for (const int64_t size : sizes) all += size;
  const std::unique_ptr<float[]> scratch(new float[rows * all]);
  float* parts[8];
  for (int64_t i = 0, at = 0; i < 8; at += rows * sizes[i++]) parts[i] = scratch.get() + at;
  auto [ping, pong, normed, zs, a, u, room, weights] = parts;
  float *const z = zs, *const kv = zs + rows * widest_p;

  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& l = layers[i];
    const Memory& memory = memories[i];
    const int64_t p = l.w3.in, d = l.width();
    const float* read = x;
    if (l.before.weight) norm(l.before, x, rows, l.w1.in, normed), read = normed;
    multiply(kernels, l.w1, read, rows, z, room, threads);
    if (l.w2.weight) {
      const int64_t H = l.heads, e = p / H;
      multiply(kernels, l.w2, z, rows, kv, room, threads);
      for (int64_t n = 0; n < rows * H; ++n) {
        const float* const from = kv + n / H * 2 * p + n % H * e;
        put(memory.keys, n / H * memory.keys_b + n % H * memory.keys_h + (memory.S - 1) * e, memory.stored, from, e);
        put(memory.values, n / H * memory.values_b + n % H * memory.values_h + (memory.S - 1) * e, memory.stored,
            from + p, e);
      }
      const float root = 1 / std::sqrt(static_cast<float>(e));
      for (int64_t j = 0; j < rows * p; ++j) a[j] = z[j] * root;
      float* const sums = kv;  // what was there is written
      attend(kernels, {rows * H, H, memory.S, e, memory.stored, a, memory.keys, memory.values, memory.keys_b,
                       memory.keys_h, e, memory.values_b, memory.values_h, e, weights, sums}, room, threads);
      for (int64_t j = 0; j < rows * p; ++j) z[j] += l.alpha * sums[j];
    }
    if (l.inner.weight) norm(l.inner, z, rows, p, z);
    float* const h = i + 1 == layers.size() && !l.after.weight ? out : x == ping ? pong : ping;

    Problem q{};
    q.B = rows, q.T = 1, q.d = d;
    q.highway = !l.skip ? Highway::none : l.parts == 4 ? Highway::u3 : Highway::x;
    q.tanh = l.tanh, q.scale = l.scale;
    q.u = u, q.u_b = q.u_t = l.w3.out, q.u_k = d;
    q.x = x, q.x_b = q.x_t = l.w1.in;
    q.weight = l.weight, q.bias = l.bias, q.c0 = memory.c, q.h = h, q.c = memory.new_c;
    const Arranged arranged = kernels.decode.arrange(z, rows, p, l.w3.stored, room);
    const int busy = threads_for(threads, bytes_of(l.w3));
    const int64_t piece = std::min(kMaxWidth, piece_of(d, busy, kAlign));
    parallel((d + piece - 1) / piece, busy, [&, u = u](int64_t t, int) {  // C++17 captures no structured binding
      const int64_t j0 = t * piece, j1 = std::min(d, j0 + piece);
      for (int64_t k = 0; k < l.parts; ++k) kernels.decode.product(l.w3, arranged, rows, u, k * d + j0, k * d + j1);
      for (int64_t b = 0; b < rows; ++b) kernels.forward(q, b, j0, j1);
    });
    if (l.after.weight) norm(l.after, h, rows, d, i + 1 == layers.size() ? out : h);
    x = i + 1 == layers.size() ? out : h;
  }
}

}  // namespace undertow
