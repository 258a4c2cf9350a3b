// Operators that write to their arguments reject views with torch's negative bit, such as x.conj().imag. torch's
// fallback would pass copies and then fail to write them back, leaving one of two tensors changed.
#include "check.h"
#include "registry.h"

namespace kvops {
namespace {

struct Name {
  char text[32];
  constexpr Name(const char* name) : text{} {
    for (int i = 0; name[i]; ++i) text[i] = name[i];
  }
};

template <Name op>
void refuse_negated(StableIValue*, uint64_t, uint64_t) {
  fail(op.text,
       ": tensors must not be negated views in a call that writes to its arguments, got one; call resolve_neg() on it");
}

}  // namespace

KVOPS_REGISTER(IMPL, "Negative", m) {
  m.impl("gather_kv.out", &refuse_negated<"gather_kv">);
  m.impl("compact_kv_", &refuse_negated<"compact_kv_">);
  m.impl("ladder_gather.out", &refuse_negated<"ladder_gather">);
  m.impl("ladder_compact_", &refuse_negated<"ladder_compact_">);
  m.impl("rope_at_slots.out", &refuse_negated<"rope_at_slots">);
}

}  // namespace kvops
