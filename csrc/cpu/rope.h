// RoPE on rows, shared by the ladder and rope_at_slots. Pair i of a row is rotated by its angle,
//   x', y' = x cos - y sin, y cos + x sin,
// in fp32, rounded once. x and y are channels i and i + pairs (NeoX), or 2 i and 2 i + 1 (interleaved, GPT-J).
#pragma once
#include "rows.h"

namespace kvops::KVOPS_ISA {
namespace {

typedef double D __attribute__((vector_size(VB)));
typedef float H __attribute__((vector_size(VB / 2)));  // the same number of floats

// Splits delta * inv_freq into quarter turns in [-2, 2] and a remainder in radians. Computed in fp64, so that an angle
// of 2^31 is accurate to about 2^-22; in fp32 it would be off by many turns.
inline void reduce_angle(H inv_freq, double delta, H& quarters, H& rest) {
  constexpr double kTurn = 6.283185307179586, kRound = 0x1.8p52;  // adding and subtracting kRound rounds to integers
  const D turns = __builtin_convertvector(inv_freq, D) * (delta / kTurn);
  const D part = turns - ((turns + kRound) - kRound);
  const D nearest = (part * 4.0 + kRound) - kRound;
  quarters = __builtin_convertvector(nearest, H);
  rest = __builtin_convertvector((part - nearest * 0.25) * kTurn, H);
}

// Cosines and sines of delta * inv_freq[i], accurate to about one ulp; the arrays are padded to whole vectors. They
// depend on delta alone, so the result is the same however the key got to its slot.
inline void angles(const float* inv_freq, int64_t pairs, double delta, float* cos, float* sin) {
  for (int64_t i = 0; i < pairs; i += VL) {
    const F f = pairs - i >= VL ? load(inv_freq + i) : load_first(inv_freq + i, pairs - i, 0);
    H half[2], quarters[2], rests[2];
    memcpy(half, &f, VB);
    for (int j = 0; j < 2; ++j) reduce_angle(half[j], delta, quarters[j], rests[j]);
    F q, x;
    memcpy(&q, quarters, VB);
    memcpy(&x, rests, VB);
    const F z = x * x;  // Taylor series, |x| <= pi / 4
    const F s = x + x * z * (-1.0f / 6 + z * (1.0f / 120 + z * (-1.0f / 5040 + z * (1.0f / 362880))));
    const F c = 1.0f + z * (-0.5f + z * (1.0f / 24 + z * (-1.0f / 720 + z * (1.0f / 40320 + z * (-1.0f / 3628800)))));
    const F half_turn = q == 0.0f ? splat(1.0f) : splat(-1.0f);
    store(cos + i, q * q == 1.0f ? -q * s : half_turn * c);
    store(sin + i, q * q == 1.0f ? q * c : half_turn * s);
  }
}

// x * y + z, rounded once if the CPU has FMA. Left to itself, the compiler would fuse neither or one of the two
// products of a sum, differently in each kernel; all kernels must agree to the bit.
inline F fused(F x, F y, F z) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, y, z);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(x, y, z);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
  return x * y + z;
#endif
}

inline void turn(F& x, F& y, F cos, F sin) {
  const F turned = fused(x, cos, -(y * sin));
  y = fused(y, cos, x * sin);
  x = turned;
}

// How a register is stored: at any address, or with a streaming store at an aligned one.
struct PutRegister {
  void operator()(char* to, U x) const { memcpy(to, &x, VB); }
};
struct StreamRegister {
  void operator()(char* to, U x) const { KVOPS_STREAM(to, x); }
};

