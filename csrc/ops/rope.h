// RoPE at slots, the parameters that rope_at_slots and window_attention share.
#pragma once
#include "../kv_view.h"

namespace kvops {

// The cosines or sines of each slot, fp32 [b, n, pairs], contiguous in the last dim.
struct AngleTable {
  const float* data;
  int64_t stride_b, stride_n;  // elements

  KVOPS_HOST_DEVICE const float* row(int64_t b, int64_t i) const { return data + b * stride_b + i * stride_n; }
};

struct SlotRope {
  AngleTable cos, sin;
  int64_t pairs;     // channels from 2 * pairs on are not rotated; 0: no rotation, and no tables
  bool interleaved;  // pair i is channels 2 i, 2 i + 1 (GPT-J), else i, i + pairs (NeoX)
};

}  // namespace kvops
