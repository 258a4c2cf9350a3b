// The only dtype switch. check_dtype() has already rejected all other dtypes by name.
#pragma once
#include "kv_view.h"

namespace kvops {
namespace {

// Calls fn(T{}) with T = float, Half or BFloat16.
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
    case DType::i8:
      __builtin_trap();
  }
}

// The same for rows that are only read, so T may also be E4M3 or E5M2.
template <class Fn>
inline void with_read_dtype(DType dtype, const Fn& fn) {
  if (dtype == DType::e4m3) return fn(E4M3{});
  if (dtype == DType::e5m2) return fn(E5M2{});
  with_dtype(dtype, fn);
}

// The same where rows may have scales: T may also be Int8.
template <class Fn>
inline void with_scaled_dtype(DType dtype, const Fn& fn) {
  if (dtype == DType::i8) return fn(Int8{});
  with_read_dtype(dtype, fn);
}

}  // namespace
}  // namespace kvops
