// assign_prototypes: parameters, checks, output shape.
#pragma once
#include "../kv_view.h"

namespace kvops {

struct AssignPrototypesParams {
  KVView k;                 // [b, Hk, n, d]
  const float* prototypes;  // [b, Hk, count, d]
  int32_t* assignment;      // [b, Hk, n]
  DType dtype;
  ValidSlots slots;
  int64_t b, heads, n, d, count;
};

// What a worker of a CPU call has in hand, in floats; every array starts on a cache line. Vectors are counted as 16
// floats.
constexpr int64_t kAssignKeys = 48;  // that pass all prototypes while they are in the cache

struct AssignScratch {
  int64_t packed, keys, best, worker;

  explicit AssignScratch(const AssignPrototypesParams& p) {
    const int64_t width = (p.d + 31) / 32 * 32, rows = (p.count + 15) / 16 * 16;
    packed = rows * width;
    keys = kAssignKeys * width;
    best = 2 * kAssignKeys * 16;
    worker = (packed + keys + best + 3 * p.count + 2 * p.d + 15) / 16 * 16;
  }
};

#ifdef KVOPS_CHECKS
inline AssignPrototypesParams check_assign_prototypes(const Tensor& k, const Tensor& prototypes,
                                                      const OptionalTensor& starts, const OptionalTensor& lengths,
                                                      Tensor& assignment) {
  const char* op = "assign_prototypes";
  check_same_device(op, "prototypes", prototypes, k);
  const DType dtype = check_dtype(op, "k", k);
  check_scalar_type(op, "prototypes", prototypes, ScalarType::Float);
  const KVView view = check_kv(op, "k", k);
  const int64_t b = k.size(0), heads = k.size(1), n = k.size(2), d = k.size(3);
  KVOPS_CHECK(
      prototypes.dim() == 4 && prototypes.size(0) == b && prototypes.size(1) == heads && prototypes.size(2) >= 1 &&
          prototypes.size(2) <= int64_t{1} << 25 && prototypes.size(3) == d && prototypes.is_contiguous(),
      op, ": prototypes must be a contiguous [", b, ", ", heads, ", at least 1, ", d, "], got ", shape(prototypes));
  const ValidSlots slots = check_valid_slots(op, k, b, n, starts, lengths);
  assignment = empty(op, k, std::array{b, heads, n}, ScalarType::Int);
  return {.k = view,
          .prototypes = static_cast<const float*>(prototypes.const_data_ptr()),
          .assignment = static_cast<int32_t*>(assignment.mutable_data_ptr()),
          .dtype = dtype,
          .slots = slots,
          .b = b,
          .heads = heads,
          .n = n,
          .d = d,
          .count = prototypes.size(2)};
}
#endif

}  // namespace kvops
