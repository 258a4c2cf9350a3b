#include "compact_kv_.cuh"

namespace kvops {

void launch_compact_kv_(const CompactKVParams& p, Call& call) {
  compact_kv__cuda(p, call.workspace(compact_kv__workspace(p)), stream_of(call));
}

}  // namespace kvops
