// The rotation of the two halves of every head by the angles of its token's position.
#include "parallel.h"
#include "rows.h"
#include "vexact.h"

namespace VX_ISA {

template <class T>
void rope_head(int64_t half, bool inverse, const T* x, const float* cos, const float* sin, T* y) {
  each_vector(half, [=](int64_t k, int count) {
    const vf x1 = load(x + k, count), x2 = load(x + half + k, count);
    const vf c = load(cos + k, count), s = load(sin + k, count);
    const vf x1c = vmul(x1, c), x2s = vmul(x2, s), x2c = vmul(x2, c), x1s = vmul(x1, s);
    store(y + k, inverse ? vadd(x1c, x2s) : vsub(x1c, x2s), count);
    store(y + half + k, inverse ? vsub(x2c, x1s) : vadd(x2c, x1s), count);
  });
}

}  // namespace VX_ISA

VX_API(void, rope)
(int dtype_of_x, int inverse, int64_t N, int64_t H, int64_t K, const void* x, int64_t ldx, const int64_t* positions,
 const float* cos, const float* sin, void* y, int64_t ldy) {
  using namespace VX_ISA;
  const int64_t half = K / 2;
  with_storage(dtype_of_x, [&](auto type) {
    using T = decltype(type);
    parallel_for(N, 1 + 16384 / (H * K + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* from = static_cast<const T*>(x) + i * ldx;
        T* to = static_cast<T*>(y) + i * ldy;
        const float *c = cos + positions[i] * half, *s = sin + positions[i] * half;
        for (int64_t h = 0; h < H; ++h) rope_head(half, inverse != 0, from + h * K, c, s, to + h * K);
      }
    });
  });
}
