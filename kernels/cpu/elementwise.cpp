// exp, log, one addition, one conversion: element by element.
#include "functions.h"
#include "parallel.h"
#include "rows.h"
#include "vexact.h"

namespace VX_ISA {

// body(i, count) over the vectors of 0 … n.
template <class Body>
void parallel_vectors(int64_t n, const Body& body) {
  parallel_for(n, 16384, [&](int64_t begin, int64_t end) {
    each_vector(end - begin, [&](int64_t i, int count) { body(begin + i, count); });
  });
}

}  // namespace VX_ISA

VX_API(void, exp)(int64_t n, const float* x, float* y) {
  using namespace VX_ISA;
  parallel_vectors(n, [=](int64_t i, int count) { store(y + i, vexp(load(x + i, count)), count); });
}

VX_API(void, log)(int64_t n, const float* x, float* y) {
  using namespace VX_ISA;
  parallel_vectors(n, [=](int64_t i, int count) { store(y + i, vlog(load(x + i, count)), count); });
}

VX_API(void, add)(int dtype_of_x, int64_t n, const void* a, const void* b, void* y) {
  using namespace VX_ISA;
  with_storage(dtype_of_x, [&](auto type) {
    using T = decltype(type);
    const T *left = static_cast<const T*>(a), *right = static_cast<const T*>(b);
    T* sum = static_cast<T*>(y);
    parallel_vectors(
        n, [=](int64_t i, int count) { store(sum + i, vadd(load(left + i, count), load(right + i, count)), count); });
  });
}

VX_API(void, cast)(int from, int to, int64_t n, const void* x, void* y) {
  using namespace VX_ISA;
  with_storage(from, [&](auto source) {
    with_storage(to, [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      const From* in = static_cast<const From*>(x);
      To* out = static_cast<To*>(y);
      parallel_vectors(n, [=](int64_t i, int count) { store(out + i, load(in + i, count), count); });
    });
  });
}
