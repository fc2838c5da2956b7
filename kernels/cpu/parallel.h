// Threads divide outputs, never a sum; and no caller's rounding mode, FTZ or DAZ reaches a kernel.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace VX_ISA {

// Round to nearest even, subnormals kept, in this thread until the end of the scope.
class FloatEnvironment {
 public:
  FloatEnvironment() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
#endif
  }
  ~FloatEnvironment() {
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(saved_));
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" ::"r"(saved_));
#endif
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  uint64_t saved_ = 0;
};

// Not inlined, so that no arithmetic of the body can be scheduled across the change of environment.
template <class Body>
__attribute__((noinline)) void run_body(const Body& body, int64_t begin, int64_t end) {
  body(begin, end);
}
template <class Body>
void guarded(const Body& body, int64_t begin, int64_t end) {
  FloatEnvironment environment;
  run_body(body, begin, end);
}

// Multiply-adds that are worth waking a thread for: some ten microseconds, several times what the waking costs. On a
// machine with other work a thread that waits for its part costs far more than the part.
constexpr int64_t WORTH_A_THREAD = 1 << 19;

// body(begin, end) over contiguous parts of 0 … n, at least `grain` items a thread.
template <class Body>
void parallel_for(int64_t n, int64_t grain, const Body& body) {
  int64_t threads = omp_get_max_threads();
  if (threads > (n + grain - 1) / grain) threads = (n + grain - 1) / grain;
  if (threads <= 1 || omp_in_parallel()) {
    if (n > 0) guarded(body, 0, n);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t begin = n * t / all, end = n * (t + 1) / all;
    if (begin < end) guarded(body, begin, end);
  }
}

// body(next) once a thread; next() hands out 0, 1, 2, …, and n or more when all are taken. For tasks of unequal size:
// put the large ones first. At least `grain` tasks a thread. Who takes which task is left to chance and reaches no bit.
template <class Body>
void parallel_tasks(int64_t n, int64_t grain, const Body& body) {
  std::atomic<int64_t> taken{0};
  const auto next = [&taken] { return taken.fetch_add(1, std::memory_order_relaxed); };
  const auto worker = [&](int64_t, int64_t) { body(next); };
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), (n + grain - 1) / grain);
  if (threads <= 1 || omp_in_parallel()) {
    if (n > 0) guarded(worker, 0, n);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  guarded(worker, 0, n);
}

}  // namespace VX_ISA
