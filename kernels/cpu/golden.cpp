// golden SET: one line an op, "<op>.<dtype>.<input> <hash of the output's bits>", on inputs made from integers alone.
//
// A program without Python, so that a processor at hand only through a cross compiler and an emulator can be held
// against tests/kernels/golden.json. Every output starts as NaN: what an op does not write shows.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>

// Linked with the library it has every set; compiled together with all.cpp and VX_ISA=baseline it has that one alone.
#if defined(__x86_64__) && !defined(VX_ISA)
#define ALL_SETS
#endif
extern "C" int vx_isa_available(const char* name);

namespace {

using i64 = int64_t;
using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

// The interface of vexact.h, once for all sets.
// clang-format off
#define SEGMENTS i64, const i64*, const u8*, float*, float*
#define OPS(X)                                                                                                       \
  X(i64, matmul_packed_bytes, (int, i64, i64))                                                                       \
  X(void, matmul_pack, (int, i64, i64, const void*, i64, void*, int32_t*))                                           \
  X(void, matmul_unpack, (int, i64, i64, const void*, void*, i64))                                                   \
  X(void, matmul, (int, i64, i64, i64, const void*, i64, const void*, int32_t, const void*, int, void*, i64))        \
  X(i64, matmul_dx_bytes, (int, i64, i64))                                                                           \
  X(void, matmul_dx, (int, i64, i64, i64, const void*, i64, const void*, int32_t, void*, void*, i64))                \
  X(int, matmul_dw, (int, i64, i64, i64, const void*, i64, const void*, i64, SEGMENTS, int))                         \
  X(void, matmul_db, (int, i64, i64, const void*, i64, SEGMENTS))                                                    \
  X(void, embed, (int, i64, i64, i64, const i64*, const void*, void*, i64))                                          \
  X(void, embed_dw, (int, i64, i64, i64, const i64*, const void*, i64, SEGMENTS, u8*))                               \
  X(void, rmsnorm, (int, i64, i64, i64, const void*, i64, const void*, float, void*, i64, float*))                   \
  X(void, rmsnorm_dx, (int, i64, i64, i64, const void*, i64, const void*, const float*, const void*, i64,            \
                       const void*, i64, void*, i64))                                                                \
  X(void, rmsnorm_dw, (int, i64, i64, i64, const void*, i64, const float*, const void*, i64, SEGMENTS))              \
  X(void, rope, (int, int, i64, i64, i64, const void*, i64, const i64*, const float*, const float*, void*, i64))     \
  X(void, attention, (int, i64, const i64*, const i64*, const i64*, const i64*, i64, i64, i64, const void*, i64,     \
                      const void*, i64, const void*, i64, void*, void*, float, void*, i64, float*))                  \
  X(void, attention_backward, (int, i64, const i64*, i64, i64, i64, const void*, i64, const void*, i64, const void*, \
                               i64, const void*, i64, const void*, i64, const float*, float, void*, i64, void*, i64, \
                               void*, i64))                                                                          \
  X(void, swiglu, (int, i64, i64, const void*, i64, void*, i64))                                                     \
  X(void, swiglu_backward, (int, i64, i64, const void*, i64, const void*, i64, void*, i64))                          \
  X(void, logprob, (i64, i64, const float*, i64, const i64*, const float*, float*, float*, float*, float*, u8*))     \
  X(void, logprob_backward, (int, i64, i64, const float*, i64, const i64*, const float*, const float*, const float*, \
                             const float*, const float*, const float*, void*, i64))                                  \
  X(void, centre, (int, i64, i64, const float*, i64, const float*, const float*, const float*, i64, const float*,    \
                   const float*, const float*, i64, const float*, const float*, const i64*, const float*,            \
                   const float*, const float*, const float*, int, void*, i64, float*, float*))                       \
  X(void, noise, (i64, i64, const u64*, float*, i64))                                                                \
  X(void, draw, (i64, i64, const float*, i64, const float*, const u64*, const u64*, const u32*, const u32*, i64*))   \
  X(void, philox, (i64, const u64*, const u64*, const u32*, const u32*, u64*))                                       \
  X(void, exp, (i64, const float*, float*))                                                                          \
  X(void, log, (i64, const float*, float*))                                                                          \
  X(void, add, (int, i64, const void*, const void*, void*))                                                          \
  X(void, cast, (int, int, i64, const void*, void*))                                                                 \
  X(float, sum, (i64, const float*))                                                                                 \
  X(float, sum_squares, (i64, const float*))                                                                         \
  X(void, adamw, (i64, float*, const float*, float*, float*, float, float, float, float, float, float, float, float, \
                  float))
// clang-format on

struct Kernels {
#define FIELD(type, op, arguments) type(*op) arguments;
  OPS(FIELD)
};

#define DECLARE_BASELINE(type, op, arguments) extern "C" type vx_baseline_##op arguments;
OPS(DECLARE_BASELINE)
#define BASELINE(type, op, arguments) vx_baseline_##op,
const Kernels baseline = {OPS(BASELINE)};

#if defined(ALL_SETS)
#define DECLARE_AVX2(type, op, arguments) extern "C" type vx_avx2_##op arguments;
#define DECLARE_AVX512(type, op, arguments) extern "C" type vx_avx512_##op arguments;
#define DECLARE_AVX512BF16(type, op, arguments) extern "C" type vx_avx512bf16_##op arguments;
OPS(DECLARE_AVX2)
OPS(DECLARE_AVX512)
OPS(DECLARE_AVX512BF16)
#define AVX2(type, op, arguments) vx_avx2_##op,
#define AVX512(type, op, arguments) vx_avx512_##op,
#define AVX512BF16(type, op, arguments) vx_avx512bf16_##op,
const Kernels avx2 = {OPS(AVX2)}, avx512 = {OPS(AVX512)}, avx512bf16 = {OPS(AVX512BF16)};
#endif

const Kernels* find(const std::string& name) {
#if defined(ALL_SETS)
  if (!vx_isa_available(name.c_str())) return nullptr;
  if (name == "avx2") return &avx2;
  if (name == "avx512") return &avx512;
  if (name == "avx512bf16") return &avx512bf16;
#endif
  return name == "baseline" ? &baseline : nullptr;
}

struct Dtype {
  int code;
  const char* name;
  i64 bytes;
};
constexpr Dtype FLOAT32 = {0, "float32", 4}, BFLOAT16 = {1, "bfloat16", 2}, FLOAT16 = {2, "float16", 2};
Dtype grad(Dtype dtype) { return dtype.code == FLOAT16.code ? FLOAT32 : dtype; }

u64 mix(u64 x) {  // SplitMix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Memory {  // 64-byte aligned, all bits set: NaN in every storage type
 public:
  explicit Memory(i64 bytes) : bytes_(bytes), data_(std::aligned_alloc(64, (bytes + 127) / 64 * 64), std::free) {
    std::memset(data_.get(), 0xff, bytes);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }
  operator void*() const { return data_.get(); }
  operator float*() const { return as<float>(); }
  i64 bytes() const { return bytes_; }

 private:
  i64 bytes_;
  std::unique_ptr<void, void (*)(void*)> data_;
};

Memory zeros(i64 n) {
  Memory memory(n * 4);
  std::memset(memory, 0, memory.bytes());
  return memory;
}

// Both signs, exponents low … high, a sixteenth of zeros; where `tiny`, a quarter of subnormals.
struct Range {
  const char* name;
  int low, high;
  bool tiny;
};
constexpr Range TAME = {"tame", -6, 1, false}, TINY = {"tiny", -6, 1, true};

Memory values(Dtype dtype, i64 n, u64 seed, Range range) {
  Memory memory(n * dtype.bytes);
  const int bias = dtype.code == FLOAT16.code ? 15 : 127, digits = dtype.code == FLOAT16.code ? 10 : 23;
  for (i64 i = 0; i < n; ++i) {
    const u64 h = mix(seed << 32 | static_cast<u64>(i));
    const u32 sign = h & 1, kind = (h >> 1) & 15, span = static_cast<u32>(range.high - range.low + 1);
    u32 exponent = static_cast<u32>(bias + range.low) + static_cast<u32>((h >> 8) % span);
    u32 mantissa = static_cast<u32>(h >> 32) & ((1u << digits) - 1);
    if (kind < 4 && range.tiny) exponent = 0;
    if (kind == 15) exponent = mantissa = 0;
    if (dtype.code == FLOAT32.code) memory.as<u32>()[i] = sign << 31 | exponent << 23 | mantissa;
    if (dtype.code == BFLOAT16.code) memory.as<uint16_t>()[i] = (sign << 31 | exponent << 23 | mantissa) >> 16;
    if (dtype.code == FLOAT16.code) memory.as<uint16_t>()[i] = sign << 15 | exponent << 10 | mantissa;
  }
  return memory;
}

void report(const std::string& name, std::initializer_list<const Memory*> outputs) {
  u64 hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const Memory* memory : outputs)
    for (i64 i = 0; i < memory->bytes(); ++i) hash = (hash ^ memory->as<u8>()[i]) * 0x100000001b3u;
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

constexpr i64 TOKENS = 7, ENDS[] = {3, 5, 7};  // two lanes, the second one still open
constexpr u8 FOLD[] = {1, 0, 0};
#define LANES 3, ENDS, FOLD

struct Probe {
  const Kernels& k;
  Dtype dtype;
  Range range;

