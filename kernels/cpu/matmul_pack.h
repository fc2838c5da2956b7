// Operands in the order in which the tile reads them: weights in panels, rows in tiles, and the weight turned for dx.
//
// A packed weight [N, K] is [ceil(N/32)][K][32] in float32 and float16, and [ceil(N/32)][ceil(K/2)][32] in bf16 pairs:
// element k in the high half of a uint32, k + 1 in the low half. Places past N and K are +0.
#pragma once
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <cstdio>
#include <cstdlib>

#include "matmul_tile.h"
#include "parallel.h"
#include "rows.h"

namespace VX_ISA {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Memory of one call, aligned to a cache line and not initialised.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t n) {
    data_ = static_cast<T*>(std::aligned_alloc(64, static_cast<size_t>(round_up(n * int64_t{sizeof(T)} + 1, 64))));
    if (!data_) {
      std::fprintf(stderr, "vexact: out of memory for %lld bytes\n", static_cast<long long>(n * int64_t{sizeof(T)}));
      std::abort();
    }
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

// Exponents decide whether the bf16 instruction may be used.
constexpr int NO_EXPONENT = 128;        // every element is zero
constexpr int BROKEN_EXPONENT = -1000;  // an element is subnormal, infinite or NaN

template <class T>
struct Layout;
template <>
struct Layout<float> {
  using Bits = uint32_t;
  static constexpr int mantissa = 23, bias = 127;
};
template <>
struct Layout<bf16> {
  using Bits = uint16_t;
  static constexpr int mantissa = 7, bias = 127;
};
template <>
struct Layout<f16> {
  using Bits = uint16_t;
  static constexpr int mantissa = 10, bias = 15;
};

// The smallest exponent of a non-zero element.
template <class T>
int smallest_exponent(const T* p, int64_t n) {
  using Bits = typename Layout<T>::Bits;
  constexpr int mantissa = Layout<T>::mantissa, bias = Layout<T>::bias;
  constexpr Bits one = Bits(1) << mantissa, infinity = Bits(2 * bias + 1) << mantissa, magnitude = Bits(~Bits(0)) >> 1;
  Bits lowest = Bits(~Bits(0)), highest = 0;  // of |x| - 1, where zero wraps to the top, and of |x|
  for (int64_t i = 0; i < n; ++i) {
    Bits u;
    std::memcpy(&u, p + i, sizeof u);
    u &= magnitude;
    const Bits below = Bits(u - 1);
    lowest = below < lowest ? below : lowest;
    highest = u > highest ? u : highest;
  }
  if (highest == 0) return NO_EXPONENT;
  if (highest >= infinity || Bits(lowest + 1) < one) return BROKEN_EXPONENT;
  return (Bits(lowest + 1) >> mantissa) - bias;
}

inline int smaller(int a, int b) { return a < b ? a : b; }

// Whether a product of that storage may use the instruction at all.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool MAY_HAVE_DOT = false;
template <>
inline constexpr bool MAY_HAVE_DOT<bf16> = true;
#else
template <class T>
constexpr bool MAY_HAVE_DOT = false;
#endif

// The instruction flushes subnormals and rounds once per element: every sum of products of 8-bit mantissas is then a
// multiple of 2^-126, so no subnormal arises.
inline bool may_dot(int left_exponent, int right_exponent) { return left_exponent + right_exponent >= -112; }

template <class T>
struct PackedType {
  using type = T;
  using Op = Single<T>;
  static constexpr int64_t rows(int64_t k) { return k; }  // packed rows for k elements
};
template <>
struct PackedType<bf16> {
  using type = uint32_t;
  using Op = PairExact;
  static constexpr int64_t rows(int64_t k) { return (k + 1) / 2; }
};

template <class T>
int64_t packed_bytes(int64_t N, int64_t K) {
  return ceil_div(N, PANEL) * PackedType<T>::rows(K) * PANEL * int64_t{sizeof(typename PackedType<T>::type)};
}

// Where element k of a column of a panel lies, counted in elements of T. A little-endian pair has its high half last.
template <class T>
int64_t packed_place(int64_t k, int64_t column) {
  return k * PANEL + column;
}
template <>
inline int64_t packed_place<bf16>(int64_t k, int64_t column) {
  return (k / 2 * PANEL + column) * 2 + (1 - k % 2);
}

template <class T>
T* panel_of(const void* packed, int64_t panel, int64_t K) {
  constexpr int64_t elements = sizeof(typename PackedType<T>::type) / sizeof(T);
  return static_cast<T*>(const_cast<void*>(packed)) + panel * PackedType<T>::rows(K) * PANEL * elements;
}

constexpr int64_t PACK_ROWS = 64;  // of k at a time, so that the written part of a panel stays in the first cache

template <class T>
void pack_panel(int64_t columns, int64_t K, const T* w, int64_t ldw, T* panel) {
  const int64_t padded = sizeof(typename PackedType<T>::type) == sizeof(T) ? K : round_up(K, 2);
  for (int64_t k0 = 0; k0 < padded; k0 += PACK_ROWS) {
    const int64_t end = k0 + PACK_ROWS < padded ? k0 + PACK_ROWS : padded;
    for (int64_t n = 0; n < PANEL; ++n) {
      for (int64_t k = k0; k < end; ++k) panel[packed_place<T>(k, n)] = n < columns && k < K ? w[n * ldw + k] : T{};
    }
  }
}

template <class T>
int pack_weight(int64_t N, int64_t K, const T* w, int64_t ldw, void* packed) {
  const int64_t panels = ceil_div(N, PANEL);
  const Scratch<int> exponents(panels);
  parallel_for(panels, ceil_div(WORTH_A_THREAD / 8, K * PANEL + 1), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t n0 = p * PANEL, columns = N - n0 < PANEL ? N - n0 : PANEL;
      pack_panel(columns, K, w + n0 * ldw, ldw, panel_of<T>(packed, p, K));
      int smallest = NO_EXPONENT;
      for (int64_t n = n0; n < n0 + columns; ++n) smallest = smaller(smallest, smallest_exponent(w + n * ldw, K));
      exponents.get()[p] = smallest;
    }
  });
  int smallest = NO_EXPONENT;
  for (int64_t p = 0; p < panels; ++p) smallest = smaller(smallest, exponents.get()[p]);
  return smallest;
}

