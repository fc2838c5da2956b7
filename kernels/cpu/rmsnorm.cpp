// y = w · round(x · rstd), rstd = 1 / sqrt(S(x²) / D + eps), and its gradients.
#include "functions.h"
#include "parallel.h"
#include "rows.h"
#include "vexact.h"

namespace VX_ISA {

template <class T>
float rmsnorm_row(int64_t D, const T* x, const T* w, float eps, T* y) {
  const float squares = tree_row(D, [=](int64_t i, int count) {
    const vf v = load(x + i, count);
    return vmul(v, v);
  });
  const float rstd = 1.0f / __builtin_sqrtf(squares / static_cast<float>(D) + eps);
  each_vector(D, [=](int64_t i, int count) {
    const vf n = rounded(vmul(load(x + i, count), vset(rstd)), T{});
    store(y + i, vmul(load(w + i, count), n), count);
  });
  return rstd;
}

template <class T, class G>
void rmsnorm_dx_row(int64_t D, const T* x, const T* w, float rstd, const G* dy, const G* residual, G* dx) {
  const vf r = vset(rstd);
  const float dot = tree_row(D, [=](int64_t i, int count) {
    const vf g = vmul(load(dy + i, count), load(w + i, count));
    const vf gh = vmul(g, vmul(load(x + i, count), r));
    return count < W ? vpick(first(count), gh, vset(0.0f)) : gh;  // an infinite r makes NaN of a pad
  });
  const vf c = vset(dot / static_cast<float>(D));
  each_vector(D, [=](int64_t i, int count) {
    const vf g = vmul(load(dy + i, count), load(w + i, count));
    const vf h = vmul(load(x + i, count), r);
    vf d = vmul(r, vsub(g, vmul(h, c)));
    if (residual) d = vadd(load(residual + i, count), d);
    store(dx + i, d, count);
  });
}

// Up to COLUMNS vectors of columns, all tokens: one chain a column, the rows of a token ascending inside it.
template <class T>
struct NormColumns {
  static constexpr int COLUMNS = 8;
  using G = Gradient<T>;
  int64_t R, D;
  const T* x;
  int64_t ldx;
  const float* rstd;
  const G* dy;
  int64_t lddy;

  void token(int64_t i, int64_t column, int64_t width, vf* acc) const {
    for (int64_t j = 0; j < R; ++j) {
      const T* row = x + i * ldx + j * D + column;
      const G* gradient = dy + i * lddy + j * D + column;
      const vf r = vset(rstd[i * R + j]);
      int c = 0;
      each_vector(width, [&](int64_t k, int count) {
        const vf n = rounded(vmul(load(row + k, count), r), T{});
        acc[c] = vfma(load(gradient + k, count), n, acc[c]);
        ++c;
      });
    }
  }

  void run(int64_t column, int64_t width, int64_t n_seg, const int64_t* ends, const uint8_t* fold, float* lane,
           float* total) const {
    vf acc[COLUMNS];
    each_vector(width, [&](int64_t k, int count) { acc[k / W] = load(lane + column + k, count); });
    int64_t i = 0;
    for (int64_t s = 0; s < n_seg; ++s) {
      for (; i < ends[s]; ++i) token(i, column, width, acc);
      if (!fold[s]) continue;
      each_vector(width, [&](int64_t k, int count) {
        float* sum = total + column + k;
        store(sum, vadd(load(sum, count), acc[k / W]), count);
        acc[k / W] = vset(0.0f);
      });
    }
    each_vector(width, [&](int64_t k, int count) { store(lane + column + k, acc[k / W], count); });
  }
};

}  // namespace VX_ISA

VX_API(void, rmsnorm)
(int dtype, int64_t N, int64_t R, int64_t D, const void* x, int64_t ldx, const void* w, float eps, void* y, int64_t ldy,
 float* rstd) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(N * R, 1 + 32768 / (D + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t i = row / R, offset = row % R * D;
        const float r = rmsnorm_row(D, static_cast<const T*>(x) + i * ldx + offset, static_cast<const T*>(w), eps,
                                    static_cast<T*>(y) + i * ldy + offset);
        if (rstd) rstd[row] = r;
      }
    });
  });
}

VX_API(void, rmsnorm_dx)
(int dtype, int64_t N, int64_t R, int64_t D, const void* x, int64_t ldx, const void* w, const float* rstd,
 const void* dy, int64_t lddy, const void* residual, int64_t ldr, void* dx, int64_t lddx) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    using G = Gradient<T>;
    parallel_for(N * R, 1 + 16384 / (D + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t i = row / R, offset = row % R * D;
        const G* met = residual ? static_cast<const G*>(residual) + i * ldr + offset : nullptr;
        rmsnorm_dx_row(D, static_cast<const T*>(x) + i * ldx + offset, static_cast<const T*>(w), rstd[row],
                       static_cast<const G*>(dy) + i * lddy + offset, met, static_cast<G*>(dx) + i * lddx + offset);
      }
    });
  });
}

VX_API(void, rmsnorm_dw)
(int dtype, int64_t N, int64_t R, int64_t D, const void* x, int64_t ldx, const float* rstd, const void* dy,
 int64_t lddy, int64_t n_seg, const int64_t* ends, const uint8_t* fold, float* lane, float* total) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    const NormColumns<T> columns{R, D, static_cast<const T*>(x), ldx, rstd, static_cast<const Gradient<T>*>(dy), lddy};
    const int64_t vectors = (D + W - 1) / W;
    parallel_for(vectors, 1 + 1024 / (N * R + 1), [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; v += columns.COLUMNS) {
        const int64_t stop = v + columns.COLUMNS < end ? v + columns.COLUMNS : end;
        const int64_t last = stop * W < D ? stop * W : D;
        columns.run(v * W, last - v * W, n_seg, ends, fold, lane, total);
      }
    });
  });
}
