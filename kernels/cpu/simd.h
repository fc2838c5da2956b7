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

// ---------------------------------------------------------------- the fused multiply-add without hardware
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

// ---------------------------------------------------------------- storage types
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

// ---------------------------------------------------------------- vf: floats, vi: int32, vm: a mask
#if defined(VX_AVX512)

using vf = __m512;
using vi = __m512i;
using vm = __mmask16;
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vi iset(int32_t x) { return _mm512_set1_epi32(x); }
inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
inline vm first(int n) { return n >= W ? vm(0xffff) : vm((1u << n) - 1); }
inline vf vload(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline void vstore(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vsqrt(vf a) { return _mm512_sqrt_ps(a); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vm vlt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }  // false on NaN
inline vm vnan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline vm ilt(vi a, vi b) { return _mm512_cmplt_epi32_mask(a, b); }
inline vm ieq(vi a, vi b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline vf vpick(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
inline vi ipick(vm m, vi yes, vi no) { return _mm512_mask_blend_epi32(m, no, yes); }
inline bool any(vm m) { return m != 0; }
inline vi as_int(vf x) { return _mm512_castps_si512(x); }
inline vf as_float(vi x) { return _mm512_castsi512_ps(x); }
inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
inline vi isub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
inline vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi ior(vi a, vi b) { return _mm512_or_si512(a, b); }
template <int K>
inline vi shl(vi a) {
  return _mm512_slli_epi32(a, K);
}
template <int K>
inline vi shr(vi a) {
  return _mm512_srli_epi32(a, K);
}  // logical
template <int K>
inline vi sar(vi a) {
  return _mm512_srai_epi32(a, K);
}  // arithmetic
inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline vi iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline vi load_u16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline void store_u16(void* p, vi x) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x)); }
inline vf widen_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline void narrow_f16(void* p, vf x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(VX_AVX2)

struct vf {
  __m256 a, b;
};
struct vi {
  __m256i a, b;
};
using vm = vi;  // all ones or all zeros in a lane
inline vf vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vi iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline vi iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline vf vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline vm ilt(vi x, vi y) { return {_mm256_cmpgt_epi32(y.a, x.a), _mm256_cmpgt_epi32(y.b, x.b)}; }
inline vm ieq(vi x, vi y) { return {_mm256_cmpeq_epi32(x.a, y.a), _mm256_cmpeq_epi32(x.b, y.b)}; }
inline vm first(int n) { return ilt(iota(), iset(n)); }
inline vf vload(const float* p, int n) {
  if (n >= W) return vload(p);
  const vm m = first(n);
  return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
inline void vstore(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void vstore(float* p, vf x, int n) {
  if (n >= W) return vstore(p, x);
  const vm m = first(n);
  _mm256_maskstore_ps(p, m.a, x.a);
  _mm256_maskstore_ps(p + 8, m.b, x.b);
}
inline vf vadd(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline vf vsub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline vf vmul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline vf vdiv(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline vf vsqrt(vf x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline vf vfma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline vf vmax(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vi as_int(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline vf as_float(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline vm vlt(vf x, vf y) {
  return as_int(vf{_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)});
}
inline vm vnan(vf x) {
  return as_int(vf{_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)});
}
inline vf vpick(vm m, vf yes, vf no) {
  const vf f = as_float(m);
  return {_mm256_blendv_ps(no.a, yes.a, f.a), _mm256_blendv_ps(no.b, yes.b, f.b)};
}
inline vi ipick(vm m, vi yes, vi no) { return as_int(vpick(m, as_float(yes), as_float(no))); }
inline bool any(vm m) { return !_mm256_testz_si256(m.a, m.a) || !_mm256_testz_si256(m.b, m.b); }
inline vi iadd(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline vi isub(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline vi iand(vi x, vi y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline vi ior(vi x, vi y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int K>
inline vi shl(vi x) {
  return {_mm256_slli_epi32(x.a, K), _mm256_slli_epi32(x.b, K)};
}
template <int K>
inline vi shr(vi x) {
  return {_mm256_srli_epi32(x.a, K), _mm256_srli_epi32(x.b, K)};
}
template <int K>
inline vi sar(vi x) {
  return {_mm256_srai_epi32(x.a, K), _mm256_srai_epi32(x.b, K)};
}
inline vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline vi load_u16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
inline void store_u16(void* p, vi x) {                   // lanes hold 0 … 65535
  const __m256i packed = _mm256_packus_epi32(x.a, x.b);  // a0-3 b0-3 a4-7 b4-7
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline vf widen_f16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void narrow_f16(void* p, vf x) {
  __m128i* q = static_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else  // any processor: plain loops, which the compiler may vectorise lane by lane

struct vf {
  float v[W];
};
struct vi {
  int32_t v[W];
};
using vm = vi;
#define VX_EACH for (int l = 0; l < W; ++l)
inline vf vset(float x) {
  vf r;
  VX_EACH r.v[l] = x;
  return r;
}
inline vi iset(int32_t x) {
  vi r;
  VX_EACH r.v[l] = x;
  return r;
}
inline vi iota() {
  vi r;
  VX_EACH r.v[l] = l;
  return r;
}
inline vf vload(const float* p) {
  vf r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline vf vload(const float* p, int n) {
  vf r;
  VX_EACH r.v[l] = l < n ? p[l] : 0.0f;
  return r;
}
inline void vstore(float* p, vf x) { std::memcpy(p, x.v, sizeof x.v); }
inline void vstore(float* p, vf x, int n) {
  for (int l = 0; l < W && l < n; ++l) p[l] = x.v[l];
}
inline vf vadd(vf x, vf y) {
  vf r;
  VX_EACH r.v[l] = x.v[l] + y.v[l];
  return r;
}
inline vf vsub(vf x, vf y) {
  vf r;
  VX_EACH r.v[l] = x.v[l] - y.v[l];
  return r;
}
inline vf vmul(vf x, vf y) {
  vf r;
  VX_EACH r.v[l] = x.v[l] * y.v[l];
  return r;
}
inline vf vdiv(vf x, vf y) {
  vf r;
  VX_EACH r.v[l] = x.v[l] / y.v[l];
  return r;
}
inline vf vsqrt(vf x) {
  vf r;
  VX_EACH r.v[l] = __builtin_sqrtf(x.v[l]);
  return r;
}
inline vf vfma(vf x, vf y, vf z) {
  vf r;
  VX_EACH r.v[l] = fma1(x.v[l], y.v[l], z.v[l]);
  return r;
}
inline vf vmax(vf x, vf y) {
  vf r;
  VX_EACH r.v[l] = x.v[l] > y.v[l] ? x.v[l] : y.v[l];
  return r;
}
inline vi as_int(vf x) {
  vi r;
  std::memcpy(&r, &x, sizeof r);
  return r;
}
inline vf as_float(vi x) {
  vf r;
  std::memcpy(&r, &x, sizeof r);
  return r;
}
inline vm vlt(vf x, vf y) {
  vm r;
  VX_EACH r.v[l] = x.v[l] < y.v[l] ? -1 : 0;
  return r;
}
inline vm vnan(vf x) {
  vm r;
  VX_EACH r.v[l] = x.v[l] != x.v[l] ? -1 : 0;
  return r;
}
inline vm ilt(vi x, vi y) {
  vm r;
  VX_EACH r.v[l] = x.v[l] < y.v[l] ? -1 : 0;
  return r;
}
inline vm ieq(vi x, vi y) {
  vm r;
  VX_EACH r.v[l] = x.v[l] == y.v[l] ? -1 : 0;
  return r;
}
inline vm first(int n) { return ilt(iota(), iset(n)); }
inline vf vpick(vm m, vf yes, vf no) {
  vf r;
  VX_EACH r.v[l] = m.v[l] ? yes.v[l] : no.v[l];
  return r;
}
inline vi ipick(vm m, vi yes, vi no) {
  vi r;
  VX_EACH r.v[l] = m.v[l] ? yes.v[l] : no.v[l];
  return r;
}
inline bool any(vm m) {
  int32_t r = 0;
  VX_EACH r |= m.v[l];
  return r != 0;
}
// unsigned inside: signed overflow is undefined, wrapping is meant
inline vi iadd(vi x, vi y) {
  vi r;
  VX_EACH r.v[l] = int32_t(uint32_t(x.v[l]) + uint32_t(y.v[l]));
  return r;
}
inline vi isub(vi x, vi y) {
  vi r;
  VX_EACH r.v[l] = int32_t(uint32_t(x.v[l]) - uint32_t(y.v[l]));
  return r;
}
inline vi iand(vi x, vi y) {
  vi r;
  VX_EACH r.v[l] = x.v[l] & y.v[l];
  return r;
}
inline vi ior(vi x, vi y) {
  vi r;
  VX_EACH r.v[l] = x.v[l] | y.v[l];
  return r;
}
template <int K>
inline vi shl(vi x) {
  vi r;
  VX_EACH r.v[l] = int32_t(uint32_t(x.v[l]) << K);
  return r;
}
template <int K>
inline vi shr(vi x) {
  vi r;
  VX_EACH r.v[l] = int32_t(uint32_t(x.v[l]) >> K);
  return r;
}
template <int K>
inline vi sar(vi x) {
  vi r;
  VX_EACH r.v[l] = x.v[l] >> K;
  return r;
}
inline vf to_float(vi x) {
  vf r;
  VX_EACH r.v[l] = static_cast<float>(x.v[l]);
  return r;
}
inline vi load_u16(const void* p) {
  uint16_t u[W];
  std::memcpy(u, p, sizeof u);
  vi r;
  VX_EACH r.v[l] = u[l];
  return r;
}
inline void store_u16(void* p, vi x) {
  uint16_t u[W];
  VX_EACH u[l] = static_cast<uint16_t>(x.v[l]);
  std::memcpy(p, u, sizeof u);
}
inline vf widen_f16(const void* p) {
  f16 h[W];
  std::memcpy(h, p, sizeof h);
  vf r;
  VX_EACH r.v[l] = widen(h[l]);
  return r;
}
inline void narrow_f16(void* p, vf x) {
  f16 h[W];
  VX_EACH narrow(x.v[l], h[l]);
  std::memcpy(p, h, sizeof h);
}
#undef VX_EACH

#endif

// ---------------------------------------------------------------- loads and stores in a storage type
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

// ---------------------------------------------------------------- the tree S(v)
inline float tree16(vf x) {  // upper half onto lower half until one is left
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
