// The checks of operators that take several layers in one call.
#pragma once
#include "../overlap.h"

namespace kvops {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<int64_t>;

// Adds `tensors` under this name, numbered if there are several.
inline void add_named(std::vector<Named>& to, const char* name, const Tensors& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::string numbered = name;
    if (tensors.size() > 1) numbered.append("[").append(std::to_string(i)).append("]");
    to.push_back({numbered, tensors[i]});
  }
}

// K and V of one or more layers, with the same shape, dtype and device. check_type: as for check_kv_pair().
template <class CheckType>
std::vector<KVPair> check_layers(const char* op, const Tensors& k, const Tensors& v, const OptionalTensor& block_table,
                                 const CheckType& check_type, bool written) {
  KVOPS_CHECK(!k.empty(), op, ": k must hold at least one layer, got none");
  KVOPS_CHECK(k.size() == v.size(), op, ": k and v must have one tensor per layer, got ", k.size(), " and ", v.size());
  std::vector<KVPair> layers;
  for (size_t i = 0; i < k.size(); ++i) {
    check_same_device(op, "k", k[i], k[0]);
    layers.push_back(check_kv_pair(op, k[i], v[i], block_table, check_type, written));
    KVOPS_CHECK(dtype_of(k[i]) == dtype_of(k[0]), op, ": all layers must have one dtype, expected ",
                dtype_name(dtype_of(k[0])), ", got ", dtype_name(dtype_of(k[i])), " in layer ", i);
    for (int dim = 0; dim < 4; ++dim)
      KVOPS_CHECK(k[i].size(dim) == k[0].size(dim) && v[i].size(dim) == v[0].size(dim), op,
                  ": all layers must have one shape, expected k ", shape(k[0]), " and v ", shape(v[0]), ", got ",
                  shape(k[i]), " and ", shape(v[i]), " in layer ", i);
  }
  return layers;
}

}  // namespace kvops
