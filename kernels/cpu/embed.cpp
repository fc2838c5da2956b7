// Rows of the packed weight, and their gradient: per id one sum over tokens in order, cut into lanes (vexact.h).
#include "matmul_pack.h"
#include "vexact.h"

namespace VX_ISA {

template <class T>
void embed_rows(int64_t N, int64_t D, const int64_t* ids, const void* packed, T* y, int64_t ldy) {
  parallel_for(N, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* panel = panel_of<T>(packed, ids[i] / PANEL, D);
      for (int64_t d = 0; d < D; ++d) y[i * ldy + d] = panel[packed_place<T>(d, ids[i] % PANEL)];
    }
  });
}

// Tokens [begin, end) added into the lanes of their ids. Threads divide columns: an id's tokens stay with one thread.
template <class G>
void embed_add(int64_t begin, int64_t end, int64_t D, const int64_t* ids, const G* dy, int64_t lddy, float* lane) {
  parallel_for(ceil_div(D, W), 4, [&](int64_t first, int64_t last) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t d = first * W; d < last * W && d < D; d += W) {
        const int n = static_cast<int>(D - d < W ? D - d : W);
        float* to = lane + ids[i] * D + d;
        vstore(to, vadd(vload(to, n), load(dy + i * lddy + d, n)), n);
      }
    }
  });
}

// total = total + lane and lane = +0 for the rows that were met.
inline void embed_fold(int64_t V, int64_t D, float* lane, float* total, uint8_t* touched) {
  parallel_for(V, 256, [&](int64_t first, int64_t last) {
    for (int64_t id = first; id < last; ++id) {
      if (!touched[id]) continue;
      touched[id] = 0;
      for (int64_t d = 0; d < D; d += W) {
        const int n = static_cast<int>(D - d < W ? D - d : W);
        float *from = lane + id * D + d, *to = total + id * D + d;
        vstore(to, vadd(vload(to, n), vadd(vload(from, n), vset(0.0f))), n);
        vstore(from, vset(0.0f), n);
      }
    }
  });
}

template <class G>
void embed_gradient(int64_t V, int64_t D, const int64_t* ids, const G* dy, int64_t lddy, int64_t n_seg,
                    const int64_t* ends, const uint8_t* fold, float* lane, float* total, uint8_t* touched) {
  int64_t begin = 0;
  for (int64_t s = 0; s < n_seg; begin = ends[s++]) {
    for (int64_t i = begin; i < ends[s]; ++i) touched[ids[i]] = 1;
    embed_add(begin, ends[s], D, ids, dy, lddy, lane);
    if (fold[s]) embed_fold(V, D, lane, total, touched);
  }
}

}  // namespace VX_ISA

VX_API(void, embed)(int dtype, int64_t N, int64_t /*V*/, int64_t D, const int64_t* ids, const void* packed, void* y,
                    int64_t ldy) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto t) { embed_rows(N, D, ids, packed, static_cast<decltype(t)*>(y), ldy); });
}

VX_API(void, embed_dw)(int dtype, int64_t /*N*/, int64_t V, int64_t D, const int64_t* ids, const void* dy, int64_t lddy,
                       int64_t n_seg, const int64_t* ends, const uint8_t* fold, float* lane, float* total,
                       uint8_t* touched) {
  using namespace VX_ISA;
  with_storage(dtype, [&](auto t) {
    using G = Gradient<decltype(t)>;
    embed_gradient(V, D, ids, static_cast<const G*>(dy), lddy, n_seg, ends, fold, lane, total, touched);
  });
}
