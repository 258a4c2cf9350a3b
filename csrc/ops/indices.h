// Rows of slot indices, as select_topk returns them.
#pragma once
#include "../kv_view.h"

namespace kvops {

// Integer rows [b, Hk, m] with any strides.
struct IndexView {
  const int64_t* data;
  int64_t stride_b, stride_h, stride_m;  // elements
  int64_t m;
};

}  // namespace kvops
