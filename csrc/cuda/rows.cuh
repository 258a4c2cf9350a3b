// Rows of keys in registers: how lanes hold them, their dot products, and which squared norms are safe in fp32.
#pragma once
#include "reduce.cuh"

namespace kvops {
namespace {

// A lane's part of one row, as loaded: pieces lane, lane + kLanes, ...
template <class T, class Lanes>
struct RowPieces {
  static constexpr int kPieces = Lanes::kPieces, kValues = kPieces * kPiece<T>;
  uint4 raw[kPieces];

  // Loads a row of `pieces` pieces; anything past them is 0.
  template <bool kWide>
  __device__ void load(const char* row, int pieces) {
    const int lane = threadIdx.x % Lanes::kLanes;
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      raw[j] = lane + j * Lanes::kLanes < pieces
                   ? load_piece<T, kWide>(row + kPieceBytes<T> * (lane + j * Lanes::kLanes))
                   : uint4{};
  }

  __device__ void values(float (&x)[kValues]) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      float piece[kPiece<T>];
      unpack<T>(raw[j], piece);
#pragma unroll
      for (int i = 0; i < kPiece<T>; ++i) x[j * kPiece<T> + i] = piece[i];
    }
  }
};

// The channel of a lane's i-th value.
template <class T, class Lanes>
__device__ inline int channel_of(int i) {
  return (threadIdx.x % Lanes::kLanes + i / kPiece<T> * Lanes::kLanes) * kPiece<T> + i % kPiece<T>;
}

// The dot product over a lane's own values, in F.
template <class F, int N>
__device__ inline F lane_dot(const float (&x)[N], const float (&y)[N]) {
  F sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += static_cast<F>(x[i]) * y[i];
  return sum;
}

// The dot product over all lanes of a row.
template <class F, class Lanes, int N>
__device__ inline F dot(const float (&x)[N], const float (&y)[N]) {
  return lanes_sum<Lanes::kLanes>(lane_dot<F>(x, y));
}

// Whether a squared norm is safe in fp32.
__device__ inline bool comfortable(float squares) {
  return 0x1p-90f < squares && squares < 0x1p90f;
}

}  // namespace
}  // namespace kvops
