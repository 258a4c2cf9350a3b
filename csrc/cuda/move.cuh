// Moving rows: widths of accesses, lanes, column slices.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

constexpr int kMoveThreads = 256;
constexpr int kAhead = 4;    // accesses that a lane has in flight
constexpr int kSector = 32;  // bytes that memory fetches at once

// fn(Unit{}), the widest unit that divides all addresses: 16 bytes, or down to one element of 2.
template <class Fn>
inline void with_unit(uint64_t bits, const Fn& fn) {
  if (bits % 16 == 0) return fn(uint4{});
  if (bits % 8 == 0) return fn(uint2{});
  if (bits % 4 == 0) return fn(0u);
  return fn(static_cast<unsigned short>(0));
}

// log2 of the lanes that share a row of `units`, at most a warp.
inline int shared_lanes_log2(int64_t units) {
  int log2 = 0;
  while (log2 < 5 && (int64_t{1} << log2) < units) ++log2;
  return log2;
}

// How a row is cut into column slices of 2^lanes_log2 lanes, for kernels whose chains of rows cannot be cut themselves.
struct Slices {
  int lanes_log2;
  int64_t count;
};

// For rows of so many lanes: slices get narrower, down to a sector, until there are two blocks for each multiprocessor.
inline Slices column_slices(int64_t lanes, size_t unit_bytes, int64_t chains) {
  int lanes_log2 = shared_lanes_log2(lanes);
  const auto count = [&] { return (lanes + (int64_t{1} << lanes_log2) - 1) >> lanes_log2; };
  while (chains * count() < 2 * multiprocessors() && (unit_bytes << lanes_log2) > kSector) --lanes_log2;
  return {lanes_log2, count()};
}

}  // namespace
}  // namespace kvops
