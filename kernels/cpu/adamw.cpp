// One AdamW update, in place. The host computes the scalars in float64; each was rounded to float once on its way here.
#include "functions.h"
#include "parallel.h"
#include "rows.h"
#include "vexact.h"

VX_API(void, adamw)
(int64_t n, float* p, const float* g, float* m, float* v, float clip, float beta1, float beta2, float one_minus_beta1,
 float one_minus_beta2, float eps, float decay, float step, float rsqrt_correction2) {
  using namespace VX_ISA;
  parallel_for(n, 8192, [&](int64_t begin, int64_t end) {
    each_vector(end - begin, [&](int64_t k, int count) {
      const int64_t i = begin + k;
      const vf gradient = vmul(load(g + i, count), vset(clip));
      const vf first = vfma(vset(beta1), load(m + i, count), vmul(vset(one_minus_beta1), gradient));
      const vf second = vfma(vset(beta2), load(v + i, count), vmul(vmul(vset(one_minus_beta2), gradient), gradient));
      const vf denominator = vfma(vsqrt(second), vset(rsqrt_correction2), vset(eps));
      const vf decayed = vmul(load(p + i, count), vset(decay));
      store(m + i, first, count);
      store(v + i, second, count);
      store(p + i, vfma(vset(-step), vdiv(first, denominator), decayed), count);
    });
  });
}
