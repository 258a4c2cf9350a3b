// The best prototype of a key: code that the assign_prototypes kernels share.
#pragma once
#include "../ops/assign_prototypes.h"
#include "vec.cuh"

namespace kvops {
namespace {

// Whether a product has lost nothing to the range of fp32 or of 16-bit numbers.
__device__ inline bool comfortable_product(float x) {
  return 0x1p-100f < x && x < 0x1p120f;
}

// The best prototype so far, and its product.
struct Best {
  float product;
  int prototype;

  __device__ static Best none() { return {0.0f, -1}; }
  // For ascending indices.
  __device__ void meet(float x, int c) {
    if (x > product) {
      product = x;
      prototype = c;
    }
  }
  // For indices in any order.
  __device__ void meet(const Best& x) {
    if (x.product > product || (x.product == product && x.prototype < prototype)) *this = x;
  }
};

// Exact assignment by one warp: each lane compares every 32nd prototype.
template <class T>
__device__ inline int assign_exactly(const T* key, const float* prototypes, int count, int d) {
  bool finite = true;
  for (int i = threadIdx.x % 32; i < d; i += 32) finite = finite && is_finite(to_float(key[i]));
  if (!__all_sync(kWarp, finite)) return -1;
  double best = -CUDART_INF;
  int prototype = count;  // none
  for (int c = threadIdx.x % 32; c < count; c += 32) {
    double product = 0, squares = 0;
    for (int i = 0; i < d; ++i) {
      const double x = prototypes[static_cast<int64_t>(c) * d + i];
      product += x * to_float(key[i]);
      squares += x * x;
    }
    const double cosine = product / sqrt(squares);
    if (0 < squares && squares < CUDART_INF && cosine > best) {
      best = cosine;
      prototype = c;
    }
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const double other = __shfl_xor_sync(kWarp, best, step);
    const int its = __shfl_xor_sync(kWarp, prototype, step);
    if (other > best || (other == best && its < prototype)) {
      best = other;
      prototype = its;
    }
  }
  return prototype < count ? prototype : -1;
}

// Writes the prototype of a key to its slot in `assignment`, by a warp: `best` of the lane whose `mine` is set, or -1
// for slots that are not valid. A key whose best product is not in the safe range is redone.
template <class T, bool kPaged>
__device__ inline void finish_assignment(const AssignPrototypesParams& p, int64_t head, int64_t slot, bool mine,
                                         bool valid, const Best& best) {
  int* const assignment = p.assignment + head * p.n;
  if (mine) assignment[slot] = valid ? best.prototype : -1;
  unsigned strange = __ballot_sync(kWarp, mine && valid && !comfortable_product(best.product));
  while (strange) {
    const unsigned of = __ffs(static_cast<int>(strange)) - 1;
    const int64_t its_slot = __shfl_sync(kWarp, slot, static_cast<int>(of));
    const T* const key =
        reinterpret_cast<const T*>(head_rows<kPaged, T>(p.k, head / p.heads, head % p.heads).row(its_slot));
    const int exact =
        assign_exactly(key, p.prototypes + head * p.count * p.d, static_cast<int>(p.count), static_cast<int>(p.d));
    if (threadIdx.x % 32 == of) assignment[its_slot] = exact;
    strange &= strange - 1;
  }
}

}  // namespace
}  // namespace kvops
