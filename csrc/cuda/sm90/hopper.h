// The Hopper kernels, as the launchers of window_scores, window_attention and assign_prototypes call them. Each
// function either does its pass and returns true, or does nothing and returns false: not built, not enabled
// (KVOPS_SM90), a different GPU, or an unsupported call. In that case the portable kernel does the pass; both read and
// write the same data.
#pragma once
#include "../../ops/assign_prototypes.h"
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
#endif

}  // namespace kvops::sm90
