// A row of logits as logprob and draw see it: z = logit / T + 0, cut into the blocks of the tree.
#pragma once
#include "functions.h"
#include "parallel.h"
#include "rows.h"

namespace VX_ISA {

struct Logits {
  const float* row;
  int64_t V;
  float temperature;  // never 0: greedy rows are read at 1

  Logits(const float* logits, int64_t width, float t) : row(logits), V(width), temperature(t == 0.0f ? 1.0f : t) {}

  int64_t blocks() const { return blocks_of(V); }
  int64_t size(int64_t block) const { return block + 1 < blocks() ? BLOCK : V - block * BLOCK; }
  const float* begin(int64_t block) const { return row + block * BLOCK; }

  float z(float logit) const { return logit / temperature + 0.0f; }
  vf z(vf logit) const {
    const vf scaled = temperature == 1.0f ? logit : vdiv(logit, vset(temperature));  // x / 1 is x
    return vadd(scaled, vset(0.0f));
  }

  // The largest logit of a block, +inf where one is NaN.
  float block_max(int64_t block) const {
    const vf infinity = vset(__builtin_inff()), lowest = vset(-__builtin_inff());
    vf most = lowest;
    const float* p = begin(block);
    each_vector(size(block), [&](int64_t i, int count) {
      const vf x = load(p + i, count);
      most = vmax(most, vpick(first(count), vpick(vnan(x), infinity, x), lowest));
    });
    float lanes[W], result = -__builtin_inff();
    store(lanes, most);
    for (float lane : lanes) result = lane > result ? lane : result;
    return result;
  }

  // max z from the blocks' maxima; NaN unless it is finite and no logit is NaN or +inf.
  // Division by T > 0 and rounding keep the order, so the largest logit has the largest z.
  float max(const float* block_maxima) const {
    float logit = -__builtin_inff();
    for (int64_t b = 0; b < blocks(); ++b) logit = block_maxima[b] > logit ? block_maxima[b] : logit;
    const float most = z(logit);
    return most - most == 0.0f && logit - logit == 0.0f ? most : __builtin_nanf("");
  }
};

// Every block of every row through one(i, block), then two(i, block), then every row through last(i). Many rows are
// shared out whole, so that the second pass finds its row in the cache; few rows are shared out by blocks.
template <class One, class Two, class Last>
void two_passes(int64_t N, int64_t blocks, const One& one, const Two& two, const Last& last) {
  if (N >= omp_get_max_threads()) {
    parallel_for(N, 1 + 32 / (blocks + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t b = 0; b < blocks; ++b) one(i, b);
        for (int64_t b = 0; b < blocks; ++b) two(i, b);
        last(i);
      }
    });
    return;
  }
  parallel_for(N * blocks, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) one(t / blocks, t % blocks);
  });
  parallel_for(N * blocks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) two(t / blocks, t % blocks);
  });
  parallel_for(N, N + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) last(i);
  });
}

}  // namespace VX_ISA
