// The register tile of every matrix product: R rows by C vectors of 16 columns, one chain an output, k ascending.
//
// left   the rows' operand, packed [k][R], so that a step broadcasts R neighbours.
// right  the columns' operand, packed in panels of 32 columns [panel][k][32].
// start  [R][C * 16] floats, the running sums; `out` receives them again, so that a chain may be cut anywhere in k
//        without a rounding, and tiles of any size leave the same bits.
#pragma once
#include "simd.h"

namespace VX_ISA {

constexpr int PANEL = 32;  // columns of a panel

// Rows and column vectors of the largest tile: as many sums as the registers hold beside one step's operands.
#if defined(VX_AVX512)
constexpr int TILE_ROWS = 12, TILE_VECTORS = 2;
#elif defined(VX_AVX2)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;
#else
constexpr int TILE_ROWS = 4, TILE_VECTORS = 1;
#endif

// Column vectors of a tile with few rows: enough independent sums to hide the latency of a multiply-add.
constexpr int wide_vectors(int rows) {
#if defined(VX_AVX512)
  return rows <= 2 ? 8 : 2;
#elif defined(VX_AVX2)
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
#else
  return rows ? 1 : 0;
#endif
}

#define VX_INLINE inline __attribute__((always_inline))

// How a step multiplies. ELEMENTS: of k a step; left_rows(n), right_rows(n): packed rows that hold n elements of k.

// One element a step, widened to float.
template <class T>
struct Single {
  using Left = float;
  using Right = T;
  static constexpr int ELEMENTS = 1;
  static constexpr int64_t left_rows(int64_t n) { return n; }
  static constexpr int64_t right_rows(int64_t n) { return n; }
  static constexpr int64_t steps(int64_t n) { return n; }

  template <int R, int C>
  static VX_INLINE void step(const float* left, const T* right, int64_t panel, vf (&sum)[R][C]) {
    vf column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = load(right + c / 2 * panel + c % 2 * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf row = vset(left[r]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = vfma(row, column[c], sum[r][c]);
    }
  }
  template <int R, int C>
  static VX_INLINE void tail(int64_t, const float*, const T*, int64_t, vf (&)[R][C]) {}
};

// Pairs of bf16 (k in the high half, k + 1 in the low half) by two fused multiply-adds on widened values.
struct PairExact {
  using Left = float;
  using Right = uint32_t;
  static constexpr int ELEMENTS = 2;
  static constexpr int64_t left_rows(int64_t n) { return n; }
  static constexpr int64_t right_rows(int64_t n) { return (n + 1) / 2; }
  static constexpr int64_t steps(int64_t n) { return n / 2; }  // an odd last element is the tail

  static VX_INLINE vi pairs(const uint32_t* p) { return as_int(vload(reinterpret_cast<const float*>(p))); }

  template <int R, int C>
  static VX_INLINE void high(const float* left, const uint32_t* right, int64_t panel, vf (&sum)[R][C]) {
    vf column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      column[c] = as_float(iand(pairs(right + c / 2 * panel + c % 2 * W), iset(static_cast<int32_t>(0xffff0000))));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf row = vset(left[r]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = vfma(row, column[c], sum[r][c]);
    }
  }
  template <int R, int C>
  static VX_INLINE void step(const float* left, const uint32_t* right, int64_t panel, vf (&sum)[R][C]) {
    high<R, C>(left, right, panel, sum);
    vf column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = as_float(shl<16>(pairs(right + c / 2 * panel + c % 2 * W)));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf row = vset(left[R + r]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = vfma(row, column[c], sum[r][c]);
    }
  }
  template <int R, int C>
  static VX_INLINE void tail(int64_t n, const float* left, const uint32_t* right, int64_t panel, vf (&sum)[R][C]) {
    if (n % 2) high<R, C>(left, right, panel, sum);
  }
};

#if defined(__AVX512BF16__)
// The same two multiply-adds in one instruction, which takes the high half first. Flushes subnormals: see `may_dot`.
struct PairDot {
  using Left = uint32_t;
  using Right = uint32_t;
  static constexpr int ELEMENTS = 2;
  static constexpr int64_t left_rows(int64_t n) { return (n + 1) / 2; }
  static constexpr int64_t right_rows(int64_t n) { return (n + 1) / 2; }
  static constexpr int64_t steps(int64_t n) { return (n + 1) / 2; }

  template <int R, int C>
  static VX_INLINE void step(const uint32_t* left, const uint32_t* right, int64_t panel, vf (&sum)[R][C]) {
    __m512bh column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = (__m512bh)_mm512_loadu_si512(right + c / 2 * panel + c % 2 * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh row = (__m512bh)iset(static_cast<int32_t>(left[r]));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], row, column[c]);
    }
  }
  template <int R, int C>
  static VX_INLINE void tail(int64_t, const uint32_t*, const uint32_t*, int64_t, vf (&)[R][C]) {}
};
#endif

// Memory that will be read soon: `bytes` from `from` on for each step of a tile, spread over its steps so that the
// arithmetic hides the way to it. bytes = 0 touches one place again and again.
struct Ahead {
  const char* from;
  int64_t bytes;
};

// Continues the sums over n elements of k: out = sums, or with `fold` out = out + (sums + 0).
// panel: packed elements from one panel to the next.
template <class Op, int R, int C>
void tile(int64_t n, const typename Op::Left* left, const typename Op::Right* right, int64_t panel, const float* start,
          bool fold, float* out, Ahead ahead) {
  constexpr int64_t left_step = Op::left_rows(Op::ELEMENTS) * R;
  vf sum[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = vload(start + (r * C + c) * W);
  }
  for (int64_t step = Op::steps(n); step > 0; --step) {
    Op::template step<R, C>(left, right, panel, sum);
    left += left_step;
    right += PANEL;
    __builtin_prefetch(ahead.from, 0, 2);
    ahead.from += ahead.bytes;
  }
  Op::template tail<R, C>(n, left, right, panel, sum);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* to = out + (r * C + c) * W;
      vstore(to, fold ? vadd(vload(to), vadd(sum[r][c], vset(0.0f))) : sum[r][c]);
    }
  }
}

#undef VX_INLINE

template <class Op>
using Tile = void (*)(int64_t, const typename Op::Left*, const typename Op::Right*, int64_t, const float*, bool, float*,
                      Ahead);

alignas(64) constexpr float ZERO_SUMS[TILE_ROWS * PANEL] = {};  // where a chain starts

// The tile for that many rows, TILE_VECTORS or wide_vectors(rows) vectors wide.
template <class Op, int R = TILE_ROWS>
Tile<Op> find_tile(int rows, bool wide) {
  if constexpr (R > 1) {
    if (rows < R) return find_tile<Op, R - 1>(rows, wide);
  }
  return wide ? tile<Op, R, wide_vectors(R)> : tile<Op, R, TILE_VECTORS>;
}

// Rows in tiles of nearly equal height, so that no tile is too short to hide latency.
struct RowTiles {
  int64_t rows, count;
  explicit RowTiles(int64_t n) : rows(n), count((n + TILE_ROWS - 1) / TILE_ROWS) {}
  int64_t begin(int64_t t) const { return count ? rows * t / count : 0; }
  int height(int64_t t) const { return static_cast<int>(begin(t + 1) - begin(t)); }
};

}  // namespace VX_ISA
