// dw = dy^T x and db: one chain over tokens an output, cut into lanes (vexact.h).
#pragma once
#include "matmul_pack.h"
#include "matmul_tile.h"

namespace VX_ISA {

// Consecutive tokens of one lane. `rows`: packed rows before it in a panel or tile.
struct Run {
  int64_t begin, end, rows;
  bool dot, fold;
  int64_t size() const { return end - begin; }
};

// The segments with those of one lane joined, each run with its path.
class Runs {
 public:
  Runs(int64_t n_seg, const int64_t* ends, const uint8_t* fold) : runs_(n_seg) {
    int64_t begin = 0;
    for (int64_t s = 0; s < n_seg; ++s) {
      if (!fold[s] && s + 1 < n_seg) continue;
      runs_.get()[count_++] = {begin, ends[s], 0, false, fold[s] != 0};
      begin = ends[s];
    }
  }

  // Decides each run's path from the smallest exponents of its tokens. A lane that once took the float32 path stays
  // there, because its sum need not be a multiple of 2^-126 any more. Returns the state behind the last run.
  bool choose_paths(bool exact_lane, bool has_dot, const int* left_exponent, const int* right_exponent) {
    for (int64_t i = 0; i < count_; ++i) {
      Run& run = runs_.get()[i];
      int left = NO_EXPONENT, right = NO_EXPONENT;
      for (int64_t m = run.begin; m < run.end && has_dot; ++m) {
        left = smaller(left, left_exponent[m]);
        right = smaller(right, right_exponent[m]);
      }
      run.dot = has_dot && !exact_lane && may_dot(left, right);
      run.rows = rows_;
      rows_ += run.dot ? (run.size() + 1) / 2 : run.size();
      exact_lane = !run.fold && !run.dot && (exact_lane || run.size() > 0);
    }
    return exact_lane;
  }

  bool folds() const { return count_ && runs_.get()[0].fold; }  // all runs but the last end a lane
  bool ends_open() const { return count_ && !runs_.get()[count_ - 1].fold; }
  const Run* begin() const { return runs_.get(); }
  const Run* end() const { return runs_.get() + count_; }
  int64_t rows() const { return rows_; }  // packed rows of all runs

 private:
  Scratch<Run> runs_;
  int64_t count_ = 0, rows_ = 0;
};

// Columns [c, c + 16) of a row of which `readable` exist, widened.
template <class T>
vf load_columns(const T* x, int64_t c, int64_t readable) {
  const int64_t n = readable - c;
  return n >= W ? load(x + c) : n > 0 ? load(x + c, static_cast<int>(n)) : vset(0.0f);
}

// Columns of one run as out[m][stride], widened, +0 past `readable`, how many columns of x exist. Whole vectors are
// written: what spills over a row's end is overwritten by the next row, and behind the last row W places are spare.
template <class T>
void pack_tokens(int64_t tokens, int64_t readable, int stride, const T* x, int64_t ldx, float* out) {
  for (int64_t m = 0; m < tokens; ++m, x += ldx, out += stride) {
    for (int c = 0; c < stride; c += W) vstore(out + c, load_columns(x, c, readable));
  }
}

// The same in pairs of tokens, the first in the high half; the partner of a last odd token is `absent`: -0 on one side
// and +0 on the other, since adding (-0)·(+0) leaves every lane as it is, -0 too.
inline void pack_token_pairs(int64_t tokens, int64_t readable, int stride, float absent, const bf16* x, int64_t ldx,
                             uint32_t* out) {
  for (int64_t m = 0; m < tokens; m += 2, x += 2 * ldx, out += stride) {
    for (int c = 0; c < stride; c += W) {
      const vi high = as_int(load_columns(x, c, readable));
      const vi low = m + 1 < tokens ? as_int(load_columns(x + ldx, c, readable)) : as_int(vset(absent));
      vstore(reinterpret_cast<float*>(out + c), as_float(ior(high, shr<16>(low))));
    }
  }
}

template <class T>
void pack_runs(const Runs& runs, int64_t readable, int stride, float absent, const T* x, int64_t ldx, uint32_t* out) {
  for (const Run& run : runs) {
    const T* from = x + run.begin * ldx;
    uint32_t* to = out + run.rows * stride;
    if constexpr (MAY_HAVE_DOT<T>) {
      if (run.dot) {
        pack_token_pairs(run.size(), readable, stride, absent, from, ldx, to);
        continue;
      }
    }
    pack_tokens(run.size(), readable, stride, from, ldx, reinterpret_cast<float*>(to));
  }
}

// The whole product. G: storage of dy, T: storage of x; both are bf16 wherever a run may use the instruction.
template <class G, class T>
class WeightGradient {
 public:
  WeightGradient(int64_t N, int64_t K, const G* dy, int64_t lddy, const T* x, int64_t ldx, const Runs& runs,
                 float* lane, bool lane_is_zero, float* total, bool total_is_zero)
      : N_(N),
        K_(K),
        dy_(dy),
        lddy_(lddy),
        x_(x),
        ldx_(ldx),
        runs_(runs),
        lane_(lane),
        total_(total),
        lane_is_zero_(lane_is_zero),
        total_is_zero_(total_is_zero),
        panels_(ceil_div(K, PANEL)),
        right_(panels_ * runs.rows() * PANEL) {}

