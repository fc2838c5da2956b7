// What the row kernels share: the storage type of an argument, and S over a row of any length.
#pragma once
#include <vector>

#include "simd.h"

namespace VX_ISA {

constexpr int64_t BLOCK = 1024;  // values that one tree holds: the unit of summation
inline int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

// The type in which the gradient of a T is stored between ops.
template <class T>
struct GradientOf {
  using type = T;
};
template <>
struct GradientOf<f16> {
  using type = float;
};
template <class T>
using Gradient = typename GradientOf<T>::type;

// body(a value of the storage type that `dtype` names)
template <class Body>
auto with_storage(int dtype, const Body& body) {
  if (dtype == BF16) return body(bf16{});
  if (dtype == F16) return body(f16{});
  return body(float{});
}

// body(i, count) for the vectors of a row of n: `count` lanes from index i.
template <class Body>
inline void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + W <= n; i += W) body(i, W);
  if (i < n) body(i, static_cast<int>(n - i));
}

// S over n values given by load_at(i, count): 16 lanes from index i, lanes past `count` being +0.
template <class Load>
float tree_row(int64_t n, const Load& load_at) {
  if (n <= BLOCK) return tree_block(n, load_at);
  std::vector<float> sums(static_cast<size_t>(blocks_of(n)));
  for (int64_t b = 0; b * BLOCK < n; ++b) {
    const int64_t left = n - b * BLOCK;
    sums[static_cast<size_t>(b)] =
        tree_block(left < BLOCK ? left : BLOCK, [&](int64_t i, int count) { return load_at(b * BLOCK + i, count); });
  }
  return tree(sums.data(), static_cast<int64_t>(sums.size()));
}

}  // namespace VX_ISA
