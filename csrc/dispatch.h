// The dtype switch, once. check_dtype has refused every other dtype by name before a kernel sees it.
#pragma once
#include "kv_view.h"

namespace kvops {
namespace {

// fn(T{}) with T = float, Half or BFloat16.
template <class Fn>
inline void with_dtype(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::f32:
      return fn(float{});
    case DType::f16:
      return fn(Half{});
    case DType::bf16:
      return fn(BFloat16{});
  }
}

}  // namespace
}  // namespace kvops