  // Threads divide the rows of dw in blocks of tiles; a thread packs the block's columns of dy just before it is used.
  void run() const {
    const int64_t work = runs_.rows() + 1;
    parallel_for(panels_, ceil_div(WORTH_A_THREAD / 8, work * PANEL), [this](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        pack_runs(runs_, K_ - p * PANEL, PANEL, 0.0f, x_ + p * PANEL, ldx_, right_.get() + p * runs_.rows() * PANEL);
      }
    });
    const RowTiles tiles(N_);
    parallel_for(tiles.count, ceil_div(WORTH_A_THREAD, work * K_ * TILE_ROWS + 1), [&](int64_t begin, int64_t end) {
      const Scratch<uint32_t> left(runs_.rows() * BLOCK * TILE_ROWS + W);
      for (int64_t t = begin; t < end; t += BLOCK) block(tiles, t, t + BLOCK < end ? t + BLOCK : end, left.get());
    });
  }

 private:
  static constexpr int64_t BLOCK = 8;
  static constexpr int GROUP = TILE_VECTORS * W;

  void block(const RowTiles& tiles, int64_t first, int64_t last, uint32_t* left) const {
    const int64_t n0 = tiles.begin(first);
    for (int64_t t = first; t < last; ++t) {
      const int rows = tiles.height(t);
      const int64_t n = tiles.begin(t);
      pack_runs(runs_, N_ - n, rows, -0.0f, dy_ + n, lddy_, left + (n - n0) * runs_.rows());
    }
    for (int64_t k = 0; k < K_; k += GROUP) {
      const uint32_t* right = right_.get() + k / PANEL * runs_.rows() * PANEL + k % PANEL;
      for (int64_t t = first; t < last; ++t) {
        const int64_t n = tiles.begin(t);
        if (t + 1 < last) prefetch(tiles.begin(t + 1), tiles.height(t + 1), k);
        output(tiles.height(t), n, k, left + (n - n0) * runs_.rows(), right);
      }
      if (k + GROUP < K_) prefetch(n0, tiles.height(first), k + GROUP);
    }
  }

