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
    case DType::e4m3:
    case DType::e5m2:
      __builtin_trap();
  }
}

// The same for rows that are only read: E4M3 and E5M2 too.
template <class Fn>
inline void with_read_dtype(DType dtype, const Fn& fn) {
  if (dtype == DType::e4m3) return fn(E4M3{});
  if (dtype == DType::e5m2) return fn(E5M2{});
  with_dtype(dtype, fn);
}

}  // namespace
}  // namespace kvops