  Memory in(i64 n, u64 seed) const { return values(dtype, n, seed, range); }
  Memory in_grad(i64 n, u64 seed) const { return values(grad(dtype), n, seed, range); }
  Memory out(i64 n) const { return Memory(n * dtype.bytes); }
  Memory out_grad(i64 n) const { return Memory(n * grad(dtype).bytes); }
  void say(const char* op, std::initializer_list<const Memory*> outputs) const {
    report(std::string(op) + "." + dtype.name + "." + range.name, outputs);
  }

  void matmul() const {
    constexpr i64 M = TOKENS, N = 45, K = 71;
    const Memory x = in(M * K, 1), w = in(N * K, 2), bias = in(N, 3), dy = in_grad(M * N, 4);
    const Memory packed(k.matmul_packed_bytes(dtype.code, N, K)), scratch(k.matmul_dx_bytes(dtype.code, N, K));
    const Memory y = out(M * N), logits(M * N * 4), dx = out_grad(M * K), back = out(N * K);
    int32_t min_exponent = 0;
    k.matmul_pack(dtype.code, N, K, w, K, packed, &min_exponent);
    k.matmul_unpack(dtype.code, N, K, packed, back, K);
    say("pack", {&back});
    k.matmul(dtype.code, M, N, K, x, K, packed, min_exponent, bias, 0, y, N);
    k.matmul(dtype.code, M, N, K, x, K, packed, min_exponent, nullptr, 1, logits, N);
    say("matmul", {&y, &logits});
    k.matmul_dx(dtype.code, M, N, K, dy, N, packed, min_exponent, scratch, dx, K);
    say("matmul_dx", {&dx});
    const Memory lane = zeros(N * K), total = zeros(N * K), lane_b = zeros(N), total_b = zeros(N);
    k.matmul_dw(dtype.code, M, N, K, dy, N, x, K, LANES, lane, total, 0);
    say("matmul_dw", {&lane, &total});
    k.matmul_db(dtype.code, M, N, dy, N, LANES, lane_b, total_b);
    say("matmul_db", {&lane_b, &total_b});
  }

