// How many values become one. The operators' schemas have it as an integer (kvops.ops.REDUCTIONS).
#pragma once
#include "../kv_view.h"

namespace kvops {

enum class Reduce : int32_t { sum, mean, max, none };

}  // namespace kvops
