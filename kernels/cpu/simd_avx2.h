// vf (floats), vi (int32) and vm (a mask) in two AVX2 registers each.
// One of three files that say the same things; simd.h includes the one that fits.
#pragma once

namespace VX_ISA {

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
inline vi ixor(vi x, vi y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline void wide_product(__m256i a, __m256i x, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(a, x), odd = _mm256_mul_epu32(a, _mm256_srli_epi64(x, 32));
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
inline void wide_product(uint32_t a, vi x, vi& high, vi& low) {  // the two words of a · x, unsigned
  const __m256i each = _mm256_set1_epi32(static_cast<int32_t>(a));
  wide_product(each, x.a, high.a, low.a);
  wide_product(each, x.b, high.b, low.b);
}
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

}  // namespace VX_ISA
