// Hash bits of chosen keys on the CPU: the signs of their random Fourier features.
//
//   bucket = sum over q < r of 2^(r - 1 - q) * [cos(W_q . k_j + b_q) > 0]
//
// Bytes that must move: the chosen rows. Products are summed in fp64, where another order of summation changes a
// feature by 1e-16 of its size, so every device finds the same buckets. The projection is widened once, in register
// order.
#include "../dispatch.h"
#include "../ops/lsh_bucket.h"
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

// Widens a key to fp64, in register order; returns false if it is not finite.
template <class T>
bool widen_key(const T* row, RowShape shape, double* out) {
  F poison{};
  for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
    F x[kVecs<T>];
    load_row(row, x);
    for (int j = 0; j < kVecs<T>; ++j) {
      poison += x[j] * 0.0f;
      const Doubles wide = to_double(x[j]);
      memcpy(out + (c * kVecs<T> + j) * VL, &wide, 2 * VB);
    }
  });
  return !any_nan(poison);
}

double dot(const double* x, const double* y, int64_t width) {
  constexpr int kLanes = VL / 2;
  D sums[2] = {};
  for (int64_t i = 0; i < width; i += VL)
    for (int j = 0; j < 2; ++j) {
      D a, b;
      memcpy(&a, x + i + j * kLanes, VB);
      memcpy(&b, y + i + j * kLanes, VB);
      sums[j] += a * b;
    }
  return sum(sums[0] + sums[1]);
}

template <class T>
void hash_keys(const LshBucketParams& p, Call& call) {
  const RowShape shape = row_shape<T>(p.k.row_bytes);
  const int64_t width = shape.registers() * kStep<T>;
  // In fp64: the projection (shared), and one key per worker.
  const int64_t bytes = p.b * p.heads * p.indices.m * p.k.row_bytes * p.r;
  const Workers workers = workers_for(call, bytes, 2 * width, 2 * p.r * width);
  double* const projection = reinterpret_cast<double*>(workers.workspace);  // [r, width]
  for (int64_t i = 0; i < p.r * width; ++i) projection[i] = 0;
  for (int64_t q = 0; q < p.r; ++q)
    for (int64_t c = 0; c < p.d; ++c) projection[q * width + channel_slot<T>(c)] = p.projection[q * p.d + c];
  const int64_t m = p.indices.m;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    double* const key = projection + (p.r + worker) * width;
    const Share items = share(p.b * p.heads * m, worker, workers.count);
    for (int64_t item = items.first; item < items.last; ++item) {
      const int64_t b = item / m / p.heads, h = item / m % p.heads;
      const int64_t i = p.indices.data[b * p.indices.stride_b + h * p.indices.stride_h + item % m * p.indices.stride_m];
      p.buckets[item] = -1;
      if (i < 0 || !widen_key(reinterpret_cast<const T*>(p.k.head(b, h).row(i)), shape, key)) continue;
      int32_t bucket = 0;
      for (int64_t q = 0; q < p.r; ++q)
        bucket = 2 * bucket + cosine_is_positive(dot(projection + q * width, key, width) + p.phase[q]);
      p.buckets[item] = bucket;
    }
  });
}

}  // namespace

void lsh_bucket(const LshBucketParams& p, Call& call) {
  with_read_dtype(p.dtype, [&](auto type) { hash_keys<decltype(type)>(p, call); });
}

}  // namespace kvops::KVOPS_ISA
