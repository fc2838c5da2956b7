// Paged causal attention: write the chunks' keys and values into pages, then fold pages 0, 1, 2, … for every query.
//
// Over one page, with state m = -inf, l = +0, acc = +0 before page 0 (kernels/README.md):
//   s_j = mul(chain_d(q_d, k_jd), scale)     m' = max(m, max_j s_j)     alpha = exp(m - m')
//   p_j = exp(s_j - m'), absent for j > i    l = fma(l, alpha, S(p))    acc = acc * alpha, then chain_j(p_j, v_j)
// A task is some consecutive queries of one sequence with the heads that share one key/value head. Decoding and
// prefilling differ in the number of queries alone.
#include "attention.h"

#include <limits>
#include <type_traits>
#include <vector>

#include "rows.h"

namespace VX_ISA::paged {
namespace {

constexpr int64_t BLOCK_ROWS = 192;             // rows of a task: enough to pay for widening a page
constexpr int64_t NARROW_ROWS = 2 * TILE_ROWS;  // up to here a page is widened in registers, tile by tile
constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Chunks {
  int64_t S;
  const int64_t *start, *prefix, *table_start, *table;
  int64_t tokens(int64_t s) const { return start[s + 1] - start[s]; }
  int64_t page(int64_t s, int64_t position) const { return table[table_start[s] + position / PAGE]; }
};

struct Heads {
  int64_t H, G, K;
  int64_t group() const { return H / G; }
};

template <class T>
struct Pages {
  T *keys, *values;  // [P, G, K, 64] and [P, G, 64, K]
  Heads heads;
  T* key(int64_t page, int64_t g) const { return keys + (page * heads.G + g) * heads.K * PAGE; }
  T* value(int64_t page, int64_t g) const { return values + (page * heads.G + g) * heads.K * PAGE; }
};

template <class T>
void write_pages(const Chunks& chunks, const Pages<T>& pages, const T* k, int64_t ldk, const T* v, int64_t ldv) {
  const int64_t G = pages.heads.G, K = pages.heads.K, items = chunks.S * G;
  const int64_t per_item = (1 + chunks.start[chunks.S] / std::max<int64_t>(1, chunks.S)) * K;
  parallel_for(items, 1 + (1 << 14) / per_item, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / G, g = item % G;
      const int64_t tokens = chunks.tokens(s);
      for (int64_t t = 0, run = 0; t < tokens; t += run) {  // a run ends with its page
        const int64_t position = chunks.prefix[s] + t, slot = position % PAGE, row = chunks.start[s] + t;
        const int64_t page = chunks.page(s, position);
        run = std::min(PAGE - slot, tokens - t);
        transpose_rows(run, K, k + row * ldk + g * K, ldk, pages.key(page, g) + slot);
        for (int64_t r = 0; r < run; ++r)
          std::copy_n(v + (row + r) * ldv + g * K, K, pages.value(page, g) + (slot + r) * K);
      }
    }
  });
}

struct Task {
  int64_t s, g, query, queries;  // queries count from the start of the chunk
  int64_t cost;                  // multiplications
};

// The long tasks first, so that none is left over at the end.
std::vector<Task> cut_into_tasks(const Chunks& chunks, const Heads& heads) {
  const int64_t block = std::max<int64_t>(1, BLOCK_ROWS / heads.group());
  std::vector<Task> tasks;
  for (int64_t s = 0; s < chunks.S; ++s)
    for (int64_t query = 0; query < chunks.tokens(s); query += block)
      for (int64_t g = 0; g < heads.G; ++g) {
        const int64_t queries = std::min(block, chunks.tokens(s) - query);
        const int64_t places = chunks.prefix[s] + query + queries;
        tasks.push_back({s, g, query, queries, places * queries * heads.group() * heads.K * 2});
      }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  return tasks;
}

// The rows of a task: (query, head) pairs, and the state of their fold. One a thread, used again for every task.
class Rows {
 public:
  Rows(int64_t capacity, int64_t K)
      : K_(K),
        arena_(whole_vectors(capacity) * (2 * K + PAGE + 5) + 2 * K * PAGE),
        q_(arena_.take(capacity * K)),
        acc_(arena_.take(capacity * K)),
        p_(arena_.take(capacity * PAGE)),
        key_(arena_.take(K * PAGE)),
        value_(arena_.take(K * PAGE)),
        max_(arena_.take(capacity)),
        sum_(arena_.take(capacity)),
        alpha_(arena_.take(capacity)),
        page_max_(arena_.take(capacity)),
        page_sum_(arena_.take(capacity)) {}

