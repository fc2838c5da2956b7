// S over a whole tensor: the block sums are independent, so threads share them out.
#include "parallel.h"
#include "rows.h"
#include "vexact.h"

namespace VX_ISA {

float tree(const float* v, int64_t n) {
  return tree_row(n, [=](int64_t i, int count) { return load(v + i, count); });
}

// S of term(i, count) over 0 … n.
template <class Term>
float tree_parallel(int64_t n, const Term& term) {
  const int64_t blocks = blocks_of(n);
  std::vector<float> sums(static_cast<size_t>(blocks));
  parallel_for(blocks, 32, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t left = n - b * BLOCK;
      sums[static_cast<size_t>(b)] =
          tree_block(left < BLOCK ? left : BLOCK, [&](int64_t i, int count) { return term(b * BLOCK + i, count); });
    }
  });
  float total = 0.0f;
  parallel_for(1, 1, [&](int64_t, int64_t) { total = tree(sums.data(), blocks); });
  return total;
}

}  // namespace VX_ISA

VX_API(float, sum)(int64_t n, const float* x) {
  using namespace VX_ISA;
  return tree_parallel(n, [=](int64_t i, int count) { return load(x + i, count); });
}

VX_API(float, sum_squares)(int64_t n, const float* x) {
  using namespace VX_ISA;
  return tree_parallel(n, [=](int64_t i, int count) {
    const vf v = load(x + i, count);
    return vmul(v, v);
  });
}
