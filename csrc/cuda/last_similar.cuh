// The search of key_similarity for the last similar key, from the view of one lane: what the portable kernel and
// Hopper's share.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

using Spared = unsigned long long;  // in units of 2^-32

constexpr int kPackedRows = 128;  // a multiple of the rows of all panels, portable and Hopper's

// A key, and the last other one whose cosine with it is above the threshold, as far as this lane has met one. The
// arguments are products of the two keys times the other one's inverse norm. Rounding keeps their order, so that the
// largest product decides whether there is a similar key among several.
struct LastSimilar {
  float inverse;  // of the key's norm; 0 or NaN: without a direction, nothing is similar to it
  int last = -1;
  float cosine = 0.0f;

  __device__ bool searches() const { return inverse > 0.0f && last < 0; }
  __device__ bool may_be(float largest, float threshold) const { return last < 0 && largest * inverse > threshold; }
  __device__ void meet(float product, int other, int itself, float threshold) {
    const float with = product * inverse;
    if (with > threshold && other > last && other != itself) {
      last = other;
      cosine = with;
    }
  }
};

// Adds up what the keys of a warp spare. Four neighbouring lanes have the same `keys`, and each has met other rows.
template <int kKeys>
__device__ inline void spare_last(LastSimilar (&keys)[kKeys], Spared* spared) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    LastSimilar& x = keys[i];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const int its = __shfl_xor_sync(kWarp, x.last, step);
      const float with = __shfl_xor_sync(kWarp, x.cosine, step);
      if (its > x.last) {
        x.last = its;
        x.cosine = with;
      }
    }
    if (threadIdx.x % 4 == i && x.last >= 0) atomicAdd(&spared[x.last], static_cast<Spared>(x.cosine * 0x1p32f));
  }
}

}  // namespace
}  // namespace kvops