  template <class T>
  void begin(int64_t queries, int64_t heads, const T* q, int64_t ldq) {
    rows_ = queries * heads;
    for (int64_t i = 0; i < queries; ++i) widen_rows(heads, K_, q + i * ldq, K_, q_ + i * heads * K_);
    std::fill_n(acc_, rows_ * K_, 0.0f);
    std::fill_n(max_, whole_vectors(rows_), -INFINITE);
    std::fill_n(sum_, whole_vectors(rows_), 0.0f);
    std::fill_n(page_max_, whole_vectors(rows_), 0.0f);
    std::fill_n(page_sum_, whole_vectors(rows_), 0.0f);
  }

  // The page holds something for every query that causal.first_row() does not leave out.
  template <class T>
  void fold(Causal causal, float scale, PageRight<T> keys, PageRight<T> values) {
    if (std::is_same_v<T, float> || rows_ - causal.first_row() <= NARROW_ROWS)
      return fold_page(causal, scale, keys, values);
    widen_rows(K_, PAGE, keys.data, PAGE, key_);
    widen_rows(causal.seen(rows_ - 1), K_, values.data, K_, value_);
    fold_page(causal, scale, Right<float>{key_, PAGE}, Right<float>{value_, K_});
  }

  template <class T>
  void end(int64_t queries, int64_t heads, T* y, int64_t ldy, float* lse, int64_t ldlse) {
    for (int64_t r = 0; r < rows_; ++r) {
      T* out = y + r / heads * ldy + r % heads * K_;
      for (int64_t d = 0; d < K_; d += W)
        store(out + d, vdiv(vadd(vload(acc_ + r * K_ + d), vset(0.0f)), vset(sum_[r])));
    }
    if (lse == nullptr) return;
    for (int64_t r = 0; r < rows_; r += W)
      vstore(page_max_ + r, vadd(vadd(vload(max_ + r), vlog(vload(sum_ + r))), vset(0.0f)));
    for (int64_t i = 0; i < queries; ++i) std::copy_n(page_max_ + i * heads, heads, lse + i * ldlse);
  }

 private:
  template <class B>
  void fold_page(Causal causal, float scale, B keys, B values) {
    const int64_t first = causal.first_row(), first_vector = first / W * W;
    score_rows(rows_, causal, K_, q_, keys, p_);
    for (int64_t r = first; r < rows_; ++r) page_max_[r] = mask_and_scale(p_ + r * PAGE, causal.seen(r), scale);
    for (int64_t r = first_vector; r < rows_; r += W) raise_max(r, first);
    for (int64_t r = first; r < rows_; ++r) page_sum_[r] = exponentiate(p_ + r * PAGE, causal.seen(r), max_[r]);
    for (int64_t r = first_vector; r < rows_; r += W) add_sum(r, first);
    for (int64_t r = first; r < rows_; ++r) multiply(acc_ + r * K_, alpha_[r]);
    fold_rows(rows_, causal, K_, p_, values, acc_);
  }

  // s in place, -inf where a place is not seen: what stands in memory there must not reach the maximum.
  static float mask_and_scale(float* s, int64_t seen, float scale) {
    vf top = vset(-INFINITE);
    for (int64_t j = 0; j < PAGE; j += W) {
      vf x = vset(-INFINITE);
      if (j < seen) x = vmul(vload(s + j), vset(scale));
      if (j < seen && seen < j + W) x = vpick(VX_ISA::first(static_cast<int>(seen - j)), x, vset(-INFINITE));
      vstore(s + j, x);
      top = vmax(top, x);
    }
    return max16(top);
  }

  // p in place of s, and S(p) over the 64 places; exp(-inf) is the +0 of those not seen.
  static float exponentiate(float* s, int64_t seen, float max) {
    vf p[PAGE_VECTORS];
    for (int n = 0; n < PAGE_VECTORS; ++n) {
      p[n] = vset(0.0f);
      if (n * W < seen) {
        p[n] = vexp(vsub(vload(s + n * W), vset(max)));
        vstore(s + n * W, p[n]);
      }
    }
    return tree64(p);
  }

