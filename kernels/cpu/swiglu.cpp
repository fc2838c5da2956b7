// y = round(g / (1 + exp(-g))) · u over rows of F gates, then F ups.
#include "functions.h"
#include "parallel.h"
#include "rows.h"
#include "vexact.h"

namespace VX_ISA {

template <class T>
void swiglu_row(int64_t F, const T* gate_up, T* y) {
  each_vector(F, [=](int64_t i, int count) {
    const vf s = rounded(vsilu(load(gate_up + i, count)), T{});
    store(y + i, vmul(s, load(gate_up + F + i, count)), count);
  });
}

template <class T, class G>
void swiglu_backward_row(int64_t F, const T* gate_up, const G* dy, G* dgate_up) {
  const vf one = vset(1.0f);
  each_vector(F, [=](int64_t i, int count) {
    const vf g = load(gate_up + i, count), u = load(gate_up + F + i, count), d = load(dy + i, count);
    const vf denominator = vadd(one, vexp(vsub(vset(0.0f), g)));
    const vf sigma = vdiv(one, denominator);
    const vf s = rounded(vdiv(g, denominator), T{});
    const vf slope = vmul(sigma, vfma(g, vsub(one, sigma), one));
    store(dgate_up + i, vmul(vmul(d, u), slope), count);
    store(dgate_up + F + i, vmul(d, s), count);
  });
}

}  // namespace VX_ISA

VX_API(void, swiglu)(int dtype, int64_t N, int64_t F, const void* gate_up, int64_t ldx, void* y, int64_t ldy) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(N, 1 + 8192 / (F + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        swiglu_row(F, static_cast<const T*>(gate_up) + i * ldx, static_cast<T*>(y) + i * ldy);
    });
  });
}

VX_API(void, swiglu_backward)
(int dtype, int64_t N, int64_t F, const void* gate_up, int64_t ldx, const void* dy, int64_t lddy, void* dgate_up,
 int64_t lddx) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    using G = Gradient<T>;
    parallel_for(N, 1 + 8192 / (F + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        swiglu_backward_row(F, static_cast<const T*>(gate_up) + i * ldx, static_cast<const G*>(dy) + i * lddy,
                            static_cast<G*>(dgate_up) + i * lddx);
    });
  });
}
