// RoPE on rows in units: which two units a lane owns, how they are rotated, and by what angle.
//
// A unit is as wide as all addresses allow, usually 16 bytes. A lane owns two units of a row. In the rotated channels,
// their elements are each other's partners, so no lane needs another lane's data (NeoX: unit j and the unit half a
// rotated row after it; GPT-J: adjacent units). Channels and rows that are not rotated use the same number of lanes.
//
// The angle, a number of slots times a frequency, is computed in turns: the frequency is a 64-bit binary fraction of a
// turn, multiplied by the slots modulo 2^64. Whole turns drop out without rounding for any number of slots. This costs
// two integer multiplications, and sincospi has no range to reduce.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

// How a row is distributed over lanes. The first 2 * turning units are rotated, pair by pair.
struct RowUnits {
  int units, turning;
  bool interleaved;

  struct Two {
    int first, second;  // the last lane's second may lie past the row
  };
  __device__ int lanes() const { return (units + 1) / 2; }
  __device__ Two owned(int j) const {
    if (j >= turning) return {j + turning, j + lanes()};
    return interleaved ? Two{2 * j, 2 * j + 1} : Two{j, j + turning};
  }
};

// Calls fn(Unit{}) with the widest unit that divides all addresses and half a rotated row.
template <class T, class Fn>
inline void with_turning_unit(uint64_t bits, const Fn& fn) {
  if (bits % 16 == 0) return fn(uint4{});
  if constexpr (sizeof(T) == 2) {
    if (bits % 4) return fn(static_cast<unsigned short>(0));
  }
  fn(0u);
}

// The rotation of the pairs in two units of T. Lane j has pairs kPairs * j and following.
template <class T, class Unit>
struct Turn {
  static constexpr int kPairs = sizeof(Unit) / sizeof(T);
  float cos[kPairs], sin[kPairs];

  __device__ void apply(Unit& first, Unit& second, bool interleaved) const {
    T x[2 * kPairs];
    memcpy(x, &first, sizeof(Unit));
    memcpy(x + kPairs, &second, sizeof(Unit));
    if (interleaved)
      turn<2, 1>(x);
    else
      turn<1, kPairs>(x);
    memcpy(&first, x, sizeof(Unit));
    memcpy(&second, x + kPairs, sizeof(Unit));
  }

 private:
  // Pair i is x[i * kStep] and x[i * kStep + kPartner]. Each rounding is explicit, so that all kernels agree to the
  // bit.
  template <int kStep, int kPartner>
  __device__ void turn(T (&x)[2 * kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float a = to_float(x[i * kStep]), b = to_float(x[i * kStep + kPartner]);
      x[i * kStep] = from_float<T>(__fmaf_rn(a, cos[i], -__fmul_rn(b, sin[i])));
      x[i * kStep + kPartner] = from_float<T>(__fmaf_rn(b, cos[i], __fmul_rn(a, sin[i])));
    }
  }
};

// The rotation of keys that move a number of slots towards the front. It is reused for rows that move equally far.
template <class T, class Unit>
struct SlotTurn {
  static constexpr int kPairs = Turn<T, Unit>::kPairs;
  uint64_t per_slot[kPairs] = {};  // in 2^-64 turns
  int32_t slots = 0;
  Turn<T, Unit> turn = {};

  // inv_freq points to the first of the pairs, in radians per slot.
  __device__ void of(const float* inv_freq) {
    constexpr double kHigh = 0x1.45f306p-3, kLow = 0x1.b9391054a7f0ap-28;  // 1 / (2 pi) = kHigh + kLow, to 80 bits
    const auto fraction = [](double turns) {
      return static_cast<uint64_t>(__double2ll_rn((turns - rint(turns)) * 0x1p64));
    };
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const double frequency = inv_freq[i];
      per_slot[i] = fraction(frequency * kHigh) + fraction(frequency * kLow);  // the first product is exact
    }
  }

  __device__ void by(int32_t count) {
    if (count == slots) return;
    slots = count;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint64_t angle = per_slot[i] * static_cast<uint32_t>(count);
      float sin;
      sincospif(static_cast<float>(static_cast<int32_t>(angle >> 32)) * 0x1p-31f, &sin, &turn.cos[i]);
      turn.sin[i] = -sin;
    }
  }
};

}  // namespace
}  // namespace kvops