  void embed() const {
    constexpr i64 V = 45, D = 71, ids[TOKENS] = {44, 0, 0, 31, 7, 31, 0};
    const Memory w = in(V * D, 5), dy = in_grad(TOKENS * D, 6), y = out(TOKENS * D);
    const Memory packed(k.matmul_packed_bytes(dtype.code, V, D)), lane = zeros(V * D), total = zeros(V * D);
    int32_t min_exponent = 0;
    u8 touched[V] = {};
    k.matmul_pack(dtype.code, V, D, w, D, packed, &min_exponent);
    k.embed(dtype.code, TOKENS, V, D, ids, packed, y, D);
    say("embed", {&y});
    k.embed_dw(dtype.code, TOKENS, V, D, ids, dy, D, LANES, lane, total, touched);
    say("embed_dw", {&lane, &total});
  }

  void rmsnorm() const {
    constexpr i64 N = TOKENS, R = 2, D = 1100, row = R * D;
    const Memory x = in(N * row, 7), w = in(D, 8), dy = in_grad(N * row, 9), residual = in_grad(N * row, 10);
    const Memory y = out(N * row), rstd(N * R * 4), dx = out_grad(N * row), lane = zeros(D), total = zeros(D);
    k.rmsnorm(dtype.code, N, R, D, x, row, w, 1e-5f, y, row, rstd);
    say("rmsnorm", {&y, &rstd});
    k.rmsnorm_dx(dtype.code, N, R, D, x, row, w, rstd, dy, row, residual, row, dx, row);
    say("rmsnorm_dx", {&dx});
    k.rmsnorm_dw(dtype.code, N, R, D, x, row, rstd, dy, row, LANES, lane, total);
    say("rmsnorm_dw", {&lane, &total});
  }

