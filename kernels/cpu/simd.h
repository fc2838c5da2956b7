// Sixteen float lanes with one meaning on every instruction set.
//
// A kernel is written once on `vf` and compiled once per instruction set; each compilation lives in a namespace
// of its own (VX_ISA), because the linker merges templates of equal name. Lanes never talk to each other except in
// `tree16`, so the width of the machine's registers cannot reach a result.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define VX_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__)
#define VX_AVX2 1
#include <immintrin.h>
#endif

namespace VX_ISA {

constexpr int W = 16;  // lanes of a vf on every instruction set

// The fused multiply-add without hardware.
// p = a*b is exact in double; s + e = p + c exactly (TwoSum); stepping an even-ended s toward e rounds s to odd, so the
// final rounding to float is the only one that counts. Plain double rounding is wrong on
// a = 1+2^-23, b = (1-2^-23)*2^-24, c = 1+2^-23.
inline float fma_emulated(float a, float b, float c) {
  const double p = static_cast<double>(a) * static_cast<double>(b), d = c;
  const double s = p + d;
  const double t = s - p;
  const double e = (p - (s - t)) + (d - t);
  int64_t bits;
  std::memcpy(&bits, &s, 8);
  // e is NaN when s is infinite or NaN: then s is already the answer
  const bool inexact = (e > 0.0) | (e < 0.0);
  if (inexact && (bits & 1) == 0) bits += ((e > 0.0) == (s > 0.0)) ? 1 : -1;
  double r;
  std::memcpy(&r, &bits, 8);
  return static_cast<float>(r);
}

inline float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return fma_emulated(a, b, c);
#endif
}

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

enum Dtype { F32 = 0, BF16 = 1, F16 = 2 };
struct bf16 {
  uint16_t u;
};
struct f16 {
  uint16_t u;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return float_of(static_cast<uint32_t>(x.u) << 16); }
inline float widen(f16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.u & 0x8000) << 16, e = (h.u >> 10) & 31, m = h.u & 1023;
  if (e == 31) return float_of(sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0));
  if (e) return float_of(sign | ((e + 112) << 23) | (m << 13));
  const float tiny = static_cast<float>(m) * 0x1p-24f;  // exact
  return float_of(sign | bits_of(tiny));
}

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, bf16& out) {
  const uint32_t u = bits_of(x);
  out.u = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<uint16_t>((u >> 16) | 0x40)
                                          : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
inline void narrow(float x, f16& out) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) {
    out.u = static_cast<uint16_t>(sign | 0x7e00 | ((a >> 13) & 0x3ff));
  } else if (a >= 0x477ff000u) {  // 65520 and above round to infinity
    out.u = static_cast<uint16_t>(sign | 0x7c00);
  } else if (a >= 0x38800000u) {  // normal: add half of the last place, ties to even
    const uint32_t r = a + 0xfffu + ((a >> 13) & 1);
    out.u = static_cast<uint16_t>(sign | ((r - 0x38000000u) >> 13));
  } else {  // subnormal: adding 0.5 puts the unit 2^-24 in the last place, so the addition rounds
    const float r = float_of(a) + 0.5f;
    out.u = static_cast<uint16_t>(sign | (bits_of(r) - 0x3f000000u));
  }
}

}  // namespace VX_ISA

// vf: floats, vi: int32, vm: a mask
#if defined(VX_AVX512)
#include "simd_avx512.h"
#elif defined(VX_AVX2)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

namespace VX_ISA {

// Loads widen from a storage type, stores round to it; with a count, they touch the first n elements alone.
inline vf load(const float* p) { return vload(p); }
inline vf load(const bf16* p) { return as_float(shl<16>(load_u16(p))); }
inline vf load(const f16* p) { return widen_f16(p); }
inline vf load(const float* p, int n) { return vload(p, n); }
template <class T>
inline vf load(const T* p, int n) {
  if (n >= W) return load(p);
  T buffer[W] = {};
  for (int l = 0; l < n; ++l) buffer[l] = p[l];
  return load(buffer);
}

inline vi bf16_bits(vf x) {  // round to nearest even; NaN stays NaN
  const vi u = as_int(x);
  const vi rounded = iadd(iadd(u, iset(0x7fff)), iand(shr<16>(u), iset(1)));
  return ipick(vnan(x), ior(shr<16>(u), iset(0x40)), shr<16>(rounded));
}
inline void store(float* p, vf x) { vstore(p, x); }
inline void store(bf16* p, vf x) { store_u16(p, bf16_bits(x)); }
inline void store(f16* p, vf x) { narrow_f16(p, x); }
inline void store(float* p, vf x, int n) { vstore(p, x, n); }
template <class T>
inline void store(T* p, vf x, int n) {
  if (n >= W) return store(p, x);
  T buffer[W];
  store(buffer, x);
  for (int l = 0; l < n; ++l) p[l] = buffer[l];
}
// The value that a store and a load would leave: one rounding to T.
inline vf rounded(vf x, float) { return x; }
inline vf rounded(vf x, bf16) { return as_float(shl<16>(bf16_bits(x))); }
inline vf rounded(vf x, f16) {
  f16 buffer[W];
  store(buffer, x);
  return load(buffer);
}

// S(v) of sixteen values: the upper half onto the lower half until one is left.
inline float tree16(vf x) {
  float v[W];
  vstore(v, x);
  for (int h = W / 2; h > 0; h /= 2)
    for (int i = 0; i < h; ++i) v[i] = v[i] + v[i + h];
  return v[0] + 0.0f;
}

// S over n values given by load_at(i, count): 16 lanes from index i, lanes past `count` being +0.
template <class Load>
inline float tree_block(int64_t n, Load load_at) {  // n <= 1024
  vf v[64];
  int width = 1;
  while (width * W < n) width *= 2;
  for (int i = 0; i < width; ++i) {
    const int64_t left = n - static_cast<int64_t>(i) * W;
    v[i] = left > 0 ? load_at(static_cast<int64_t>(i) * W, left < W ? static_cast<int>(left) : W) : vset(0.0f);
  }
  for (int h = width / 2; h > 0; h /= 2)
    for (int i = 0; i < h; ++i) v[i] = vadd(v[i], v[i + h]);
  return tree16(v[0]);
}

float tree(const float* v, int64_t n);  // sum.cpp: S of n floats in memory

}  // namespace VX_ISA