  // Lanes before `first_row` belong to queries that end before this page.
  void raise_max(int64_t r, int64_t first_row) {
    const vf old = vload(max_ + r), now = vmax(old, vload(page_max_ + r));
    vstore(alpha_ + r, vexp(vsub(old, now)));  // exp(-inf) = +0 at the first page
    vstore(max_ + r, vpick(before(first_row - r), old, now));
  }
  void add_sum(int64_t r, int64_t first_row) {
    const vf old = vload(sum_ + r), now = vfma(old, vload(alpha_ + r), vload(page_sum_ + r));
    vstore(sum_ + r, vpick(before(first_row - r), old, now));
  }
  static vm before(int64_t n) { return VX_ISA::first(static_cast<int>(std::clamp<int64_t>(n, 0, W))); }

  void multiply(float* acc, float alpha) const {
    if (alpha == 1.0f) return;
    for (int64_t d = 0; d < K_; d += W) vstore(acc + d, vmul(vload(acc + d), vset(alpha)));
  }

  int64_t K_, rows_ = 0;
  Arena arena_;
  float *q_, *acc_, *p_, *key_, *value_, *max_, *sum_, *alpha_, *page_max_, *page_sum_;
};

template <class T>
void fold_task(Rows& rows, const Task& task, const Chunks& chunks, const Pages<T>& pages, const T* q, int64_t ldq,
               float scale, T* y, int64_t ldy, float* lse) {
  const auto& heads = pages.heads;
  const int64_t group = heads.group(), head = task.g * group, token = chunks.start[task.s] + task.query;
  const int64_t position = chunks.prefix[task.s] + task.query;
  rows.begin(task.queries, group, q + token * ldq + head * heads.K, ldq);
  for (int64_t at = 0; at < position + task.queries; at += PAGE) {
    const int64_t page = chunks.page(task.s, at), next = std::min(at + PAGE, position + task.queries - 1);
    const int64_t ahead = pages.key(chunks.page(task.s, next), task.g) - pages.key(page, task.g);
    rows.fold(Causal{position - at, group}, scale, PageRight<T>{pages.key(page, task.g), PAGE, ahead},
              PageRight<T>{pages.value(page, task.g), heads.K, ahead});
  }
  rows.end(task.queries, group, y + token * ldy + head * heads.K, ldy, lse ? lse + token * heads.H + head : nullptr,
           heads.H);
}

template <class T>
void attend(const Chunks& chunks, const Pages<T>& pages, const T* q, int64_t ldq, const T* k, int64_t ldk, const T* v,
            int64_t ldv, float scale, T* y, int64_t ldy, float* lse) {
  write_pages(chunks, pages, k, ldk, v, ldv);
  const std::vector<Task> tasks = cut_into_tasks(chunks, pages.heads);
  const int64_t n = static_cast<int64_t>(tasks.size());
  int64_t cost = 1, capacity = 0;
  for (const Task& task : tasks) {
    cost += task.cost;
    capacity = std::max(capacity, task.queries * pages.heads.group());
  }
  parallel_tasks(n, 1 + n * WORTH_A_THREAD / cost, [&](const auto& next) {
    Rows rows(capacity, pages.heads.K);
    for (int64_t i = next(); i < n; i = next())
      fold_task(rows, tasks[static_cast<size_t>(i)], chunks, pages, q, ldq, scale, y, ldy, lse);
  });
}

}  // namespace
}  // namespace VX_ISA::paged

VX_API(void, attention)
(int dtype, int64_t S, const int64_t* start, const int64_t* prefix, const int64_t* table_start, const int64_t* table,
 int64_t H, int64_t G, int64_t K, const void* q, int64_t ldq, const void* k, int64_t ldk, const void* v, int64_t ldv,
 void* key_pages, void* value_pages, float scale, void* y, int64_t ldy, float* lse) {
  using namespace VX_ISA;
  using namespace VX_ISA::paged;
  const Chunks chunks{S, start, prefix, table_start, table};
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    const Pages<T> pages{static_cast<T*>(key_pages), static_cast<T*>(value_pages), {H, G, K}};
    attend(chunks, pages, static_cast<const T*>(q), ldq, static_cast<const T*>(k), ldk, static_cast<const T*>(v), ldv,
           scale, static_cast<T*>(y), ldy, lse);
  });
}
