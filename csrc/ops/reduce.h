// Reductions of many values to one. The operator schemas encode them as integers (kvops.ops.REDUCTIONS).
#pragma once
#include "../kv_view.h"

namespace kvops {

enum class Reduce : int32_t { sum, mean, max, none };

}  // namespace kvops
