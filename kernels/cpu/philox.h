// Philox4x32-10 (Salmon et al. 2011), of one block or of sixteen side by side.
#pragma once
#include "simd.h"

namespace VX_ISA {

inline uint32_t ixor(uint32_t x, uint32_t y) { return x ^ y; }
inline void wide_product(uint32_t a, uint32_t x, uint32_t& high, uint32_t& low) {
  const uint64_t p = uint64_t{a} * x;
  high = static_cast<uint32_t>(p >> 32);
  low = static_cast<uint32_t>(p);
}
inline void repeat(uint32_t x, uint32_t& word) { word = x; }
inline void repeat(uint32_t x, vi& word) { word = iset(static_cast<int32_t>(x)); }

// The counter becomes the four random words.
template <class Word>
inline void philox(Word (&c)[4], uint64_t seed) {
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    Word high_0, low_0, high_1, low_1, k0, k1;
    wide_product(0xd2511f53u, c[0], high_0, low_0);
    wide_product(0xcd9e8d57u, c[2], high_1, low_1);
    repeat(key[0], k0);
    repeat(key[1], k1);
    c[0] = ixor(ixor(high_1, c[1]), k0);
    c[1] = low_1;
    c[2] = ixor(ixor(high_0, c[3]), k1);
    c[3] = low_0;
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
}

}  // namespace VX_ISA
