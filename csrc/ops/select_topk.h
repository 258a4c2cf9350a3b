// select_topk: parameters, launcher.
#pragma once
#include "../kv_view.h"
#include "lag_score.h"

namespace kvops {

struct SelectTopkParams {
  const float* scores;                   // [b, Hk, n], or [b, Hk, segments, lag]
  int64_t stride_b, stride_h, stride_s;  // elements; the last dim is contiguous
  int64_t* indices;                      // [b, Hk, width]
  ValidSlots slots;
  const int32_t* budgets;  // [b, Hk] or null: k
  int64_t b, heads, n, width;
  int64_t segments, lag;  // segments = -1: rows are not segmented
  int64_t k, sinks, window;
  bool fill_invalid;
};

// LagKV Eq. 10: the number of slots kept of n.
KVOPS_HOST_DEVICE inline int64_t kept_length(int64_t n, int64_t prefix, int64_t lag, int64_t m) {
  return n - num_segments(n, prefix, lag) * (lag - m);
}

// The number of slots kept of n; for a padded batch, the maximum over all n' <= n. The kept length grows by one per
// token and drops when a partition completes, so the maximum is at n or just before the last drop.
inline int64_t segment_width(int64_t n, int64_t prefix, int64_t lag, int64_t m, bool padded) {
  const int64_t whole = kept_length(n, prefix, lag, m);
  const int64_t last_drop = prefix + (n > prefix ? (n - prefix) / lag * lag : 0);
  if (!padded || last_drop == 0 || last_drop > n) return whole;
  const int64_t before = kept_length(last_drop - 1, prefix, lag, m);
  return before > whole ? before : whole;
}

void launch_select_topk(const SelectTopkParams& p, Call& call);

}  // namespace kvops
