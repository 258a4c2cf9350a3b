// How many values become one. The operators' schemas have it as an integer (kvops.ops.REDUCTIONS).
#pragma once
#include "../kv_view.h"

namespace kvops {

enum class Reduce : int32_t { sum, mean, max, none };

#ifdef KVOPS_CHECKS
// One of the reductions up to `last`.
inline Reduce check_reduce(const char* op, const char* name, int64_t value, Reduce last) {
  constexpr const char* kNames[] = {"0 (sum)", "1 (mean)", "2 (max)", "3 (none)"};
  const int64_t most = static_cast<int64_t>(last);
  if (value >= 0 && value <= most) return static_cast<Reduce>(value);
  std::string allowed;
  for (int64_t i = 0; i <= most; ++i) allowed += (i == 0 ? "" : i < most ? ", " : " or ") + std::string(kNames[i]);
  fail(op, ": ", name, " must be ", allowed, ", got ", value);
}
#endif

}  // namespace kvops
