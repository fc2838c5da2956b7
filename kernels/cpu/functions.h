// exp, log and the sigmoid, from multiply, add and fma alone. The same text stands in vexact_kernels/float32.py.
// Coefficients: weighted least squares driven to the minimax on Chebyshev nodes, rounded to float.
// Measured against float64: exp below 1 ulp, log below 1 ulp, sigmoid and silu below 2.5 ulp
// (tests/kernels/test_functions.py).
#pragma once
#include "simd.h"

namespace VX_ISA {

constexpr float LN2_HI = 0x1.62e4p-1f;  // 15 bits, so n * LN2_HI is exact
constexpr float LN2_LO = 0x1.7f7d1cp-20f;
constexpr float EXP_LOWEST = -0x1.5d589ep+6f;  // -87.33654: the last x whose exp is a normal number
constexpr float EXP_HIGHEST = 0x1.62e42ep+6f;  // 88.72283: the last x whose exp is finite

// exp(±0) = 1; +0 wherever the result would be subnormal and at -inf; +inf above 88.72283; NaN at NaN.
inline vf vexp(vf x) {
  const vf magic = vset(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf clamped = vpick(vlt(x, vset(EXP_LOWEST)), vset(0.0f), vpick(vlt(vset(EXP_HIGHEST), x), vset(0.0f), x));
  const vf n = vsub(vfma(clamped, vset(0x1.715476p+0f), magic), magic);
  const vf minus_n = vsub(vset(0.0f), n);
  const vf r = vfma(minus_n, vset(LN2_LO), vfma(minus_n, vset(LN2_HI), clamped));
  vf q = vset(0x1.6db5bcp-10f);
  q = vfma(q, r, vset(0x1.123c78p-7f));
  q = vfma(q, r, vset(0x1.55545cp-5f));
  q = vfma(q, r, vset(0x1.55548ep-3f));
  q = vfma(q, r, vset(0x1p-1f));
  q = vfma(q, r, vset(1.0f));
  q = vfma(q, r, vset(1.0f));
  // q * 2^n in two exact steps, because 2^128 is not a float. The low bits of n + magic are the integer n.
  const vi k = isub(as_int(vadd(n, magic)), iset(0x4b400000));
  const vi half = sar<1>(k);
  const vf scale_1 = as_float(shl<23>(iadd(half, iset(127))));
  const vf scale_2 = as_float(shl<23>(iadd(isub(k, half), iset(127))));
  vf y = vmul(vmul(q, scale_1), scale_2);
  y = vpick(vlt(x, vset(EXP_LOWEST)), vset(0.0f), y);
  y = vpick(vlt(vset(EXP_HIGHEST), x), vset(__builtin_inff()), y);
  return vpick(vnan(x), x, y);
}

// log(1) = +0 exactly; -inf at ±0, +inf at +inf, NaN below 0 and at NaN; subnormal x is scaled by 2^23 first.
inline vf vlog(vf x) {
  const vf smallest = vset(0x1p-126f), infinity = vset(__builtin_inff());
  const vm subnormal = vlt(x, smallest);
  const vf scaled = vpick(subnormal, vmul(x, vset(0x1p23f)), x);
  const vi bits = as_int(scaled);
  const vi e = sar<23>(isub(bits, iset(0x3f2aaaab)));  // so that m lies in [2/3, 4/3)
  const vf m = as_float(isub(bits, shl<23>(e)));
  const vf f = vsub(m, vset(1.0f));
  const vf exponent = to_float(isub(e, ipick(subnormal, iset(23), iset(0))));
  vf q = vset(-0x1.0e2a8ep-3f);
  q = vfma(q, f, vset(0x1.1df358p-3f));
  q = vfma(q, f, vset(-0x1.f03c2cp-4f));
  q = vfma(q, f, vset(0x1.1ef198p-3f));
  q = vfma(q, f, vset(-0x1.55b7e6p-3f));
  q = vfma(q, f, vset(0x1.99ce42p-3f));
  q = vfma(q, f, vset(-0x1.fffe5ep-3f));
  q = vfma(q, f, vset(0x1.55550cp-2f));
  const vf square = vmul(f, f);
  vf y = vmul(vmul(f, square), q);
  y = vfma(exponent, vset(LN2_LO), y);
  y = vfma(vset(-0.5f), square, y);
  y = vadd(f, y);
  y = vfma(exponent, vset(LN2_HI), y);
  y = vpick(vlt(x, infinity), y, infinity);
  y = vpick(vlt(vset(0.0f), x), y, vpick(vlt(x, vset(0.0f)), vset(__builtin_nanf("")), vset(-__builtin_inff())));
  return vpick(vnan(x), x, y);
}

// 1 / (1 + exp(-x)), one division.
inline vf vsigmoid(vf x) { return vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vset(0.0f), x)))); }

// x / (1 + exp(-x)), one division.
inline vf vsilu(vf x) { return vdiv(x, vadd(vset(1.0f), vexp(vsub(vset(0.0f), x)))); }

inline float exp1(float x) {
  float v[W];
  vstore(v, vexp(vset(x)));
  return v[0];
}
inline float log1(float x) {
  float v[W];
  vstore(v, vlog(vset(x)));
  return v[0];
}

}  // namespace VX_ISA
