// y = x W^T + bias and dx = dy W: one chain an output, over k and over n. dw and db: matmul_dw.h.
#include "matmul_dw.h"
#include "matmul_pack.h"
#include "matmul_tile.h"
#include "vexact.h"

namespace VX_ISA {

// Ends the sums of rows [row, row + rows) and columns [column, column + width): bias, one rounding, their place.
template <class T, class Y>
struct Store {
  Y* y;
  int64_t ldy;
  const T* bias;  // may be null: then nothing is added
  int64_t columns;

  void operator()(int64_t row, int rows, int64_t column, int width, const float* sums) const {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < width && column + c < columns; c += W) {
        const int64_t at = column + c;
        const int n = static_cast<int>(columns - at < W ? columns - at : W);
        vf v = vload(sums + r * width + c);
        if (bias) v = vadd(v, load(bias + at, n));
        store(y + (row + r) * ldy + at, vadd(v, vset(0.0f)), n);
      }
    }
  }
};

// A product of packed operands. Threads divide the grid of panels (outside) and blocks of row tiles (inside).
template <class Op, class Finish>
class Product {
 public:
  using Left = typename Op::Left;
  using Right = typename Op::Right;

  Product(int64_t M, int64_t N, int64_t K, const Left* left, const Right* right, const Finish& finish)
      : tiles_(M),
        K_(K),
        groups_(ceil_div(N, GROUP)),
        blocks_(ceil_div(tiles_.count, BLOCK_TILES)),
        left_(left),
        right_(right),
        finish_(finish) {}

  void run() const {
    if (blocks_ == 0) return;
    // Reading a weight from memory takes as long as some sixteen multiplications by it.
    const int64_t work = (tiles_.rows / blocks_ + 16) * K_ * GROUP + 1;
    parallel_for(groups_ * blocks_, ceil_div(WORTH_A_THREAD, work), [this](int64_t begin, int64_t end) {
      while (begin < end) begin += cells(begin, end);
    });
  }

 private:
  static constexpr int GROUP = TILE_VECTORS * W;
  static constexpr int64_t BLOCK_TILES = 8;                    // read a part of a panel while it is in a near cache
  static constexpr int64_t BLOCK_DEPTH = 1024 * Op::ELEMENTS;  // of k: the length of that part

  // Computes one cell of the grid, or several neighbours at once where few rows ask for a wider tile. Returns how many.
  int64_t cells(int64_t cell, int64_t end) const {
    const int64_t column = cell / blocks_ * GROUP, block = cell % blocks_;
    const int64_t first = tiles_.count * block / blocks_, last = tiles_.count * (block + 1) / blocks_;
    const int many = tiles_.count == 1 ? wide_vectors(tiles_.height(0)) / TILE_VECTORS : 1;
    const bool wide = many > 1 && end - cell >= many && column % PANEL == 0;
    const int width = wide ? many * GROUP : GROUP;

    alignas(64) float sums[BLOCK_TILES][TILE_ROWS * PANEL];
    for (int64_t k = 0; k == 0 || k < K_; k += BLOCK_DEPTH) {
      for (int64_t t = first; t < last; ++t) multiply(t, column, k, wide, sums[t - first]);
    }
    for (int64_t t = first; t < last; ++t) finish_(tiles_.begin(t), tiles_.height(t), column, width, sums[t - first]);
    return wide ? many : 1;
  }

  void multiply(int64_t t, int64_t column, int64_t k, bool wide, float* sums) const {
    const int rows = tiles_.height(t);
    const int64_t n = K_ - k < BLOCK_DEPTH ? K_ - k : BLOCK_DEPTH, panel = Op::right_rows(K_) * PANEL;
    const Left* left = left_ + tiles_.begin(t) * Op::left_rows(K_) + Op::left_rows(k) * rows;
    const Right* right = right_ + column / PANEL * panel + column % PANEL + Op::right_rows(k) * PANEL;
    find_tile<Op>(rows, wide)(n, left, right, panel, k ? sums : ZERO_SUMS, false, sums, ahead(t, right));
  }

