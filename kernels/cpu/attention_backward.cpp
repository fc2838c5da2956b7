// The gradient of causal attention over whole sequences (kernels/README.md):
// clang-format off
//   p = exp(s - lse), absent for j > i       delta_i = S_d(mul(dO, O))
//   dP = chain_d(dO, v)                      dS = mul(p, dP - delta)
//   dQ_i = mul(chain of (dS_ij, k_j) + 0, scale), keys j ascending
//   dK_j = mul(chain of (dS_ij, q_i) + 0, scale), dV_j = chain of (p_ij, dO_i) + 0,
//          over the heads of the group ascending outside and the queries i >= j ascending inside
// clang-format on
// A task is one key/value head of one sequence: dK and dV are chains over all of its heads and queries.
#include <vector>

#include "attention.h"
#include "rows.h"

namespace VX_ISA::paged {
namespace {

template <class T>
struct Matrix {  // rows at distance ld
  T* data;
  int64_t ld;
  T* at(int64_t row, int64_t column) const { return data + row * ld + column; }
};

template <class T>
struct BackwardProblem {
  int64_t H, G, K;
  float scale;
  Matrix<const T> q, k, v, y;
  Matrix<const Gradient<T>> dy;
  const float* lse;  // [N, H]
  Matrix<Gradient<T>> dq, dk, dv;
};

// S(mul(a, b)) over K values, V vectors at most; more +0 behind them change no bit.
template <int V, class T>
float dot(int64_t K, const float* a, const T* b) {
  vf v[V];
  for (int n = 0; n < V; ++n) v[n] = n * W < K ? vmul(vload(a + n * W), load(b + n * W)) : vset(0.0f);
  for (int h = V / 2; h > 0; h /= 2)
    for (int n = 0; n < h; ++n) v[n] = vadd(v[n], v[n + h]);
  return tree16(v[0]);
}

// acc[j] = chain over queries i of weight[i][j] * x[i]. On the diagonal page only i >= j: the tile's rows start one by
// one and run together from the tile's last.
inline void fold_columns(int64_t rows, int64_t queries, bool diagonal, int64_t K, const float* weight, Right<float> x,
                         float* acc) {
  const Left a{weight, 1, PAGE};
  for (int64_t j = 0; j < rows; j += TILE_ROWS) {
    const int64_t tile = std::min(TILE_ROWS, rows - j), shared = diagonal ? j + tile - 1 : 0;
    for (int64_t r = j; diagonal && r < shared; ++r) chains(1, K, shared - r, a.at(r, r), x.at(r, 0), acc + r * K, K);
    chains(tile, K, queries - shared, a.at(j, shared), x.at(shared, 0), acc + j * K, K);
  }
}

template <class G>
void store_scaled(int64_t rows, int64_t K, const float* acc, float scale, Matrix<G> out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < K; d += W) store(out.at(r, d), vmul(vadd(vload(acc + r * K + d), vset(0.0f)), vset(scale)));
}

// One thread's memory: the keys and values of a sequence widened page by page, the running dK and dV, and one tile of
// 64 queries of one head. Used again for every task.
template <class T>
class Sequence {
 public:
  Sequence(const BackwardProblem<T>& g, int64_t longest)
      : g_(g),
        K_(g.K),
        arena_((5 * whole_pages(longest) + 3 * PAGE) * g.K + 2 * PAGE * PAGE + PAGE),
        key_(arena_.take(whole_pages(longest) * K_)),
        key_columns_(arena_.take(whole_pages(longest) * K_)),
        value_columns_(arena_.take(whole_pages(longest) * K_)),
        dk_(arena_.take(whole_pages(longest) * K_)),
        dv_(arena_.take(whole_pages(longest) * K_)),
        q_(arena_.take(PAGE * K_)),
        dy_(arena_.take(PAGE * K_)),
        dq_(arena_.take(PAGE * K_)),
        p_(arena_.take(PAGE * PAGE)),
        ds_(arena_.take(PAGE * PAGE)),
        delta_(arena_.take(PAGE)) {}

  void run(int64_t start, int64_t tokens, int64_t group) {
    const int64_t heads = g_.H / g_.G, column = group * K_;
    open(start, tokens, column);
    for (int64_t h = group * heads; h < (group + 1) * heads; ++h)
      for (int64_t i = 0; i < tokens; i += PAGE) fold_queries(start, i, std::min(PAGE, tokens - i), h);
    store_scaled(tokens, K_, dk_, g_.scale, Matrix<Gradient<T>>{g_.dk.at(start, column), g_.dk.ld});
    store_scaled(tokens, K_, dv_, 1.0f, Matrix<Gradient<T>>{g_.dv.at(start, column), g_.dv.ld});
  }

 private:
  static int64_t whole_pages(int64_t n) { return (n + PAGE - 1) / PAGE * PAGE; }

  void open(int64_t start, int64_t tokens, int64_t column) {
    widen_rows(tokens, K_, g_.k.at(start, column), g_.k.ld, key_);
    for (int64_t j = 0; j < tokens; j += PAGE) {
      const int64_t rows = std::min(PAGE, tokens - j);
      transpose_rows(rows, K_, g_.k.at(start + j, column), g_.k.ld, key_columns_ + j * K_);
      transpose_rows(rows, K_, g_.v.at(start + j, column), g_.v.ld, value_columns_ + j * K_);
    }
    std::fill_n(dk_, tokens * K_, 0.0f);
    std::fill_n(dv_, tokens * K_, 0.0f);
  }