template <class T>
void unpack_weight(int64_t N, int64_t K, const void* packed, T* w, int64_t ldw) {
  parallel_for(N, PANEL + WORTH_A_THREAD / 8 / (K + 1), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const T* panel = panel_of<T>(packed, n / PANEL, K);
      for (int64_t k = 0; k < K; ++k) w[n * ldw + k] = panel[packed_place<T>(k, n % PANEL)];
    }
  });
}

// The weight turned: [N, K] packed over k becomes its transpose [K, N] packed over n, block by block.
// A block of 32 n by 32 k: to[n][k] = from[k][n], for the rows that exist; the rest of `to` is +0.
template <class T>
void turn_block(int64_t n_rows, int64_t k_rows, const T* from, T* to) {
  for (int64_t n = 0; n < n_rows; ++n) {
    for (int64_t k = 0; k < PANEL; ++k) to[n * PANEL + k] = k < k_rows ? from[k * PANEL + n] : T{};
  }
}

#if defined(__x86_64__)
// Four by four floats, which every x86-64 turns in registers.
inline void turn_block(int64_t n_rows, int64_t k_rows, const float* from, float* to) {
  for (int64_t n = 0; n < n_rows; n += 4) {
    for (int64_t k = 0; k < PANEL; k += 4) {
      __m128 v[4];
      for (int64_t i = 0; i < 4; ++i) {
        v[i] = k + i < k_rows ? _mm_loadu_ps(from + (k + i) * PANEL + n) : _mm_setzero_ps();
      }
      _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
      for (int64_t i = 0; i < 4 && n + i < n_rows; ++i) _mm_storeu_ps(to + (n + i) * PANEL + k, v[i]);
    }
  }
}

