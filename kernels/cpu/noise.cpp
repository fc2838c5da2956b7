// Standard normal numbers with addresses: (key of the row, column), and nothing else.
#include "functions.h"
#include "parallel.h"
#include "philox.h"
#include "rows.h"
#include "vexact.h"

namespace VX_ISA {

constexpr uint32_t NOISE = 0x6e6f6973;  // the counter's last word: in a draw's, the high half of its request
constexpr int64_t GROUP = 4 * W;        // columns of sixteen blocks of four words

// Standard normal numbers of random words. u = (n + 1/2) · 2^-24 with n a word's high 24 bits; u - 1/2 and the distance
// to the nearer end are floats exactly. Wichura's AS241, PPND7 (Applied Statistics 37, 1988); sqrt(-log(tail)) stays
// below 4.17, so that its third form is not needed.
inline vf normal(vi words) {
  const vi odd = isub(shl<1>(shr<8>(words)), iset((1 << 24) - 1));
  const vf zero = vset(0.0f), q = vmul(to_float(odd), vset(0x1p-25f)), minus_q = vsub(zero, q);
  const vm left = vlt(q, zero);
  const vf size = vpick(left, minus_q, q);
  const vm central = vlt(size, vset(0.425f));
  const vf r = vfma(minus_q, q, vset(0.180625f));
  vf a = vset(0x1.d8ep+5f), b = vset(0x1.0cc01p+6f);
  a = vfma(a, r, vset(0x1.3e951p+7f));
  a = vfma(a, r, vset(0x1.937964p+5f));
  a = vmul(q, vfma(a, r, vset(0x1.b18d9p+1f)));
  b = vfma(b, r, vset(0x1.3b07f2p+6f));
  b = vfma(b, r, vset(0x1.1e529ep+4f));
  b = vfma(b, r, vset(1.0f));
  const vf t = vsub(vsqrt(vsub(zero, vlog(vsub(vset(0.5f), size)))), vset(1.6f));
  vf c = vset(0x1.5ca5dap-3f), d = vset(0x1.ec62b8p-4f);
  c = vfma(c, t, vset(0x1.4e85c2p+0f));
  c = vfma(c, t, vset(0x1.60df54p+1f));
  c = vfma(c, t, vset(0x1.6c6662p+0f));
  d = vfma(d, t, vset(0x1.795848p-1f));
  d = vfma(d, t, vset(1.0f));
  return vdiv(vpick(central, a, vpick(left, vsub(zero, c), c)), vpick(central, b, d));
}

// Columns 64·group … of a row, as many as there are: lane l computes block 16·group + l, and its word w is that of
// column 64·group + 16·w + l.
inline void noise_group(uint64_t key, int64_t group, int64_t count, float* out) {
  const vi zero = iset(0), block = iadd(iset(static_cast<int32_t>(group * W)), iota());
  vi words[4] = {block, zero, zero, iset(static_cast<int32_t>(NOISE))};
  philox(words, key);
  for (int64_t w = 0; w < 4 && w * W < count; ++w) {
    const int64_t left = count - w * W;
    store(out + w * W, normal(words[w]), left < W ? static_cast<int>(left) : W);
  }
}

}  // namespace VX_ISA

VX_API(void, noise)(int64_t N, int64_t columns, const uint64_t* key, float* y, int64_t ldy) {
  using namespace VX_ISA;
  const int64_t groups = (columns + GROUP - 1) / GROUP;
  parallel_for(N * groups, 128, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t i = t / groups, column = t % groups * GROUP;
      noise_group(key[i], t % groups, std::min(GROUP, columns - column), y + i * ldy + column);
    }
  });
}
