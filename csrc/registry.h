// Registration of operators and kernels under torch.ops.<namespace>.
//
// torch's macros take the namespace as a name, so every file would depend on it. Here it is a constant of one object,
// namespace.cpp, and builds for other namespaces (KVOPS_NAMESPACE, docs/building.md) share all other objects.
#pragma once

#include <torch/csrc/stable/library.h>

namespace kvops {

extern const char kNamespace[];  // has its value before any constructor runs

}  // namespace kvops

// Like STABLE_TORCH_LIBRARY (kind DEF, key nullptr) and STABLE_TORCH_LIBRARY_IMPL (IMPL, a dispatch key), which are
// followed by a body with the library `m`.
#define KVOPS_REGISTER(kind, key, m) KVOPS_REGISTER_AS(kind, key, m, C10_UID)
#define KVOPS_REGISTER_AS(kind, key, m, id)                                                                        \
  static void C10_CONCATENATE(register_, id)(torch::stable::detail::StableLibrary&);                               \
  static const torch::stable::detail::StableTorchLibraryInit C10_CONCATENATE(registered_, id)(                     \
      torch::stable::detail::StableLibrary::Kind::kind, &C10_CONCATENATE(register_, id), ::kvops::kNamespace, key, \
      __FILE__, __LINE__);                                                                                         \
  void C10_CONCATENATE(register_, id)(torch::stable::detail::StableLibrary & m)
