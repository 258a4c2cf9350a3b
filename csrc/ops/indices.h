// Rows of slots, as select_topk gives them.
#pragma once
#include "../kv_view.h"

namespace kvops {

// Integer rows [b, Hk, m] of any strides.
struct IndexView {
  const int64_t* data;
  int64_t stride_b, stride_h, stride_m;  // elements
  int64_t m;
};

}  // namespace kvops
