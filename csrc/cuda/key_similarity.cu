#include "key_similarity.cuh"

namespace kvops {

void launch_key_similarity(const KeySimilarityParams& p, Call& call) {
  key_similarity_cuda(p, call.workspace(key_similarity_workspace(p)), stream_of(call));
}

}  // namespace kvops
