// Conversions between at::Tensor and the tensors of kvops.h, without a copy. They use torch's C++ ABI, so a program that
// includes this header runs with the torch that it was compiled with.
#pragma once
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include "kvops.h"

#pragma GCC visibility push(hidden)
namespace kvops {

inline Tensor from_aten(at::Tensor x) {
  return Tensor(torch::aot_inductor::new_tensor_handle(std::move(x)));
}

inline at::Tensor to_aten(const Tensor& x) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(x.get());
}

}  // namespace kvops
#pragma GCC visibility pop
