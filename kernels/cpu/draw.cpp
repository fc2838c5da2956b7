// One id a row, drawn by integer weights: integer sums are exact, so no order of adding them can move a draw.
#include "logits.h"
#include "philox.h"
#include "vexact.h"

namespace VX_ISA {

// The first two words of a block, low word first.
inline uint64_t philox_bits(uint64_t seed, uint64_t request, uint32_t sample, uint32_t position) {
  uint32_t c[4] = {position, sample, static_cast<uint32_t>(request), static_cast<uint32_t>(request >> 32)};
  philox(c, seed);
  return static_cast<uint64_t>(c[1]) << 32 | c[0];
}

inline uint64_t high64(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

// trunc(exp(z - M) · 2^40) of a block's ids; each at most 2^40.
inline void block_weights(const Logits& logits, int64_t block, float max, int64_t* weights) {
  const float* p = logits.begin(block);
  alignas(64) float scaled[BLOCK];
  each_vector(logits.size(block), [&](int64_t i, int count) {
    const vf e = vexp(vsub(logits.z(load(p + i, count)), vset(max)));
    store(scaled + i, vmul(e, vset(0x1p40f)), count);
  });
  for (int64_t i = 0; i < logits.size(block); ++i) weights[i] = static_cast<int64_t>(scaled[i]);
}

inline uint64_t block_weight(const Logits& logits, int64_t block, float max) {
  int64_t weights[BLOCK], total = 0;
  block_weights(logits, block, max, weights);
  for (int64_t i = 0; i < logits.size(block); ++i) total += weights[i];
  return static_cast<uint64_t>(total);
}

// The lowest id whose logit is the largest.
inline int64_t greedy_id(const Logits& logits, const float* maxima) {
  int64_t block = 0;
  for (int64_t b = 1; b < logits.blocks(); ++b)
    if (maxima[b] > maxima[block]) block = b;
  int64_t id = block * BLOCK;
  while (logits.row[id] != maxima[block]) ++id;
  return id;
}

// The first id whose prefix sum exceeds r = high64(bits · W). r < W, so that id exists and has a weight.
inline int64_t weighted_id(const Logits& logits, float max, const uint64_t* sums, uint64_t bits) {
  uint64_t total = 0;
  for (int64_t b = 0; b < logits.blocks(); ++b) total += sums[b];
  uint64_t r = high64(bits, total);
  int64_t block = 0;
  while (block + 1 < logits.blocks() && r >= sums[block]) r -= sums[block++];
  int64_t weights[BLOCK], i = 0;
  block_weights(logits, block, max, weights);
  while (i + 1 < logits.size(block) && r >= static_cast<uint64_t>(weights[i])) r -= static_cast<uint64_t>(weights[i++]);
  return block * BLOCK + i;
}

}  // namespace VX_ISA

VX_API(void, draw)
(int64_t N, int64_t V, const float* logits, int64_t ld, const float* temperature, const uint64_t* seed,
 const uint64_t* request, const uint32_t* sample, const uint32_t* position, int64_t* ids) {
  using namespace VX_ISA;
  const int64_t blocks = blocks_of(V);
  std::vector<float> maxima(static_cast<size_t>(N * blocks));
  std::vector<uint64_t> sums(static_cast<size_t>(N * blocks));
  const auto row = [&](int64_t i) { return Logits(logits + i * ld, V, temperature[i]); };
  const auto max = [&](int64_t i) { return row(i).max(&maxima[static_cast<size_t>(i * blocks)]); };
  two_passes(
      N, blocks, [&](int64_t i, int64_t b) { maxima[static_cast<size_t>(i * blocks + b)] = row(i).block_max(b); },
      [&](int64_t i, int64_t b) {
        const float most = max(i);
        const bool weighs = temperature[i] != 0.0f && most == most;
        sums[static_cast<size_t>(i * blocks + b)] = weighs ? block_weight(row(i), b, most) : 0;
      },
      [&](int64_t i) {
        const float most = max(i);
        const size_t at = static_cast<size_t>(i * blocks);
        if (most != most)
          ids[i] = -1;
        else if (temperature[i] == 0.0f)
          ids[i] = greedy_id(row(i), &maxima[at]);
        else
          ids[i] = weighted_id(row(i), most, &sums[at], philox_bits(seed[i], request[i], sample[i], position[i]));
      });
}

VX_API(void, philox)
(int64_t N, const uint64_t* seed, const uint64_t* request, const uint32_t* sample, const uint32_t* position,
 uint64_t* bits) {
  using namespace VX_ISA;
  parallel_for(N, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) bits[i] = philox_bits(seed[i], request[i], sample[i], position[i]);
  });
}
