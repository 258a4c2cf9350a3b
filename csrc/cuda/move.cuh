// Moving rows: access widths, and lanes per row.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

constexpr int kMoveThreads = 256;
constexpr int kAhead = 4;  // accesses that a lane has in flight

// Calls fn(Unit{}) with the widest unit that divides all addresses: 16 bytes, down to one 2-byte element.
template <class Fn>
inline void with_unit(uint64_t bits, const Fn& fn) {
  if (bits % 16 == 0) return fn(uint4{});
  if (bits % 8 == 0) return fn(uint2{});
  if (bits % 4 == 0) return fn(0u);
  return fn(static_cast<unsigned short>(0));
}

// log2 of the number of lanes that share a row of `units`, at most a warp.
inline int shared_lanes_log2(int64_t units) {
  int log2 = 0;
  while (log2 < 5 && (int64_t{1} << log2) < units) ++log2;
  return log2;
}

}  // namespace
}  // namespace kvops
