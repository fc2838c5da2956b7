// The C interface: plain pointers and integers, one symbol an op and instruction set: vx_<isa>_<op>.
//
// dtype      0 float32, 1 bfloat16, 2 float16: storage of weights and activations.
// gradients  between ops are stored in dtype, except that float16 keeps them in float32 ("grad" below).
// ld…        distance between rows in elements; elements of a row are neighbours. All sizes and offsets are 64 bit.
// lanes      parameter gradients are folded over the tokens of a batch, which the caller cuts into n_seg segments by
//            ends[] (ascending, the last one is the number of tokens). Within a segment one chain over tokens
//            continues `lane`; where fold[s] is set, the lane ends after segment s: total += lane, lane = +0.
//            "n_seg, ends, fold" below: int64 n_seg, const int64* ends, const uint8* fold.
#pragma once
#include <cstdint>

#define VX_PASTE(a, b, c) a##b##_##c
#define VX_NAME(isa, op) VX_PASTE(vx_, isa, op)

#define VX_API(type, op) extern "C" __attribute__((visibility("default"))) type VX_NAME(VX_ISA, op)

// clang-format off
/*
matmul.cpp     y[m,n] = round(chain_k(x[m,k], w[n,k]) + bias[n])
  int64  matmul_packed_bytes(int dtype, int64 N, int64 K)
  void   matmul_pack(int dtype, int64 N, int64 K, const void* w, int64 ldw, void* packed, int32* min_exponent)
           packed is 64-byte aligned; min_exponent: smallest exponent of a non-zero weight (see matmul.cpp)
  void   matmul_unpack(int dtype, int64 N, int64 K, const void* packed, void* w, int64 ldw)
  void   matmul(int dtype, int64 M, int64 N, int64 K, const void* x, int64 ldx, const void* packed, int32 min_exponent,
                const void* bias (dtype, may be null), int y_float32, void* y, int64 ldy)
           y is dtype, or float32 if y_float32 (logits)
  void   matmul_dx(int dtype, int64 M, int64 N, int64 K, const grad* dy, int64 lddy, const void* packed,
                   int32 min_exponent, void* scratch, grad* dx, int64 lddx)
           scratch: matmul_dx_bytes(dtype, N, K) bytes, 64-byte aligned
  int64  matmul_dx_bytes(int dtype, int64 N, int64 K)
  int    matmul_dw(int dtype, int64 M, int64 N, int64 K, const grad* dy, int64 lddy, const void* x, int64 ldx,
                   n_seg, ends, fold, float* lane, float* total, int state)
           lane, total [N, K]. state and the result are bits: 1 the running lane has taken the float32 path; 2 the lane
           is +0 and 4 the total is +0 whatever their memory holds, which spares reading it. 2 is taken back where the
           last segment leaves its lane open, 4 where any lane ends
  void   matmul_db(int dtype, int64 M, int64 N, const grad* dy, int64 lddy, n_seg, ends, fold,
                   float* lane, float* total)

embed.cpp      rows of the packed weight
  void   embed(int dtype, int64 N, int64 V, int64 D, const int64* ids, const void* packed, void* y, int64 ldy)
  void   embed_dw(int dtype, int64 N, int64 V, int64 D, const int64* ids, const grad* dy, int64 lddy,
                  n_seg, ends, fold, float* lane, float* total, uint8* touched)
           touched [V]: the ids whose lane has begun

rmsnorm.cpp    rows x[i, j, :] with i < N at distance ldx and j < R at distance D behind each other
  void   rmsnorm(int dtype, int64 N, int64 R, int64 D, const void* x, int64 ldx, const void* w, float eps,
                 void* y, int64 ldy, float* rstd ([N, R], may be null))
  void   rmsnorm_dx(int dtype, int64 N, int64 R, int64 D, const void* x, int64 ldx, const void* w, const float* rstd,
                    const grad* dy, int64 lddy, const grad* residual (may be null), int64 ldr, grad* dx, int64 lddx)
  void   rmsnorm_dw(int dtype, int64 N, int64 R, int64 D, const void* x, int64 ldx, const float* rstd,
                    const grad* dy, int64 lddy, n_seg, ends, fold, float* lane, float* total)

rope.cpp       x[i, h, :] with i < N at distance ldx; tables [positions, K/2] float32; inverse = 1 rotates back
  void   rope(int dtype_of_x, int inverse, int64 N, int64 H, int64 K, const void* x, int64 ldx, const int64* positions,
              const float* cos, const float* sin, void* y, int64 ldy)

attention.cpp  chunks: sequence s owns tokens start[s] … start[s+1] of the batch after a prefix of prefix[s] tokens; its
               pages are table[table_start[s] …], each 64 positions. key_pages [P, G, K, 64], value_pages [P, G, 64, K].
  void   attention(int dtype, int64 S, const int64* start, const int64* prefix, const int64* table_start,
                   const int64* table, int64 H, int64 G, int64 K, const void* q, int64 ldq, const void* k, int64 ldk,
                   const void* v, int64 ldv, void* key_pages, void* value_pages, float scale,
                   void* y, int64 ldy, float* lse ([N, H], may be null))

attention_backward.cpp  whole sequences: prefixes are empty
  void   attention_backward(int dtype, int64 S, const int64* start, int64 H, int64 G, int64 K,
                   const void* q, int64 ldq, const void* k, int64 ldk, const void* v, int64 ldv,
                   const void* y, int64 ldy, const grad* dy, int64 lddy, const float* lse, float scale,
                   grad* dq, int64 lddq, grad* dk, int64 lddk, grad* dv, int64 lddv)

swiglu.cpp     gate_up [N, 2F]: F gates, then F ups
  void   swiglu(int dtype, int64 N, int64 F, const void* gate_up, int64 ldx, void* y, int64 ldy)
  void   swiglu_backward(int dtype, int64 N, int64 F, const void* gate_up, int64 ldx, const grad* dy, int64 lddy,
                         grad* dgate_up, int64 lddx)

logprob.cpp    z = logit / T + 0 (T = 0 means T = 1), M = max z, Z = S(exp(z - M)). A row is finite where M is and no
               logit is NaN; where it is not, finite = 0 and logprob is NaN
  void   logprob(int64 N, int64 V, const float* logits, int64 ld, const int64* ids, const float* temperature ([N]),
                 float* logprob, float* entropy (may be null), float* max, float* sum, uint8* finite)
  void   logprob_backward(int dtype, int64 N, int64 V, const float* logits, int64 ld, const int64* ids,
                 const float* temperature, const float* max, const float* sum, const float* entropy,
                 const float* d_logprob, const float* d_entropy (may be null), grad* d_logits, int64 lddl)
           +0 in rows whose incoming gradients are 0, whatever their logits

centre.cpp     d_logits of d_logprob · (w_id log p(id) - Σ q w log p), p the policy's softmax and q the sampler's, w the
               ratio p / b to the base's held by low … high: clamps = 1 to the nearest bound, 0 to nothing. max and sum
               of the three as logprob found them
  void   centre(int dtype, int64 N, int64 V, const float* policy, int64 ldp, const float* max, const float* sum,
                const float* sampler, int64 lds, const float* max, const float* sum,
                const float* base, int64 ldb, const float* max, const float* sum,
                const int64* ids, const float* temperature, const float* d_logprob, const float* low,
                const float* high, int clamps, grad* d_logits, int64 lddl, float* w_id ([N]), float* total ([N]))
           +0 in rows whose d_logprob is 0, whatever their logits; total = Σ q w

draw.cpp       z as in logprob.cpp
  void   draw(int64 N, int64 V, const float* logits, int64 ld, const float* temperature (0: greedy),
              const uint64* seed, const uint64* request, const uint32* sample, const uint32* position, int64* ids)
           ids[i] = -1 where row i holds a NaN or its largest z is not finite
  void   philox(int64 N, const uint64* seed, const uint64* request, const uint32* sample, const uint32* position,
                uint64* bits)

noise.cpp
  void   noise(int64 N, int64 columns, const uint64* key, float* y, int64 ldy)
           y[i, v]: the standard normal number of (key[i], v)

elementwise.cpp
  void   exp(int64 n, const float* x, float* y)
  void   log(int64 n, const float* x, float* y)
  void   add(int dtype_of_x, int64 n, const void* a, const void* b, void* y)     one rounding
  void   cast(int from, int to, int64 n, const void* x, void* y)                one rounding

sum.cpp
  float  sum(int64 n, const float* x)                 S(x)
  float  sum_squares(int64 n, const float* x)         S(x * x)

adamw.cpp      one_minus_beta is 1 - beta in float64, rounded to float32 once
  void   adamw(int64 n, float* p, const float* g, float* m, float* v, float clip, float beta1, float beta2,
               float one_minus_beta1, float one_minus_beta2, float eps, float decay, float step,
               float rsqrt_correction2)
*/
// clang-format on