  void fold_queries(int64_t start, int64_t query, int64_t queries, int64_t h) {
    const int64_t token = start + query;
    widen_rows(queries, K_, g_.q.at(token, h * K_), g_.q.ld, q_);
    widen_rows(queries, K_, g_.dy.at(token, h * K_), g_.dy.ld, dy_);
    std::fill_n(dq_, queries * K_, 0.0f);
    for (int64_t i = 0; i < queries; ++i) delta_[i] = delta(dy_ + i * K_, g_.y.at(token + i, h * K_));
    for (int64_t j = 0; j <= query; j += PAGE) fold_page(j, query, queries, g_.lse + token * g_.H + h);
    store_scaled(queries, K_, dq_, g_.scale, Matrix<Gradient<T>>{g_.dq.at(token, h * K_), g_.dq.ld});
  }

  void fold_page(int64_t j, int64_t query, int64_t queries, const float* lse) {
    const Causal causal{query - j, 1};
    const int64_t at = j * K_, rows = std::min(PAGE, query + queries - j);
    score_rows(queries, causal, K_, q_, Right<float>{key_columns_ + at, PAGE}, p_);
    score_rows(queries, causal, K_, dy_, Right<float>{value_columns_ + at, PAGE}, ds_);
    for (int64_t i = 0; i < queries; ++i)
      through_softmax(causal.seen(i), lse[i * g_.H], delta_[i], p_ + i * PAGE, ds_ + i * PAGE);
    fold_rows(queries, causal, K_, ds_, Right<float>{key_ + at, K_}, dq_);
    fold_columns(rows, queries, j == query, K_, p_, {dy_, K_}, dv_ + at);
    fold_columns(rows, queries, j == query, K_, ds_, {q_, K_}, dk_ + at);
  }

  // s to p and dP to dS in place. Lanes behind the last place seen hold anything; no fold reads them.
  void through_softmax(int64_t seen, float lse, float delta, float* p, float* ds) const {
    for (int64_t j = 0; j < seen; j += W) {
      const vf weight = vexp(vsub(vmul(vload(p + j), vset(g_.scale)), vset(lse)));
      vstore(p + j, weight);
      vstore(ds + j, vmul(weight, vsub(vload(ds + j), vset(delta))));
    }
  }

  float delta(const float* dy, const T* y) const {
    if (K_ <= 4 * W) return dot<4>(K_, dy, y);
    return K_ <= 16 * W ? dot<16>(K_, dy, y) : dot<64>(K_, dy, y);
  }

  const BackwardProblem<T>& g_;
  int64_t K_;
  Arena arena_;
  float *key_, *key_columns_, *value_columns_, *dk_, *dv_, *q_, *dy_, *dq_, *p_, *ds_, *delta_;
};

// A type of this namespace: sorting plain integers would leave a function of std that the linker shares between the
// instruction sets.
struct Extent {
  int64_t start, tokens;
};

template <class T>
void run_backward(int64_t S, const int64_t* start, const BackwardProblem<T>& g) {
  std::vector<Extent> order(static_cast<size_t>(S));  // long sequences first, so that none is left over at the end
  for (int64_t s = 0; s < S; ++s) order[static_cast<size_t>(s)] = {start[s], start[s + 1] - start[s]};
  std::stable_sort(order.begin(), order.end(), [](const Extent& a, const Extent& b) { return a.tokens > b.tokens; });
  const int64_t n = S * g.G, longest = S > 0 ? order[0].tokens : 0;
  int64_t cost = 1;  // five products of half a square each, for every head
  for (const Extent& extent : order) cost += extent.tokens * extent.tokens * g.H * g.K * 5 / 2;
  parallel_tasks(n, 1 + n * WORTH_A_THREAD / cost, [&](const auto& next) {
    Sequence<T> sequence(g, longest);
    for (int64_t i = next(); i < n; i = next()) {
      const Extent& extent = order[static_cast<size_t>(i / g.G)];
      sequence.run(extent.start, extent.tokens, i % g.G);
    }
  });
}

}  // namespace
}  // namespace VX_ISA::paged

VX_API(void, attention_backward)
(int dtype, int64_t S, const int64_t* start, int64_t H, int64_t G, int64_t K, const void* q, int64_t ldq, const void* k,
 int64_t ldk, const void* v, int64_t ldv, const void* y, int64_t ldy, const void* dy, int64_t lddy, const float* lse,
 float scale, void* dq, int64_t lddq, void* dk, int64_t lddk, void* dv, int64_t lddv) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    using G_ = Gradient<T>;
    const auto in = [](const void* p, int64_t ld) { return paged::Matrix<const T>{static_cast<const T*>(p), ld}; };
    const auto out = [](void* p, int64_t ld) { return paged::Matrix<G_>{static_cast<G_*>(p), ld}; };
    paged::run_backward<T>(S, start,
                           {H,
                            G,
                            K,
                            scale,
                            in(q, ldq),
                            in(k, ldk),
                            in(v, ldv),
                            in(y, ldy),
                            {static_cast<const G_*>(dy), lddy},
                            lse,
                            out(dq, lddq),
                            out(dk, lddk),
                            out(dv, lddv)});
  });
}