// Pairs: two neighbours of a packed row are a 2 x 2 block, turned inside its 64 bits, and blocks are then turned two by
// two. The words of a block are n k+1, n k, n+1 k+1, n+1 k; turned they are n+1 k, n k, n+1 k+1, n k+1.
inline void turn_block(int64_t n_rows, int64_t k_rows, const uint32_t* from, uint32_t* to) {
  constexpr int words = _MM_SHUFFLE(0, 2, 1, 3);
  const auto blocks = [&](int64_t k, int64_t n) {
    if (k >= k_rows) return _mm_setzero_si128();
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k * PANEL + 2 * n));
    return _mm_shufflehi_epi16(_mm_shufflelo_epi16(v, words), words);
  };
  for (int64_t n = 0; n < n_rows; n += 2) {
    for (int64_t k = 0; k < PANEL / 2; k += 2) {
      const __m128i a = blocks(k, n), b = blocks(k + 1, n);
      __m128i* out = reinterpret_cast<__m128i*>(to + n * PANEL + 2 * k);
      _mm_storeu_si128(out, _mm_unpacklo_epi64(a, b));
      if (n + 1 < n_rows) _mm_storeu_si128(out + PANEL / 4, _mm_unpackhi_epi64(a, b));
    }
  }
}
#else
// Pairs: two neighbours of a packed row are a 2 x 2 block.
inline void turn_block(int64_t n_rows, int64_t k_rows, const uint32_t* from, uint32_t* to) {
  for (int64_t n = 0; n < n_rows; ++n) {
    for (int64_t k = 0; k < PANEL / 2; ++k) {
      const uint32_t u = k < k_rows ? from[k * PANEL + 2 * n] : 0, v = k < k_rows ? from[k * PANEL + 2 * n + 1] : 0;
      to[n * PANEL + 2 * k] = (u & 0xffff0000u) | v >> 16;
      to[n * PANEL + 2 * k + 1] = u << 16 | (v & 0xffffu);
    }
  }
}
#endif

template <class T>
void turn_weight(int64_t N, int64_t K, const void* packed, void* turned) {
  using P = typename PackedType<T>::type;
  const int64_t n_rows = PackedType<T>::rows(N), k_rows = PackedType<T>::rows(K), side = PackedType<T>::rows(PANEL);
  parallel_for(ceil_div(K, PANEL), ceil_div(WORTH_A_THREAD / 8, N * PANEL + 1), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      P* to = static_cast<P*>(turned) + panel * n_rows * PANEL;
      for (int64_t p = 0; p < ceil_div(N, PANEL); ++p) {
        const P* from = static_cast<const P*>(packed) + (p * k_rows + panel * side) * PANEL;
        const int64_t n_left = n_rows - p * side, k_left = k_rows - panel * side;
        // The next block lies a whole panel further, where no hardware looks ahead.
        const char* next = reinterpret_cast<const char*>(from + k_rows * PANEL);
        for (int64_t i = 0; i < side * PANEL * int64_t{sizeof(P)}; i += 64) __builtin_prefetch(next + i);
        turn_block(n_left < side ? n_left : side, k_left < side ? k_left : side, from, to + p * side * PANEL);
      }
    }
  });
}

// Rows x[r, k0 … k1) of a tile as out[k][rows], widened.
template <class T>
void pack_left(int rows, int64_t K, const T* x, int64_t ldx, float* out) {
  for (int64_t k0 = 0; k0 < K; k0 += PACK_ROWS) {
    const int64_t end = k0 + PACK_ROWS < K ? k0 + PACK_ROWS : K;
    for (int r = 0; r < rows; ++r) {
      for (int64_t k = k0; k < end; ++k) out[k * rows + r] = widen(x[r * ldx + k]);
    }
  }
}

// The same in pairs [k/2][rows]; the partner of a last odd element is +0.
inline void pack_left(int rows, int64_t K, const bf16* x, int64_t ldx, uint32_t* out) {
  const int64_t pairs = K / 2;
  for (int64_t k0 = 0; k0 < pairs; k0 += PACK_ROWS) {
    const int64_t end = k0 + PACK_ROWS < pairs ? k0 + PACK_ROWS : pairs;
    for (int r = 0; r < rows; ++r) {
      for (int64_t k = k0; k < end; ++k) {
        uint32_t u;
        std::memcpy(&u, x + r * ldx + 2 * k, sizeof u);
        out[k * rows + r] = u << 16 | u >> 16;
      }
    }
  }
  for (int r = 0; r < rows && K % 2; ++r) out[pairs * rows + r] = static_cast<uint32_t>(x[r * ldx + K - 1].u) << 16;
}

}  // namespace VX_ISA
