// What the attention of both directions is made of: chains over a tile of outputs, and who may see what.
//
// Every product here is c[r][n] = fma over t ascending of a[r][t] * b[t][n] onto what c holds. A tile keeps its outputs
// in registers while t runs, so tiles and their sizes divide outputs and never a sum.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "functions.h"
#include "parallel.h"
#include "simd.h"
#include "vexact.h"

namespace VX_ISA::paged {

constexpr int64_t PAGE = 64;  // positions a page holds
constexpr int PAGE_VECTORS = PAGE / W;
constexpr int64_t TILE_ROWS = 6;
#if defined(VX_AVX512)
constexpr int64_t TILE_VECTORS = 4;  // 24 of 32 registers
#else
constexpr int64_t TILE_VECTORS = 1;  // a vf is two of AVX2's 16 registers: 12 of them
#endif

// The left operand a[r][t] = data[r * row + t * step].
struct Left {
  const float* data;
  int64_t row, step;
  Left at(int64_t r, int64_t t) const { return {data + r * row + t * step, row, step}; }
};

// The right operand b[t][n] = data[t * ld + n].
template <class T>
struct Right {
  const T* data;
  int64_t ld;
  Right at(int64_t t, int64_t n) const { return {data + t * ld + n, ld}; }
  vf get(int64_t t, int64_t n) const { return load(data + t * ld + n); }
  void fetch(int64_t, int64_t) const {}
};

// The same in a page, fetching what lies `ahead` elements further into the second-level cache on the way: pages lie
// anywhere, so the processor cannot guess the next one, and decoding waits for memory more than it computes.
template <class T>
struct PageRight {
  const T* data;
  int64_t ld, ahead;
  PageRight at(int64_t t, int64_t n) const { return {data + t * ld + n, ld, ahead}; }
  vf get(int64_t t, int64_t n) const { return load(data + t * ld + n); }
  void fetch(int64_t t, int64_t n) const { __builtin_prefetch(data + t * ld + n + ahead, 0, 2); }
};

template <int R, int C, class B>
__attribute__((noinline)) void chain_tile(int64_t steps, Left a, B b, float* c, int64_t ldc) {
  vf sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < C; ++n) sum[r][n] = vload(c + r * ldc + n * W);
  for (int64_t t = 0; t < steps; ++t) {
    vf column[C];
#pragma GCC unroll 8
    for (int n = 0; n < C; ++n) {
      column[n] = b.get(t, n * W);
      b.fetch(t, n * W);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf left = vset(a.data[r * a.row + t * a.step]);
#pragma GCC unroll 8
      for (int n = 0; n < C; ++n) sum[r][n] = vfma(left, column[n], sum[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < C; ++n) vstore(c + r * ldc + n * W, sum[r][n]);
}

template <int C, class B>
void chain_rows(int64_t rows, int64_t steps, Left a, B b, float* c, int64_t ldc) {
  switch (rows) {
    case 1:
      return chain_tile<1, C>(steps, a, b, c, ldc);
    case 2:
      return chain_tile<2, C>(steps, a, b, c, ldc);
    case 3:
      return chain_tile<3, C>(steps, a, b, c, ldc);
    case 4:
      return chain_tile<4, C>(steps, a, b, c, ldc);
    case 5:
      return chain_tile<5, C>(steps, a, b, c, ldc);
    default:
      return chain_tile<TILE_ROWS, C>(steps, a, b, c, ldc);
  }
}

// At most TILE_ROWS rows; `columns` is a multiple of 16.
template <class B>
void chains(int64_t rows, int64_t columns, int64_t steps, Left a, B b, float* c, int64_t ldc) {
  for (int64_t n = 0; n < columns; n += TILE_VECTORS * W) {
    const int64_t vectors = std::min(TILE_VECTORS, (columns - n) / W);
    if constexpr (TILE_VECTORS == 4) {
      if (vectors == 4) chain_rows<4>(rows, steps, a, b.at(0, n), c + n, ldc);
      if (vectors == 3) chain_rows<3>(rows, steps, a, b.at(0, n), c + n, ldc);
      if (vectors == 2) chain_rows<2>(rows, steps, a, b.at(0, n), c + n, ldc);
    }
    if (vectors == 1) chain_rows<1>(rows, steps, a, b.at(0, n), c + n, ldc);
  }
}

// Rows are (query, head) pairs, the heads of one query behind each other. Of the page at hand, row r sees the places
// j < seen(r); `first` is the place of row 0's query counted from the start of the page, negative in pages ahead of it.
struct Causal {
  int64_t first, heads;
  int64_t seen(int64_t row) const { return std::min(PAGE, first + row / heads + 1); }
  int64_t first_row() const { return first < 0 ? -first * heads : 0; }  // the first that sees any place
};

inline int64_t whole_vectors(int64_t n) { return (n + W - 1) / W * W; }

// out[r][j] = chain over d of x[r][d] * page[d][j], for the vectors of places that row r sees; the rest is left as is.
template <class B>
void score_rows(int64_t rows, Causal causal, int64_t K, const float* x, B page, float* out) {
  for (int64_t r = causal.first_row(); r < rows; r += TILE_ROWS) {
    const int64_t tile = std::min(TILE_ROWS, rows - r), columns = whole_vectors(causal.seen(r + tile - 1));
    for (int64_t i = r; i < r + tile; ++i) std::fill_n(out + i * PAGE, columns, 0.0f);
    chains(tile, columns, K, Left{x + r * K, K, 1}, page, out + r * PAGE, PAGE);
  }
}

// acc[r] = chain over the seen places j of weight[r][j] * page[j]; places unseen are not multiplied, since 0 * NaN is
// NaN.
template <class B>
void fold_rows(int64_t rows, Causal causal, int64_t K, const float* weight, B page, float* acc) {
  const Left a{weight, PAGE, 1};
  for (int64_t r = causal.first_row(); r < rows; r += TILE_ROWS) {
    const int64_t tile = std::min(TILE_ROWS, rows - r), shared = causal.seen(r);
    chains(tile, K, shared, a.at(r, 0), page, acc + r * K, K);
    for (int64_t i = r; i < r + tile; ++i)
      if (const int64_t own = causal.seen(i) - shared; own > 0)
        chains(1, K, own, a.at(i, shared), page.at(shared, 0), acc + i * K, K);
  }
}

inline float max16(vf x) {
  float v[W];
  vstore(v, x);
  for (int h = W / 2; h > 0; h /= 2)
    for (int i = 0; i < h; ++i) v[i] = v[i] > v[i + h] ? v[i] : v[i + h];
  return v[0];
}

// S over the 64 places of a page.
inline float tree64(const vf (&v)[PAGE_VECTORS]) { return tree16(vadd(vadd(v[0], v[2]), vadd(v[1], v[3]))); }

template <class B>
void widen_rows(int64_t rows, int64_t columns, const B* x, int64_t ldx, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < columns; n += W) vstore(out + r * columns + n, load(x + r * ldx + n));
}

template <class T>
void move(const T* x, T* out) {
  std::copy_n(x, W, out);
}
inline void move(const bf16* x, float* out) { vstore(out, load(x)); }
inline void move(const f16* x, float* out) { vstore(out, load(x)); }

// to = the two halves of `from` interleaved: the bits of an element's place rotate by one. Compiles to shuffles.
template <class T>
void interleave(const T* __restrict from, T* __restrict to) {
  constexpr int HALF = W * W / 2;
  for (int n = 0; n < HALF; ++n) {
    to[2 * n] = from[n];
    to[2 * n + 1] = from[n + HALF];
  }
}

// out[d][j] = x[j][d] for 16 rows and 16 columns: a place has eight bits, so four rotations exchange row and column.
template <class T, class Out>
void transpose_block(const T* x, int64_t ldx, Out* out) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  alignas(64) Bits a[W * W], b[W * W];
  for (int j = 0; j < W; ++j) std::memcpy(a + j * W, x + j * ldx, W * sizeof(T));
  interleave(a, b);
  interleave(b, a);
  interleave(a, b);
  interleave(b, a);
  for (int d = 0; d < W; ++d) {
    T column[W];
    std::memcpy(column, a + d * W, sizeof column);
    move(column, out + d * PAGE);
  }
}

// Rows x[j][d] into places j of a page whose positions are neighbours, out[d][j], as they are or widened.
template <class T, class Out>
void transpose_rows(int64_t rows, int64_t K, const T* x, int64_t ldx, Out* out) {
  int64_t j = 0;
  for (; j + W <= rows; j += W)
    for (int64_t d = 0; d < K; d += W) transpose_block(x + j * ldx + d, ldx, out + d * PAGE + j);
  for (; j < rows; ++j)
    for (int64_t d = 0; d < K; ++d) {
      if constexpr (std::is_same_v<T, Out>)
        out[d * PAGE + j] = x[j * ldx + d];
      else
        out[d * PAGE + j] = widen(x[j * ldx + d]);
    }
}

// Float memory of one thread, aligned to cache lines, cut into parts.
class Arena {
 public:
  explicit Arena(int64_t floats) {
    const int64_t bytes = (floats * 4 + 63) / 64 * 64;
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
    if (!memory_) throw std::bad_alloc();
    next_ = memory_.get();
  }
  float* take(int64_t floats) {
    float* part = next_;
    next_ += whole_vectors(floats);
    return part;
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  float* next_;
};

}  // namespace VX_ISA::paged
