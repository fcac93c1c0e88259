// Runs numbered tasks on the threads that torch already has.
//
// torch's wheels bring an OpenMP runtime along. Linking another one would give the process two pools of threads that
// fight for the same cores, so the one that torch uses is asked for by name when first needed, and plain threads serve
// where there is none.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace undertow {

using OmpParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

inline OmpParallel omp_parallel() {
#if defined(__unix__) || defined(__APPLE__)
  // GNU's name for "run this on n threads"; LLVM's and Intel's runtimes know it too. Looked for among what torch itself
  // stands on: not every wheel of torch shows its runtime to all (RTLD_DEFAULT), and another package may show its own.
  static const auto found = [] {
#if defined(__APPLE__)
    void* const torch = dlopen("@rpath/libtorch_cpu.dylib", RTLD_LAZY | RTLD_NOLOAD);
#else
    void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
#endif
    return reinterpret_cast<OmpParallel>(dlsym(torch ? torch : RTLD_DEFAULT, "GOMP_parallel"));
  }();
  return found;
#else
  return nullptr;
#endif
}

// task(i, worker) for every i in [0, tasks), worker in [0, threads). Tasks are handed out in order, whoever is free:
// results must not depend on who does what.
template <class Task>
void parallel(int64_t tasks, int threads, const Task& task) {
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i, 0);
    return;
  }
  struct Shared {
    const Task& task;
    const int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{0};

    void work() {
      const int worker = workers.fetch_add(1);
      for (int64_t i; (i = next.fetch_add(1)) < tasks;) task(i, worker);
    }
  } shared{task, tasks};

  if (const OmpParallel omp = omp_parallel()) {
    omp([](void* p) { static_cast<Shared*>(p)->work(); }, &shared, static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back([&shared] { shared.work(); });
  shared.work();
  for (std::thread& other : others) other.join();
}

}  // namespace undertow
