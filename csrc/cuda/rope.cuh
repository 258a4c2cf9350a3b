// Rotary position embedding of rows in units: which two units a lane owns, how they turn, and by what angle.
//
// A unit is as many bytes as all addresses allow, 16 as a rule. A lane owns two of a row: in the rotated channels those
// whose elements are each other's partners, so that no lane needs another's (NeoX: unit j and the one half a rotated
// row further; GPT-J: neighbours). The channels that do not turn, and rows that do not, take the same number of lanes.
//
// An angle of some slots times a frequency is reckoned in turns: the frequency as a 64-bit binary fraction of a turn,
// times the slots, modulo 2^64. So whole turns drop out without rounding, whatever the number of slots, at the cost of
// two integer multiplications, and sincospi has no range to reduce.
#pragma once
#include "vec.cuh"

namespace kvops {
namespace {

// How a row is dealt out to lanes. The first 2 * turning units turn, pair by pair.
struct RowUnits {
  int units, turning;
  bool interleaved;

  struct Two {
    int first, second;  // the last lane's second may lie behind the row
  };
  __device__ int lanes() const { return (units + 1) / 2; }
  __device__ Two owned(int j) const {
    if (j >= turning) return {j + turning, j + lanes()};
    return interleaved ? Two{2 * j, 2 * j + 1} : Two{j, j + turning};
  }
};

// fn(Unit{}), the widest of a few units that divides all addresses and half a rotated row.
template <class T, class Fn>
inline void with_turning_unit(uint64_t bits, const Fn& fn) {
  if (bits % 16 == 0) return fn(uint4{});
  if constexpr (sizeof(T) == 2) {
    if (bits % 4) return fn(static_cast<unsigned short>(0));
  }
  fn(0u);
}

// What turns the pairs of two units of T: lane j's are pairs kPairs * j and the following.
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
  // Pair i is x[i * kStep] and x[i * kStep + kPartner]. Roundings are spelled out: all kernels agree to the bit.
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

// The turn of keys that move some slots towards the front. It is kept for rows that move as far.
template <class T, class Unit>
struct SlotTurn {
  static constexpr int kPairs = Turn<T, Unit>::kPairs;
  uint64_t per_slot[kPairs] = {};  // in 2^-64 turns
  int32_t slots = 0;
  Turn<T, Unit> turn = {};

  // inv_freq: of the first of the pairs, radians per slot.
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