  // With few row tiles a panel comes from memory hardly slower than it is used: fetch the next one meanwhile, each tile
  // its share. With one tile the processor's own prefetching keeps up, with many it does not matter.
  Ahead ahead(int64_t t, const Right* right) const {
    const char* from = reinterpret_cast<const char*>(right);
    if (tiles_.count == 1 || tiles_.count > BLOCK_TILES || GROUP != PANEL) return {from, 0};
    const int64_t panel = Op::right_rows(K_) * PANEL * int64_t{sizeof(Right)};
    return {from + panel + panel / tiles_.count * t, PANEL * int64_t{sizeof(Right)} / tiles_.count};
  }

  RowTiles tiles_;
  int64_t K_, groups_, blocks_;
  const Left* left_;
  const Right* right_;
  Finish finish_;
};

template <class Op, class Finish>
void multiply(int64_t M, int64_t N, int64_t K, const typename Op::Left* left, const void* right, const Finish& finish) {
  Product<Op, Finish>(M, N, K, left, static_cast<const typename Op::Right*>(right), finish).run();
}

// Packs the row tiles of x; `out` holds M * left_rows(K) elements. exponents: if not null, the smallest of each tile.
template <class Op, class X>
void pack_rows(int64_t M, int64_t K, const X* x, int64_t ldx, typename Op::Left* out, int* exponents) {
  const RowTiles tiles(M);
  parallel_for(tiles.count, ceil_div(int64_t{1} << 15, K * TILE_ROWS + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = tiles.begin(t);
      const int height = tiles.height(t);
      pack_left(height, K, x + row * ldx, ldx, out + row * Op::left_rows(K));
      if (!exponents) continue;
      exponents[t] = NO_EXPONENT;
      for (int r = 0; r < height; ++r) exponents[t] = smaller(exponents[t], smallest_exponent(x + (row + r) * ldx, K));
    }
  });
}

// x [M, K] times the packed weight of storage T, whose panels hold N columns.
template <class T, class X, class Finish>
void product(int64_t M, int64_t N, int64_t K, const X* x, int64_t ldx, const void* packed, int min_exponent,
             const Finish& finish) {
  const Scratch<uint32_t> left(M * K + M);
#if defined(__AVX512BF16__)
  if constexpr (MAY_HAVE_DOT<T>) {
    const int64_t tiles = RowTiles(M).count;
    const Scratch<int> exponents(tiles);
    pack_rows<PairDot>(M, K, x, ldx, left.get(), exponents.get());
    int smallest = NO_EXPONENT;
    for (int64_t t = 0; t < tiles; ++t) smallest = smaller(smallest, exponents.get()[t]);
    if (may_dot(smallest, min_exponent)) return multiply<PairDot>(M, N, K, left.get(), packed, finish);
  }
#endif
  (void)min_exponent;
  using Op = typename PackedType<T>::Op;
  float* rows = reinterpret_cast<float*>(left.get());
  pack_rows<Op>(M, K, x, ldx, rows, nullptr);
  multiply<Op>(M, N, K, rows, packed, finish);
}

}  // namespace VX_ISA

VX_API(int64_t, matmul_packed_bytes)(int dtype, int64_t N, int64_t K) {
  using namespace VX_ISA;
  return with_storage(dtype, [&](auto t) { return packed_bytes<decltype(t)>(N, K); });
}

VX_API(int64_t, matmul_dx_bytes)(int dtype, int64_t N, int64_t K) {
  using namespace VX_ISA;
  return with_storage(dtype, [&](auto t) { return packed_bytes<decltype(t)>(K, N); });
}

VX_API(void, matmul_pack)(int dtype, int64_t N, int64_t K, const void* w, int64_t ldw, void* packed,
                          int32_t* min_exponent) {
  using namespace VX_ISA;
  *min_exponent =
      with_storage(dtype, [&](auto t) { return pack_weight(N, K, static_cast<const decltype(t)*>(w), ldw, packed); });
}

VX_API(void, matmul_unpack)(int dtype, int64_t N, int64_t K, const void* packed, void* w, int64_t ldw) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto t) { unpack_weight(N, K, packed, static_cast<decltype(t)*>(w), ldw); });
}