  void rope() const {
    constexpr i64 H = 3, K = 16, row = H * K, positions[TOKENS] = {0, 1, 2, 8, 3, 3, 5};
    const Memory x = in(TOKENS * row, 11), y = out(TOKENS * row), back = out(TOKENS * row);
    const Memory cosine = values(FLOAT32, 9 * K / 2, 12, TAME), sine = values(FLOAT32, 9 * K / 2, 13, TAME);
    k.rope(dtype.code, 0, TOKENS, H, K, x, row, positions, cosine, sine, y, row);
    k.rope(dtype.code, 1, TOKENS, H, K, x, row, positions, cosine, sine, back, row);
    say("rope", {&y, &back});
  }

  void attention() const {  // two sequences, 70 tokens on pages 2 and 0, and 9 tokens on page 1
    constexpr i64 N = 79, H = 4, G = 2, K = 16, PAGES = 3, PAGE = 64;
    constexpr i64 start[] = {0, 70, 79}, prefix[] = {0, 0}, table_start[] = {0, 2, 3}, table[] = {2, 0, 1};
    const Memory q = in(N * H * K, 14), key = in(N * G * K, 15), value = in(N * G * K, 16);
    const Memory key_pages = out(PAGES * G * K * PAGE), value_pages = out(PAGES * G * PAGE * K);
    const Memory y = out(N * H * K), lse(N * H * 4), dy = in_grad(N * H * K, 17);
    const Memory dq = out_grad(N * H * K), dk = out_grad(N * G * K), dv = out_grad(N * G * K);
    k.attention(dtype.code, 2, start, prefix, table_start, table, H, G, K, q, H * K, key, G * K, value, G * K,
                key_pages, value_pages, 0.25f, y, H * K, lse);
    say("attention", {&y, &lse});
    k.attention_backward(dtype.code, 2, start, H, G, K, q, H * K, key, G * K, value, G * K, y, H * K, dy, H * K, lse,
                         0.25f, dq, H * K, dk, G * K, dv, G * K);
    say("attention_backward", {&dq, &dk, &dv});
  }

  void swiglu() const {
    constexpr i64 F = 37;
    const Memory x = in(TOKENS * 2 * F, 18), dy = in_grad(TOKENS * F, 19);
    const Memory y = out(TOKENS * F), dx = out_grad(TOKENS * 2 * F);
    k.swiglu(dtype.code, TOKENS, F, x, 2 * F, y, F);
    say("swiglu", {&y});
    k.swiglu_backward(dtype.code, TOKENS, F, x, 2 * F, dy, F, dx, 2 * F);
    say("swiglu_backward", {&dx});
  }

  void logprob() const {
    constexpr i64 N = 4, V = 1500, ids[N] = {0, 1499, 700, 3};
    constexpr float temperature[N] = {0.0f, 1.0f, 0.7f, 1.3f};
    const Memory logits = values(FLOAT32, N * V, 20, {"", -4, 4, range.tiny});
    const Memory logprob(N * 4), entropy(N * 4), max(N * 4), sum(N * 4), finite(N), d = out_grad(N * V);
    const Memory d_logprob = values(FLOAT32, N, 21, range), d_entropy = values(FLOAT32, N, 22, range);
    k.logprob(N, V, logits, V, ids, temperature, logprob, entropy, max, sum, finite.as<u8>());
    say("logprob", {&logprob, &entropy, &max, &sum, &finite});
    k.logprob_backward(dtype.code, N, V, logits, V, ids, temperature, max, sum, entropy, d_logprob, d_entropy, d, V);
    say("logprob_backward", {&d});
  }

