#include "launch.h"
// launch.h first: it makes the checks in ops/ visible.
#include "ladder_gather.cuh"

namespace kvops {
namespace {

using Tensors = std::vector<Tensor>;

void run(const Tensor& like, const LadderCall& call) {
  const OnDevice device(like);
  ladder_gather_cuda(call.params, device.stream());
}

std::tuple<Tensors, Tensors> ladder_gather(const Tensors& k, const Tensors& v, const std::vector<int64_t>& plan,
                                           const std::vector<int64_t>& layer, const OptionalTensor& inv_freq,
                                           bool interleaved) {
  LadderCall call = check_ladder_gather(k, v, plan, layer, inv_freq, interleaved);
  const LadderParams& p = call.params;
  const auto fresh = [&](const Tensors& like) {
    Tensors out;
    for (const Tensor& x : like)
      out.push_back(
          empty("ladder_gather", x, std::array<int64_t, 4>{p.b, p.heads, p.moves.kept, x.size(3)}, x.scalar_type()));
    return out;
  };
  std::tuple out{fresh(k), fresh(v)};
  set_ladder_gather_targets(k, v, std::get<0>(out), std::get<1>(out), call);
  run(k[0], call);
  return out;
}

void ladder_gather_out(const Tensors& k, const Tensors& v, const std::vector<int64_t>& plan,
                       const std::vector<int64_t>& layer, const OptionalTensor& inv_freq, bool interleaved,
                       const Tensors& k_out, const Tensors& v_out) {
  LadderCall call = check_ladder_gather(k, v, plan, layer, inv_freq, interleaved);
  set_ladder_gather_targets(k, v, k_out, v_out, call);
  check_ladder_gather_memory(k, v, k_out, v_out, inv_freq);
  run(k[0], call);
}

}  // namespace

KVOPS_CUDA_IMPL(m) {
  m.impl("ladder_gather", TORCH_BOX(&ladder_gather));
  m.impl("ladder_gather.out", TORCH_BOX(&ladder_gather_out));
}

}  // namespace kvops
