// The Python module: picks an instruction set, cuts the work into tasks, hands it to the threads.
//
// Tensors arrive as addresses and strides: the caller (undertow.ops.cpu) has checked them and keeps them alive. That
// costs a fraction of what converting a dozen array objects would, which is what counts when T = 1.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "parallel.h"
#if defined(UNDERTOW_X86)
#include "processor.h"
#endif
#include "recurrence.h"
#include "step.h"

namespace nb = nanobind;

namespace undertow {
namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(UNDERTOW_X86)
  if (has_avx512()) found.push_back(&kAvx512);
  if (has_avx2()) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

const Kernels* chosen = usable().front();

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) names.emplace_back(kernels->name);
  return names;
}

void use(const std::string& name) {
  for (const Kernels* kernels : usable())
    if (kernels->name == name) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("no such instruction set here: " + name);
}

// Below this many steps of units a second thread costs more than it brings.
constexpr int64_t kWorthAThread = 8192;
// Outputs larger than this would not stay in the caches: they are written past them.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

struct Blocks {
  int64_t width, count;  // of one row
  int threads;
};

// Wide blocks read long contiguous pieces, which the hardware's prefetchers like; narrower ones are taken only where
// there would be too few tasks for the threads.
Blocks blocks_of(const Problem& p, int threads, int64_t max_width) {
  const int64_t worth = p.B * p.T * p.d / kWorthAThread;
  threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, worth)));
  const int64_t wanted = p.B % threads == 0 ? 1 : (2 * threads + p.B - 1) / p.B;
  const int64_t count = std::max(wanted, (p.d + max_width - 1) / max_width);
  int64_t width = (p.d + count - 1) / count;
  width = std::min(max_width, (width + kAlign - 1) / kAlign * kAlign);
  return {width, (p.d + width - 1) / width, threads};
}