  // The float32 buffers stream through once a call, in short pieces that the processor does not foresee.
  void prefetch(int64_t n, int rows, int64_t k) const {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < GROUP; c += W) {
        if (!lane_is_zero_) __builtin_prefetch(lane_ + (n + r) * K_ + k + c, 1);
        if (runs_.folds()) __builtin_prefetch(total_ + (n + r) * K_ + k + c, 1);
      }
    }
  }

  // One tile of dw through all runs.
  void output(int rows, int64_t n, int64_t k, const uint32_t* left, const uint32_t* right) const {
    const int width = static_cast<int>(K_ - k < GROUP ? K_ - k : GROUP);
    alignas(64) float lane[TILE_ROWS * GROUP], total[TILE_ROWS * GROUP];
    gather(rows, lane_is_zero_ ? 0 : width, lane_ + n * K_ + k, lane);
    if (runs_.folds()) gather(rows, total_is_zero_ ? 0 : width, total_ + n * K_ + k, total);
    const float* start = lane;
    for (const Run& run : runs_) {
      multiply(run, rows, left + run.rows * rows, right + run.rows * PANEL, start, run.fold ? total : lane);
      start = run.fold ? ZERO_SUMS : lane;
    }
    // A lane that was and is zero, the usual case where a batch holds whole lanes, need not be written.
    const bool was_zero = lane_is_zero_ || all_zero(rows * GROUP, lane);
    if (start == lane || !was_zero) scatter(rows, width, start, lane_ + n * K_ + k);
    if (runs_.folds()) scatter(rows, width, total, total_ + n * K_ + k);
  }

  static bool all_zero(int n, const float* v) {
    vi bits = iset(0);
    for (int i = 0; i < n; i += W) bits = ior(bits, as_int(vload(v + i)));
    return !any(ilt(bits, iset(0))) && !any(ilt(iset(0), bits));
  }

  // Between rows at distance K and a tile at distance GROUP. Past `width` the tile is +0.
  void gather(int rows, int width, const float* from, float* tile) const {
    for (int r = 0; r < rows; ++r, from += K_) {
      for (int c = 0; c < GROUP; c += W) {
        vstore(tile + r * GROUP + c, width >= c + W ? vload(from + c)
                                     : width > c    ? vload(from + c, width - c)
                                                    : vset(0.0f));
      }
    }
  }
  void scatter(int rows, int width, const float* tile, float* to) const {
    for (int r = 0; r < rows; ++r, to += K_) {
      for (int c = 0; c < width; c += W) store(to + c, vload(tile + r * GROUP + c), width - c);
    }
  }

  static void multiply(const Run& run, int rows, const uint32_t* left, const uint32_t* right, const float* start,
                       float* out) {
    const Ahead ahead{reinterpret_cast<const char*>(right), 0};
#if defined(__AVX512BF16__)
    if (run.dot) return find_tile<PairDot>(rows, false)(run.size(), left, right, 0, start, run.fold, out, ahead);
#endif
    find_tile<Single<float>>(rows, false)(run.size(), reinterpret_cast<const float*>(left),
                                          reinterpret_cast<const float*>(right), 0, start, run.fold, out, ahead);
  }

  int64_t N_, K_;
  const G* dy_;
  int64_t lddy_;
  const T* x_;
  int64_t ldx_;
  const Runs& runs_;
  float *lane_, *total_;
  bool lane_is_zero_, total_is_zero_;
  int64_t panels_;
  Scratch<uint32_t> right_;
};

// The state of a stream's buffers (vexact.h).
enum State { EXACT_LANE = 1, LANE_IS_ZERO = 2, TOTAL_IS_ZERO = 4 };

template <class T>
void row_exponents(int64_t M, int64_t n, const T* x, int64_t ldx, int* exponents) {
  parallel_for(M, ceil_div(int64_t{1} << 16, n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) exponents[m] = smallest_exponent(x + m * ldx, n);
  });
}

template <class G, class T>
int weight_gradient(int64_t M, int64_t N, int64_t K, const G* dy, int64_t lddy, const T* x, int64_t ldx, int64_t n_seg,
                    const int64_t* ends, const uint8_t* fold, float* lane, float* total, int state) {
  Runs runs(n_seg, ends, fold);
  const bool lane_is_zero = state & LANE_IS_ZERO, total_is_zero = state & TOTAL_IS_ZERO;
  const Scratch<int> left(M), right(M);
  const bool has_dot = MAY_HAVE_DOT<G>;
  if (has_dot) {
    row_exponents(M, N, dy, lddy, left.get());
    row_exponents(M, K, x, ldx, right.get());
  }
  const bool exact = runs.choose_paths(state & EXACT_LANE, has_dot, left.get(), right.get());
  WeightGradient<G, T>(N, K, dy, lddy, x, ldx, runs, lane, lane_is_zero, total, total_is_zero).run();
  return (exact ? EXACT_LANE : 0) | (lane_is_zero && !runs.ends_open() ? LANE_IS_ZERO : 0) |
         (total_is_zero && !runs.folds() ? TOTAL_IS_ZERO : 0);
}

template <class G>
void bias_gradient(int64_t N, const G* dy, int64_t lddy, int64_t n_seg, const int64_t* ends, const uint8_t* fold,
                   float* lane, float* total) {
  const int64_t tokens = n_seg ? ends[n_seg - 1] : 0;
  parallel_for(ceil_div(N, W), 4 + WORTH_A_THREAD / 64 / (tokens + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * W;
      const int n = static_cast<int>(N - at < W ? N - at : W);
      vf sum = vload(lane + at, n), all = vload(total + at, n);
      int64_t m = 0;
      for (int64_t s = 0; s < n_seg; ++s) {
        for (; m < ends[s]; ++m) sum = vfma(load(dy + m * lddy + at, n), vset(1.0f), sum);
        if (!fold[s]) continue;
        all = vadd(all, vadd(sum, vset(0.0f)));
        sum = vset(0.0f);
      }
      vstore(lane + at, sum, n);
      vstore(total + at, all, n);
    }
  });
}

}  // namespace VX_ISA
