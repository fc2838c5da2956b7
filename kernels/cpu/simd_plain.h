// vf (floats), vi (int32) and vm (a mask) as arrays: plain loops, which the compiler may vectorise lane by lane.
// One of three files that say the same things; simd.h includes the one that fits.
#pragma once

namespace VX_ISA {

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
inline vi ixor(vi x, vi y) {
  vi r;
  VX_EACH r.v[l] = x.v[l] ^ y.v[l];
  return r;
}
inline void wide_product(uint32_t a, vi x, vi& high, vi& low) {
  VX_EACH {
    const uint64_t p = uint64_t{a} * uint32_t(x.v[l]);
    high.v[l] = int32_t(uint32_t(p >> 32));
    low.v[l] = int32_t(uint32_t(p));
  }
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

}  // namespace VX_ISA