  void centre() const {
    constexpr i64 N = 4, V = 1500, ids[N] = {0, 1499, 700, 3};
    constexpr float temperature[N] = {0.0f, 1.0f, 0.7f, 1.3f}, low[N] = {0.0f, 0.5f, 0.9f, 0.0f};
    constexpr float high[N] = {2.0f, 1.5f, 1.1f, 1e30f};
    const Memory policy = values(FLOAT32, N * V, 29, {"", -4, 4, range.tiny}), unused(N * 4), finite(N);
    const Memory sampler = values(FLOAT32, N * V, 30, {"", -4, 4, range.tiny}), base(N * V * 4);
    for (i64 i = 0; i < N * V; ++i) base.as<float>()[i] = policy.as<float>()[i] + 0.125f * sampler.as<float>()[i];
    const Memory most[3] = {Memory(N * 4), Memory(N * 4), Memory(N * 4)};
    const Memory sum[3] = {Memory(N * 4), Memory(N * 4), Memory(N * 4)};
    const Memory* rows[3] = {&policy, &sampler, &base};
    for (int r = 0; r < 3; ++r)
      k.logprob(N, V, *rows[r], V, ids, temperature, unused, nullptr, most[r], sum[r], finite.as<u8>());
    const Memory d_logprob = values(FLOAT32, N, 31, range);
    for (int clamps = 0; clamps < 2; ++clamps) {
      const Memory d = out_grad(N * V), w_id(N * 4), total(N * 4);
      k.centre(dtype.code, N, V, policy, V, most[0], sum[0], sampler, V, most[1], sum[1], base, V, most[2], sum[2], ids,
               temperature, d_logprob, low, high, clamps, d, V, w_id, total);
      say(clamps ? "centre_clamp" : "centre_zero", {&d, &w_id, &total});
    }
  }

  void noise() const {
    constexpr i64 N = 4, columns = 1500;
    constexpr u64 key[N] = {0, 1, ~u64{0}, u64{1} << 32};
    const Memory y(N * columns * 4);
    k.noise(N, columns, key, y, columns);
    say("noise", {&y});
  }

  void draw() const {
    constexpr i64 N = 5, V = 1500;
    constexpr float temperature[N] = {0.0f, 1.0f, 0.7f, 1.3f, 1.0f};
    constexpr u64 seed[N] = {0, 1, 1, ~u64{0}, 5}, request[N] = {0, 2, 3, ~u64{0}, 1u << 31};
    constexpr u32 sample[N] = {0, 1, 0, ~u32{0}, 2}, position[N] = {0, 17, 18, ~u32{0}, 3};
    const Memory logits = values(FLOAT32, N * V, 23, {"", -4, 4, range.tiny}), ids(N * 8), bits(N * 8);
    k.philox(N, seed, request, sample, position, bits.as<u64>());
    say("philox", {&bits});
    k.draw(N, V, logits, V, temperature, seed, request, sample, position, ids.as<i64>());
    say("draw", {&ids});
  }

  void elementwise() const {
    constexpr i64 n = 2500;
    const Memory x = values(FLOAT32, n, 24, {"", -12, 6, range.tiny}), positive(n * 4), e(n * 4), l(n * 4), sums(8);
    for (i64 i = 0; i < n; ++i) positive.as<u32>()[i] = x.as<u32>()[i] & 0x7fffffff;
    k.exp(n, x, e);
    say("exp", {&e});
    k.log(n, positive, l);
    say("log", {&l});
    sums.as<float>()[0] = k.sum(n, x);
    sums.as<float>()[1] = k.sum_squares(n, x);
    say("sum", {&sums});
    const Memory a = in(n, 25), b = in(n, 26), c = out(n), narrow = out(n), wide(n * 4);
    k.add(dtype.code, n, a, b, c);
    say("add", {&c});
    k.cast(FLOAT32.code, dtype.code, n, x, narrow);
    k.cast(dtype.code, FLOAT32.code, n, a, wide);
    say("cast", {&narrow, &wide});
  }

  void adamw() const {
    constexpr i64 n = 101;
    const Memory p = values(FLOAT32, n, 27, TAME), g = values(FLOAT32, n, 28, range), m = zeros(n), v = zeros(n);
    for (int step = 0; step < 2; ++step)
      k.adamw(n, p, g, m, v, 0.75f, 0.9f, 0.999f, 0.1f, 0.001f, 1e-8f, 0.99f, 0.01f, 31.6f);
    say("adamw", {&p, &m, &v});
  }
};

}  // namespace

int main(int argc, char** argv) {
  const Kernels* kernels = argc == 2 ? find(argv[1]) : nullptr;
  if (!kernels) {
    std::fprintf(stderr, "usage: golden SET, an instruction set that this machine has\n");
    return 2;
  }
  for (Dtype dtype : {FLOAT32, BFLOAT16, FLOAT16})
    for (Range range : {TAME, TINY}) {
      const Probe probe{*kernels, dtype, range};
      probe.matmul();
      probe.embed();
      probe.rmsnorm();
      probe.rope();
      probe.attention();
      probe.swiglu();
      probe.logprob();
      probe.centre();
      probe.noise();
      probe.draw();
      probe.elementwise();
      probe.adamw();
    }
  return 0;
}