// Tensors this large are new memory each time, and the system hands it out in small pages, each with an interruption
// that costs as much as filling the page. Asking for large ones leaves a few hundredths of these.
void in_large_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (bytes >= kStreamBytes && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <class P>
P* at(uintptr_t address) {
  return reinterpret_cast<P*>(address);
}

bool worth_streaming(const void* p, int64_t bytes, const Problem& problem) {
  return bytes >= kStreamBytes && problem.d % kAlign == 0 && reinterpret_cast<uintptr_t>(p) % 64 == 0;
}

Problem problem(int64_t B, int64_t T, int64_t d, int dtype, int highway, bool tanh, bool reverse, float scale,
                uintptr_t u, int64_t u_b, int64_t u_t, int64_t u_k, uintptr_t x, int64_t x_b, int64_t x_t,
                uintptr_t weight, uintptr_t bias, uintptr_t c0, uintptr_t mask, uintptr_t padding, uintptr_t resets,
                uintptr_t saved) {
  Problem p{};
  p.B = B, p.T = T, p.d = d;
  p.dtype = static_cast<Dtype>(dtype), p.highway = static_cast<Highway>(highway);
  p.tanh = tanh, p.reverse = reverse, p.scale = scale;
  p.u = at<void>(u), p.u_b = u_b, p.u_t = u_t, p.u_k = u_k;
  p.x = at<void>(x), p.x_b = x_b, p.x_t = x_t;
  p.weight = at<float>(weight), p.bias = at<float>(bias), p.c0 = at<float>(c0), p.mask = at<float>(mask);
  p.padding = at<uint8_t>(padding), p.resets = at<uint8_t>(resets), p.saved = at<float>(saved);
  return p;
}

int64_t size_of(const Problem& p) { return p.dtype == Dtype::bfloat16 ? 2 : 4; }

#define COMMON_ARGUMENTS                                                                                             \
  int threads, int64_t B, int64_t T, int64_t d, int dtype, int highway, bool tanh, bool reverse, float scale,        \
      uintptr_t u, int64_t u_b, int64_t u_t, int64_t u_k, uintptr_t x, int64_t x_b, int64_t x_t, uintptr_t weight,   \
      uintptr_t bias, uintptr_t c0, uintptr_t mask, uintptr_t padding, uintptr_t resets, uintptr_t saved
#define COMMON_VALUES                                                                                                \
  B, T, d, dtype, highway, tanh, reverse, scale, u, u_b, u_t, u_k, x, x_b, x_t, weight, bias, c0, mask, padding,     \
      resets, saved

void forward(COMMON_ARGUMENTS, uintptr_t h, uintptr_t c) {
  nb::gil_scoped_release release;
  Problem p = problem(COMMON_VALUES);
  p.h = at<void>(h), p.c = at<float>(c);
  in_large_pages(p.h, B * T * d * size_of(p));
  p.stream = worth_streaming(p.h, B * T * d * size_of(p), p);
  const Blocks blocks = blocks_of(p, threads, kMaxWidth);
  const Kernels* const kernels = chosen;
  parallel(B * blocks.count, blocks.threads, [&](int64_t i, int) {
    const int64_t j0 = i % blocks.count * blocks.width;
    kernels->forward(p, i / blocks.count, j0, std::min(d, j0 + blocks.width));
  });
}

void backward(COMMON_ARGUMENTS, uintptr_t grad_h, int64_t gh_b, int64_t gh_t, uintptr_t grad_c, uintptr_t grad_u,
              uintptr_t grad_x, uintptr_t grad_weight, uintptr_t grad_bias, uintptr_t grad_c0) {
  nb::gil_scoped_release release;
  Problem p = problem(COMMON_VALUES);
  p.grad_h = at<void>(grad_h), p.gh_b = gh_b, p.gh_t = gh_t, p.grad_c = at<float>(grad_c);
  p.grad_u = at<void>(grad_u), p.grad_x = at<void>(grad_x), p.grad_c0 = at<float>(grad_c0);
  in_large_pages(p.grad_u, B * T * d * (p.highway == Highway::u3 ? 4 : 3) * size_of(p));
  if (p.grad_x) in_large_pages(p.grad_x, B * T * d * size_of(p));
  p.stream = worth_streaming(p.grad_u, B * T * d * 3 * size_of(p), p) && grad_x % 64 == 0;
  const Blocks blocks = blocks_of(p, threads, kMaxWidth);
  const Kernels* const kernels = chosen;

  const std::unique_ptr<float[]> rows(new float[B * 4 * d]);
  p.grad_params = rows.get();
  // Room for each worker, its start rounded up to a cache line.
  const int64_t room = kScratch * (blocks.width + kAlign);
  const std::unique_ptr<float[]> scratch(new float[room * blocks.threads + 16]);
  float* const aligned = scratch.get() + (64 - reinterpret_cast<uintptr_t>(scratch.get()) % 64) % 64 / sizeof(float);

  parallel(B * blocks.count, blocks.threads, [&](int64_t i, int worker) {
    const int64_t j0 = i % blocks.count * blocks.width;
    kernels->backward(p, i / blocks.count, j0, std::min(d, j0 + blocks.width), aligned + room * worker);
  });

  // Row by row in a fixed order: the sums do not depend on the number of threads.
  float* const outs[4] = {at<float>(grad_weight), at<float>(grad_weight) + d, at<float>(grad_bias),
                          at<float>(grad_bias) + d};
  const int64_t pieces = (d + kAlign - 1) / kAlign;
  parallel(4 * pieces, B * d >= 64 * kWorthAThread ? blocks.threads : 1, [&](int64_t i, int) {
    const int64_t q = i / pieces, j0 = i % pieces * kAlign, n = std::min(kAlign, d - j0);
    double sums[kAlign] = {};
    for (int64_t b = 0; b < B; ++b)
      for (int64_t j = 0; j < n; ++j) sums[j] += rows[(b * 4 + q) * d + j0 + j];
    for (int64_t j = 0; j < n; ++j) outs[q][j0 + j] = static_cast<float>(sums[j]);
  });
}

void product_rows(int threads, int64_t rows, int64_t in, int64_t out, int stored, uintptr_t x, uintptr_t weight,
                  uintptr_t scale, uintptr_t y) {
  nb::gil_scoped_release release;
  const Matrix m{in, out, static_cast<Stored>(stored), at<void>(weight), at<float>(scale)};
  const std::unique_ptr<float[]> room(new float[m.stored == Stored::float32 ? 0 : kProductRows * in]);
  for (int64_t i = 0; i < rows; i += kProductRows)
    multiply(*chosen, m, at<float>(x) + i * in, std::min(rows - i, kProductRows), at<float>(y) + i * out, room.get(),
             threads);
}

void attend_one(int threads, int64_t N, int64_t H, int64_t S, int64_t e, int stored, uintptr_t q, uintptr_t keys,
                int64_t keys_b, int64_t keys_h, int64_t keys_s, uintptr_t values, int64_t values_b, int64_t values_h,
                int64_t values_s, uintptr_t out) {
  nb::gil_scoped_release release;
  const std::unique_ptr<float[]> room(new float[N * (S + e)]);
  attend(*chosen,
         {N, H, S, e, static_cast<Stored>(stored), at<float>(q), at<void>(keys), at<void>(values), keys_b, keys_h,
          keys_s, values_b, values_h, values_s, room.get(), at<float>(out)},
         room.get() + N * S, threads);
}

Matrix matrix(int64_t in, int64_t out, std::tuple<int, uintptr_t, uintptr_t> how) {
  return {in, out, static_cast<Stored>(std::get<0>(how)), at<void>(std::get<1>(how)), at<float>(std::get<2>(how))};
}

Layer::Norm norm_of(std::tuple<uintptr_t, uintptr_t, float> how) {
  return {at<float>(std::get<0>(how)), at<float>(std::get<1>(how)), std::get<2>(how)};
}

struct Layers {
  std::vector<Layer> layers;
};

using How = std::tuple<int, uintptr_t, uintptr_t>;
using NormHow = std::tuple<uintptr_t, uintptr_t, float>;

void add_layer(Layers& to, int64_t in, int64_t p, int64_t d, int64_t heads, int64_t parts, bool skip,
               bool tanh, float scale, float alpha, How w1, How w2, How w3, uintptr_t weight, uintptr_t bias,
               NormHow before, NormHow inner, NormHow after) {
  to.layers.push_back({matrix(in, p, w1), matrix(p, 2 * p, w2), matrix(p, parts * d, w3), heads, parts, skip, tanh, scale,
                    alpha, at<float>(weight), at<float>(bias), norm_of(before), norm_of(inner), norm_of(after)});
}

// `memories`: of each layer c, new c, keys, values, stored, the keys' and the values' strides of rows and heads, and S.
void step_layers(const Layers& stack, int threads, int64_t rows, uintptr_t x, uintptr_t out,
                 const std::vector<int64_t>& memories) {
  constexpr size_t kEach = 10;
  const std::vector<Layer>& layers = stack.layers;
  if (memories.size() != kEach * layers.size() || rows > kProductRows) throw std::invalid_argument("step");
  nb::gil_scoped_release release;
  std::vector<Memory> read;
  for (size_t i = 0; i < layers.size(); ++i) {
    const int64_t* const m = memories.data() + kEach * i;
    read.push_back({at<float>(m[0]), at<float>(m[1]), at<void>(m[2]), at<void>(m[3]), static_cast<Stored>(m[4]), m[5],
                    m[6], m[7], m[8], m[9]});
  }
  step(*chosen, layers, read, rows, at<float>(x), at<float>(out), threads);
}

}  // namespace
}  // namespace undertow

NB_MODULE(_C, m) {
  m.attr("CHUNK") = undertow::kChunk;
  m.attr("PRODUCT_ROWS") = undertow::kProductRows;
  m.attr("INT8_IN") = undertow::kInt8In;
  m.def("instruction_sets", &undertow::instruction_sets, "Names of those this processor has, the best first.");
  m.def("instruction_set", [] { return std::string(undertow::chosen->name); });
  m.def("use_instruction_set", &undertow::use);
  m.def("pool", [] { return undertow::omp_parallel() ? "torch's OpenMP threads" : "its own threads"; });
  m.def("forward", &undertow::forward);
  m.def("backward", &undertow::backward);
  m.def("product", &undertow::product_rows);
  m.def("attend", &undertow::attend_one);
  nb::class_<undertow::Layers>(m, "Layers")
      .def(nb::init<>())
      .def("add", &undertow::add_layer)
      .def("step", &undertow::step_layers);
}
