// The rotation of keys at their slots: what rope_at_slots and window_attention take.
#pragma once
#include "../kv_view.h"

namespace kvops {

// A row's cosines or sines, fp32 [b, n, pairs] of any strides but the last.
struct AngleTable {
  const float* data;
  int64_t stride_b, stride_n;  // elements

  KVOPS_HOST_DEVICE const float* row(int64_t b, int64_t i) const { return data + b * stride_b + i * stride_n; }
};

struct SlotRope {
  AngleTable cos, sin;
  int64_t pairs;     // channels 2 * pairs and above stay; 0: nothing turns, and there are no tables
  bool interleaved;  // pair i is channels 2 i, 2 i + 1 (GPT-J), else i, i + pairs (NeoX)
};

}  // namespace kvops
