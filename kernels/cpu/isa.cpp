// Which of the compiled instruction sets this machine can run.
#include <cstring>

#define VX_EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <cpuid.h>

extern "C" int vx_avx512bf16_dot_probe();

namespace {

// Not every compiler's __builtin_cpu_supports knows this name. That the system saves the registers follows from AVX2.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
// The probe once compares the instruction with two fused multiply-adds: the processor's word is not enough.
bool has_avx512bf16() {
  static const bool answer = has_avx512() && __builtin_cpu_supports("avx512bf16") && vx_avx512bf16_dot_probe();
  return answer;
}

}  // namespace
#endif

// The compiled sets, slowest first, separated by spaces.
VX_EXPORT const char* vx_isa_names() {
#if defined(__x86_64__)
  return "baseline avx2 avx512 avx512bf16";
#else
  return "baseline";
#endif
}

// 1 if the set was compiled and this machine can run it with equal bits.
VX_EXPORT int vx_isa_available(const char* name) {
  if (std::strcmp(name, "baseline") == 0) return 1;
#if defined(__x86_64__)
  if (std::strcmp(name, "avx2") == 0) return has_avx2();
  if (std::strcmp(name, "avx512") == 0) return has_avx512();
  if (std::strcmp(name, "avx512bf16") == 0) return has_avx512bf16();
#endif
  return 0;
}