VX_API(void, matmul)(int dtype, int64_t M, int64_t N, int64_t K, const void* x, int64_t ldx, const void* packed,
                     int32_t min_exponent, const void* bias, int y_float32, void* y, int64_t ldy) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto t) {
    using T = decltype(t);
    const T* rows = static_cast<const T*>(x);
    const T* b = static_cast<const T*>(bias);
    if (y_float32) {
      product<T>(M, N, K, rows, ldx, packed, min_exponent, Store<T, float>{static_cast<float*>(y), ldy, b, N});
    } else {
      product<T>(M, N, K, rows, ldx, packed, min_exponent, Store<T, T>{static_cast<T*>(y), ldy, b, N});
    }
  });
}

VX_API(void, matmul_dx)(int dtype, int64_t M, int64_t N, int64_t K, const void* dy, int64_t lddy, const void* packed,
                        int32_t min_exponent, void* scratch, void* dx, int64_t lddx) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto t) {
    using T = decltype(t);
    using G = Gradient<T>;
    turn_weight<T>(N, K, packed, scratch);
    product<T>(M, K, N, static_cast<const G*>(dy), lddy, scratch, min_exponent,
               Store<T, G>{static_cast<G*>(dx), lddx, nullptr, K});
  });
}

VX_API(int, matmul_dw)(int dtype, int64_t M, int64_t N, int64_t K, const void* dy, int64_t lddy, const void* x,
                       int64_t ldx, int64_t n_seg, const int64_t* ends, const uint8_t* fold, float* lane, float* total,
                       int state) {
  using namespace VX_ISA;
  return with_storage(dtype, [&](auto t) {
    using T = decltype(t);
    using G = Gradient<T>;
    return weight_gradient(M, N, K, static_cast<const G*>(dy), lddy, static_cast<const T*>(x), ldx, n_seg, ends, fold,
                           lane, total, state);
  });
}

VX_API(void, matmul_db)(int dtype, int64_t /*M*/, int64_t N, const void* dy, int64_t lddy, int64_t n_seg,
                        const int64_t* ends, const uint8_t* fold, float* lane, float* total) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto t) {
    using G = Gradient<decltype(t)>;
    bias_gradient(N, static_cast<const G*>(dy), lddy, n_seg, ends, fold, lane, total);
  });
}

#if defined(__AVX512BF16__)
namespace VX_ISA {

// Does the instruction equal two multiply-adds, the high half first? Sums of mixed size, ties and cancellations.
inline bool dot_is_two_fmas() {
  const FloatEnvironment environment;
  uint64_t state = 1;
  const auto random = [&state] {
    return static_cast<uint32_t>((state = state * 6364136223846793005u + 1442695040888963407u) >> 33);
  };
  const auto some_bf16 = [&random] { return (random() & 0x807fu) | ((111 + random() % 32) << 7); };
  for (int trial = 0; trial < 8192; ++trial) {
    const uint32_t a = some_bf16() << 16 | some_bf16(), b = some_bf16() << 16 | some_bf16();
    const float high_a = float_of(a & 0xffff0000u), high_b = float_of(b & 0xffff0000u);
    const float low_a = float_of(a << 16), low_b = float_of(b << 16);
    float start = float_of((random() & 0x807fffffu) | ((111 + random() % 32) << 23));
    if (trial % 4 == 1) start = -(high_a * high_b);                                 // cancels to +0
    if (trial % 4 == 2) start = float_of(bits_of(high_a * high_b * 0x1p17f) | 1u);  // near a tie of the first sum
    float got[W];
    vstore(got, _mm512_dpbf16_ps(vset(start), (__m512bh)iset(int32_t(a)), (__m512bh)iset(int32_t(b))));
    if (bits_of(got[0]) != bits_of(fma1(low_a, low_b, fma1(high_a, high_b, start)))) return false;
  }
  return true;
}

}  // namespace VX_ISA

VX_API(int, dot_probe)() { return VX_ISA::dot_is_two_fmas(); }
#endif
