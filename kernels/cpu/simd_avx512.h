// vf (floats), vi (int32) and vm (a mask) in one AVX-512 register each.
// One of three files that say the same things; simd.h includes the one that fits.
#pragma once

namespace VX_ISA {

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
inline vi ixor(vi a, vi b) { return _mm512_xor_si512(a, b); }
inline void wide_product(uint32_t a, vi x, vi& high, vi& low) {  // the two words of a · x, unsigned
  const vi each = iset(static_cast<int32_t>(a));
  const vi even = _mm512_mul_epu32(each, x), odd = _mm512_mul_epu32(each, _mm512_srli_epi64(x, 32));
  high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}
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

}  // namespace VX_ISA