// Rotates kStep<T> pairs: first channels from x on, second channels from y on.
template <class T, class Put>
inline void turn_halves(char* to_x, char* to_y, const char* x, const char* y, const float* cos, const float* sin,
                        const Put put) {
  F a[kVecs<T>], b[kVecs<T>], c[kVecs<T>], s[kVecs<T>];
  load(reinterpret_cast<const T*>(x), a);
  load(reinterpret_cast<const T*>(y), b);
  for (int i = 0; i < kVecs<T>; ++i) c[i] = load(cos + i * VL), s[i] = load(sin + i * VL);
  if constexpr (!kInOrder<T>) {
    const F even_c = evens(c[0], c[1]), even_s = evens(s[0], s[1]);
    c[1] = odds(c[0], c[1]), s[1] = odds(s[0], s[1]);
    c[0] = even_c, s[0] = even_s;
  }
  for (int i = 0; i < kVecs<T>; ++i) turn(a[i], b[i], c[i], s[i]);
  put(to_x, narrow(a, static_cast<const T*>(nullptr)));
  put(to_y, narrow(b, static_cast<const T*>(nullptr)));
}

// Rotates VL pairs of adjacent channels.
template <class T, class Put>
inline void turn_neighbours(char* to, const char* from, const float* cos, const float* sin, const Put put) {
  constexpr int registers = sizeof(T) / 2;
  F a[2];
  for (int i = 0; i < registers; ++i) load(reinterpret_cast<const T*>(from + i * VB), a + i);
  if constexpr (kInOrder<T>) {
    F x = evens(a[0], a[1]), y = odds(a[0], a[1]);
    turn(x, y, load(cos), load(sin));
    a[0] = zip_low(x, y), a[1] = zip_high(x, y);
  } else {
    turn(a[0], a[1], load(cos), load(sin));
  }
  for (int i = 0; i < registers; ++i) put(to + i * VB, narrow(a + i, static_cast<const T*>(nullptr)));
}

// Copies a few bytes, usually a multiple of 16.
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  char* const out = static_cast<char*>(to);
  const char* const in = static_cast<const char*>(from);
  int64_t i = 0;
  for (; i + 16 <= bytes; i += 16) memcpy(out + i, in + i, 16);
  if (i < bytes) memcpy(out + i, in + i, bytes - i);
}

// Rotates a row of `bytes`; `to` may equal `from`. What does not fill a register goes through a buffer.
template <class T, class Put>
inline void rotate_row(char* to, const char* from, int64_t bytes, const float* cos, const float* sin, int64_t pairs,
                       bool interleaved, const Put put) {
  constexpr int64_t item = sizeof(T), step = kStep<T>;
  int64_t i = 0;
  if (interleaved) {
    for (; i + VL <= pairs; i += VL) turn_neighbours<T>(to + 2 * i * item, from + 2 * i * item, cos + i, sin + i, put);
    if (const int64_t left = pairs % VL) {
      char x[2 * VL * item] = {};
      float c[VL] = {}, s[VL] = {};
      copy_bytes(x, from + 2 * i * item, 2 * left * item);
      copy_bytes(c, cos + i, 4 * left);
      copy_bytes(s, sin + i, 4 * left);
      turn_neighbours<T>(x, x, c, s, PutRegister{});
      copy_bytes(to + 2 * i * item, x, 2 * left * item);
    }
  } else {
    const int64_t half = pairs * item;
    for (; i + step <= pairs; i += step)
      turn_halves<T>(to + i * item, to + half + i * item, from + i * item, from + half + i * item, cos + i, sin + i,
                     put);
    if (const int64_t left = pairs % step) {
      char x[VB] = {}, y[VB] = {};
      float c[step] = {}, s[step] = {};
      copy_bytes(x, from + i * item, left * item);
      copy_bytes(y, from + half + i * item, left * item);
      copy_bytes(c, cos + i, 4 * left);
      copy_bytes(s, sin + i, 4 * left);
      turn_halves<T>(x, y, x, y, c, s, PutRegister{});
      copy_bytes(to + i * item, x, left * item);
      copy_bytes(to + half + i * item, y, left * item);
    }
  }
  const int64_t rotated = 2 * pairs * item;
  if (to != from) copy_bytes(to + rotated, from + rotated, bytes - rotated);
}

// Whether a rotated row of x can be written with streaming stores, register by register.
template <class T>
inline bool streamable_turned(const KVView& x, int64_t pairs) {
  return streamable(x) && pairs * static_cast<int64_t>(sizeof(T)) % VB == 0;
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
