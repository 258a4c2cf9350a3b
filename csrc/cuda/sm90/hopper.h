// The Hopper kernels, as the launchers of the operators call them. Each function either does its pass and returns true,
// or does nothing and returns false: not built, not enabled (KVOPS_SM90), a different GPU, or an unsupported call. In
// that case the portable kernel does the pass; both read and write the same data.
#pragma once
#include "../../ops/assign_prototypes.h"
#include "../../ops/key_similarity.h"
#include "../../ops/value_norm.h"
#include "../../ops/window_scores.h"
#include "../device.cuh"

namespace kvops::sm90 {

#ifdef KVOPS_SM90
// The scores. For each row either the totals are known, [b, Hq, w]: the largest logit, times log2(e), and the sum of
// 2^(logit - that); or, if `totals` is null, the lse.
bool window_scores(const Window& p, const RowValues& lse, const float2* totals, cudaStream_t stream);

// For each row and each split (split_keys keys, starting at the first valid slot + split * split_keys): the largest
// logit, times log2(e), and the sum of 2^(logit - that). If v is null, sums are [b * heads, splits, rows]. Otherwise v
// is [b, heads, n, dv], sums are [b * heads, rows, splits], and `out`, [.., dv], receives the sum of 2^(logit - that)
// v. logits: null, or, with v, [b * heads, rows, n], which receives the logits, times log2(e), of the keys that a row
// sees.
bool window_pass(const Window& p, const KVView* v, int64_t splits, int64_t split_keys, float2* sums, float* out,
                 float* logits, cudaStream_t stream);

// The assignment. units: the prototypes as unit vectors of k's dtype, [b, heads, rows, d], 0 for those that cannot win.
bool assign_prototypes(const AssignPrototypesParams& p, const KVView& units, int64_t rows, cudaStream_t stream);

// The search of key_similarity. keys: the packed ones, [b * heads, rows, d], of a dtype of their own, zeros past the
// valid ones; rows: a multiple of 128. inverses: of their norms, [b * heads, rows]. Adds what the keys spare to spared,
// of the same shape, in units of 2^-32.
bool last_similar(const KeySimilarityParams& p, const KVView& keys, DType dtype, int64_t rows, const float* inverses,
                  unsigned long long* spared, cudaStream_t stream);

// The norms per query head, [b, Hq, n], the first of which is the first valid slot's.
bool query_head_norms(const ValueNormParams& p, float* norms, cudaStream_t stream);
#else
inline bool window_scores(const Window&, const RowValues&, const float2*, cudaStream_t) {
  return false;
}
inline bool window_pass(const Window&, const KVView*, int64_t, int64_t, float2*, float*, float*, cudaStream_t) {
  return false;
}
inline bool assign_prototypes(const AssignPrototypesParams&, const KVView&, int64_t, cudaStream_t) {
  return false;
}
inline bool last_similar(const KeySimilarityParams&, const KVView&, DType, int64_t, const float*, unsigned long long*,
                         cudaStream_t) {
  return false;
}
inline bool query_head_norms(const ValueNormParams&, float*, cudaStream_t) {
  return false;
}
#endif

}  // namespace kvops::sm90
