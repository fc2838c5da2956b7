// The gradient of score centering with weights that are ratios to a base: g · (w_a log p(a) - Σ q_v w_v log p(v)), its
// q and w held fixed. Every row in two passes: weights and their sum, then the gradient.
#include "logits.h"
#include "vexact.h"

namespace VX_ISA {

// A row of logits with what logprob found of it.
struct Softmax {
  Logits logits;
  float max, sum, log_sum;

  Softmax(const float* row, int64_t V, float temperature, float most, float total)
      : logits(row, V, temperature), max(most), sum(total), log_sum(log1(total)) {}

  vf shifted(int64_t v, int count) const { return vsub(logits.z(load(logits.row + v, count)), vset(max)); }
  float shifted1(int64_t v) const { return logits.z(logits.row[v]) - max; }
  vf share(vf x) const { return vdiv(vexp(x), vset(sum)); }
};

struct Bounds {
  float low, high;
  bool clamps;

  // The ratio to the base, held by its bounds. x and y: z - M of the policy and of the base.
  vf weight(const Softmax& policy, const Softmax& base, vf x, vf y) const {
    const vf lowest = vset(-0x1.fffffep+127f), most = vset(EXP_HIGHEST);  // only -inf lies below
    vf log_ratio = vsub(vsub(x, vset(policy.log_sum)), vsub(y, vset(base.log_sum)));
    log_ratio = vpick(vlt(x, lowest), vpick(vlt(y, lowest), vset(0.0f), log_ratio), log_ratio);
    const vf ratio = vexp(vpick(vlt(most, log_ratio), most, log_ratio));
    const vf least = vset(low), greatest = vset(high), nothing = vset(0.0f);
    return vpick(vlt(ratio, least), clamps ? least : nothing,
                 vpick(vlt(greatest, ratio), clamps ? greatest : nothing, ratio));
  }
};

struct CentredRow {
  Softmax policy, sampler, base;
  Bounds bounds;
  int64_t V, id;
  float *p, *weighted;  // [V] each, of this thread: the second pass needs no exp

  float weight_of_id() const {
    float lanes[W];
    store(lanes, bounds.weight(policy, base, vset(policy.shifted1(id)), vset(base.shifted1(id))));
    return lanes[0];
  }

  // W, leaving p and q · w.
  float weigh() const {
    return tree_row(V, [&](int64_t v, int count) {
      const vf x = policy.shifted(v, count), q = sampler.share(sampler.shifted(v, count));
      const vf w = bounds.weight(policy, base, x, base.shifted(v, count));
      const vm dead = ieq(as_int(q), iset(0));
      const vf t = vpick(first(count), vpick(dead, vset(0.0f), vmul(q, w)), vset(0.0f));
      store(p + v, policy.share(x), count);
      store(weighted + v, t, count);
      return t;
    });
  }

  template <class G>
  void gradient(float d_logprob, float w_id, float total, G* out) const {
    const vf g = vset(d_logprob), rest = vset(w_id - total), own = vset(d_logprob * w_id), nothing = vset(0.0f);
    const float t = policy.logits.temperature;
    each_vector(V, [&](int64_t v, int count) {
      const vf share = load(p + v, count), qw = load(weighted + v, count);
      const vf c = vpick(ieq(as_int(share), iset(0)), qw, vfma(rest, share, qw));
      const int64_t lane = id - v;
      const vm is_id = ieq(iota(), iset(lane >= 0 && lane < W ? static_cast<int32_t>(lane) : -1));
      const vf d = vsub(vpick(is_id, own, nothing), vmul(g, c));
      store(out + v, vadd(t == 1.0f ? d : vdiv(d, vset(t)), nothing), count);
    });
  }
};

}  // namespace VX_ISA

VX_API(void, centre)
(int dtype, int64_t N, int64_t V, const float* policy, int64_t ldp, const float* policy_max, const float* policy_sum,
 const float* sampler, int64_t lds, const float* sampler_max, const float* sampler_sum, const float* base, int64_t ldb,
 const float* base_max, const float* base_sum, const int64_t* ids, const float* temperature, const float* d_logprob,
 const float* low, const float* high, int clamps, void* d_logits, int64_t lddl, float* w_id, float* total) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto type) {
    using G = Gradient<decltype(type)>;
    parallel_for(N, 1 + 16384 / (V + 1), [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(static_cast<size_t>(2 * V));
      for (int64_t i = begin; i < end; ++i) {
        const float t = temperature[i];
        const CentredRow row{{policy + i * ldp, V, t, policy_max[i], policy_sum[i]},
                             {sampler + i * lds, V, t, sampler_max[i], sampler_sum[i]},
                             {base + i * ldb, V, t, base_max[i], base_sum[i]},
                             {low[i], high[i], clamps != 0},
                             V,
                             ids[i],
                             scratch.data(),
                             scratch.data() + V};
        w_id[i] = row.weight_of_id();
        total[i] = row.weigh();
        G* out = static_cast<G*>(d_logits) + i * lddl;
        if (d_logprob[i] == 0.0f)  // no gradient comes in: none goes out, whatever the logits are
          each_vector(V, [&](int64_t v, int count) { store(out + v, vset(0.0f), count); });
        else
          row.gradient(d_logprob[i], w_id[i], total[i], out);
      }
    });
  });
}
