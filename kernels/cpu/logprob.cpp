// log softmax of one id a row, the row's entropy, and the gradient of both.
#include "logits.h"
#include "vexact.h"

namespace VX_ISA {

// S(e) of a block, and S(e · (z - M)) if `terms` is given; absent and weightless ids add +0 to both.
inline void softmax_block(const Logits& logits, int64_t block, float max, float* sum, float* terms) {
  const float* p = logits.begin(block);
  vf weighted[BLOCK / W];
  *sum = tree_block(logits.size(block), [&](int64_t i, int count) {
    const vf x = vsub(logits.z(load(p + i, count)), vset(max));
    const vf e = vpick(first(count), vexp(x), vset(0.0f));
    if (terms) weighted[i / W] = vpick(vlt(vset(0.0f), e), vmul(e, x), vset(0.0f));
    return e;
  });
  if (terms) *terms = tree_block(logits.size(block), [&](int64_t i, int) { return weighted[i / W]; });
}

struct LogprobResult {
  float *logprob, *entropy, *max, *sum;
  uint8_t* finite;

  void write(int64_t i, float z_id, float most, float total, float terms) const {
    const float log_sum = log1(total);
    max[i] = most;
    sum[i] = total;
    finite[i] = most == most;
    logprob[i] = z_id - most - log_sum;
    if (entropy) entropy[i] = log_sum - terms / total;
  }
};

// One row's d_logits, block by block.
template <class G>
struct LogprobGradient {
  Logits logits;
  int64_t id;
  float max, sum, log_sum, entropy, d_logprob, d_entropy;
  bool has_entropy;
  G* out;

  // No gradient comes in: none goes out, whatever the logits are.
  bool absent() const { return d_logprob == 0.0f && (!has_entropy || d_entropy == 0.0f); }

  void zero(int64_t block) const {
    each_vector(logits.size(block), [&](int64_t i, int count) { store(out + block * BLOCK + i, vset(0.0f), count); });
  }

  vf gradient(vf z, vm is_id) const {
    const vf nothing = vset(0.0f), dl = vset(d_logprob);
    const vf x = vsub(z, vset(max));
    const vf p = vdiv(vexp(x), vset(sum));
    const vf own = vpick(is_id, dl, nothing);
    vf d = vsub(own, vmul(dl, p));
    if (has_entropy) d = vsub(d, vmul(vmul(vset(d_entropy), p), vadd(vsub(x, vset(log_sum)), vset(entropy))));
    d = vpick(ieq(as_int(p), iset(0)), own, d);  // never 0 · -inf
    return vadd(logits.temperature == 1.0f ? d : vdiv(d, vset(logits.temperature)), nothing);
  }

  void run(int64_t block) const {
    const float* p = logits.begin(block);
    const int64_t place = id - block * BLOCK;  // of the id, in this block or not
    each_vector(logits.size(block), [&](int64_t i, int count) {
      const int64_t lane = place - i;
      const vm is_id = ieq(iota(), iset(lane >= 0 && lane < W ? static_cast<int32_t>(lane) : -1));
      store(out + block * BLOCK + i, gradient(logits.z(load(p + i, count)), is_id), count);
    });
  }
};

}  // namespace VX_ISA

VX_API(void, logprob)
(int64_t N, int64_t V, const float* logits, int64_t ld, const int64_t* ids, const float* temperature, float* logprob,
 float* entropy, float* max, float* sum, uint8_t* finite) {
  using namespace VX_ISA;
  const int64_t blocks = blocks_of(V);
  const LogprobResult result{logprob, entropy, max, sum, finite};
  std::vector<float> scratch(static_cast<size_t>(3 * N * blocks));
  float *maxima = scratch.data(), *sums = maxima + N * blocks, *terms = sums + N * blocks;
  const auto row = [&](int64_t i) { return Logits(logits + i * ld, V, temperature[i]); };
  two_passes(
      N, blocks, [&](int64_t i, int64_t b) { maxima[i * blocks + b] = row(i).block_max(b); },
      [&](int64_t i, int64_t b) {
        const int64_t at = i * blocks + b;
        softmax_block(row(i), b, row(i).max(maxima + i * blocks), sums + at, entropy ? terms + at : nullptr);
      },
      [&](int64_t i) {
        const Logits r = row(i);
        const int64_t at = i * blocks;
        result.write(i, r.z(r.row[ids[i]]), r.max(maxima + at), tree(sums + at, blocks), tree(terms + at, blocks));
      });
}

VX_API(void, logprob_backward)
(int dtype, int64_t N, int64_t V, const float* logits, int64_t ld, const int64_t* ids, const float* temperature,
 const float* max, const float* sum, const float* entropy, const float* d_logprob, const float* d_entropy,
 void* d_logits, int64_t lddl) {
  using namespace VX_ISA;
  const int64_t blocks = blocks_of(V);
  with_storage(dtype, [&](auto type) {
    using G = Gradient<decltype(type)>;
    parallel_for(N * blocks, 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t i = t / blocks;
        const LogprobGradient<G> row{Logits(logits + i * ld, V, temperature[i]),
                                     ids[i],
                                     max[i],
                                     sum[i],
                                     log1(sum[i]),
                                     d_entropy ? entropy[i] : 0.0f,
                                     d_logprob[i],
                                     d_entropy ? d_entropy[i] : 0.0f,
                                     d_entropy != nullptr,
                                     static_cast<G*>(d_logits) + i * lddl};
        row.absent() ? row.zero(t % blocks) : row.run(t % blocks);
      }
    });
  });
}
