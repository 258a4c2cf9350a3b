// One vector of floats, as wide as the level's registers, built on compiler vector types; intrinsics provide the few
// operations that those lack. Only kernel bodies include this. Everything is in an unnamed namespace of the level, so
// that code compiled for one instruction set cannot be linked into another.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../call.h"
#include "../kv_view.h"

namespace kvops::KVOPS_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int VB = 64;  // bytes in a vector
#elif defined(__AVX2__)
constexpr int VB = 32;
#else
constexpr int VB = 16;
#endif
constexpr int VL = VB / 4;  // floats in a vector

typedef float F __attribute__((vector_size(VB)));
typedef int32_t I __attribute__((vector_size(VB)));
typedef uint32_t U __attribute__((vector_size(VB)));

#if defined(__clang__)
#define KVOPS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVOPS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif

// The same vector size in doubles: half as many.
typedef double D __attribute__((vector_size(VB)));
typedef float HalfF __attribute__((vector_size(VB / 2)));
struct Doubles {
  D low, high;
};
inline Doubles to_double(F x) {
  HalfF half[2];
  memcpy(half, &x, VB);
  return {__builtin_convertvector(half[0], D), __builtin_convertvector(half[1], D)};
}

inline F splat(float x) {
  return x - F{};
}

inline F load(const float* p) {
  F x;
  memcpy(&x, p, VB);
  return x;
}
inline void store(float* p, F x) {
  memcpy(p, &x, VB);
}
inline void store_first(float* p, F x, int64_t count) {
  if (count == VL) return store(p, x);  // usual, and a copy of unknown size is slow
  memcpy(p, &x, 4 * count);
}
inline F load_first(const float* p, int64_t count, float rest) {
  F x = splat(rest);
  memcpy(&x, p, 4 * count);
  return x;
}

#if defined(__AVX512F__)
inline F min(F a, F b) {
  return _mm512_min_ps(a, b);
}
inline F max(F a, F b) {
  return _mm512_max_ps(a, b);
}
inline F sqrt(F a) {
  return _mm512_sqrt_ps(a);
}
inline bool any_nan(F a) {
  return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0;
}
#elif defined(__AVX2__)
inline F min(F a, F b) {
  return _mm256_min_ps(a, b);
}
inline F max(F a, F b) {
  return _mm256_max_ps(a, b);
}
inline F sqrt(F a) {
  return _mm256_sqrt_ps(a);
}
inline bool any_nan(F a) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0;
}
#elif defined(__x86_64__)
inline F min(F a, F b) {
  return _mm_min_ps(a, b);
}
inline F max(F a, F b) {
  return _mm_max_ps(a, b);
}
inline F sqrt(F a) {
  return _mm_sqrt_ps(a);
}
inline bool any_nan(F a) {
  return _mm_movemask_ps(_mm_cmpunord_ps(a, a)) != 0;
}
#elif defined(__aarch64__)
inline F min(F a, F b) {
  return (F)vminq_f32((float32x4_t)a, (float32x4_t)b);
}
inline F max(F a, F b) {
  return (F)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
}
inline F sqrt(F a) {
  return (F)vsqrtq_f32((float32x4_t)a);
}
inline bool any_nan(F a) {
  return vminvq_u32((uint32x4_t)(a == a)) == 0;
}
#else
inline F min(F a, F b) {
  return a < b ? a : b;
}
inline F max(F a, F b) {
  return a > b ? a : b;
}
inline F sqrt(F a) {
  for (int i = 0; i < VL; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
inline bool any_nan(F a) {
  bool nan = false;
  for (int i = 0; i < VL; ++i) nan |= a[i] != a[i];
  return nan;
}
#endif

inline bool is_finite(float x) {
  return x - x == 0.0f;
}

// Unsigned keys of the same order: -0.0 equals 0.0, NaN is lowest. Works on bits, because arithmetic on subnormal
// numbers is not exact in a thread that flushes them.
inline U order_key(F x) {
  const I all = (I)x, bits = all == INT32_MIN ? I{} : all;  // -0.0 becomes 0.0
  const U key = (U)(bits ^ ((bits >> 31) | (int32_t)0x80000000));
  return x == x ? key : U{};
}

// Lane i of the result is op (for example +) over the lanes of rows[i], for VL rows: a transposition by halves that
// reduces as it goes.
template <class Op>
inline F reduce_lanes(F* rows, const Op& op) {
#if defined(__AVX512F__)
  for (int i = 0; i < 8; ++i)
    rows[i] =
        op(KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
           KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
  for (int i = 0; i < 4; ++i)
    rows[i] =
        op(KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
           KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  for (int i = 0; i < 2; ++i)
    rows[i] =
        op(KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  return op(KVOPS_SHUFFLE(rows[0], rows[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
            KVOPS_SHUFFLE(rows[0], rows[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
#elif defined(__AVX2__)
  for (int i = 0; i < 4; ++i)
    rows[i] = op(KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13),
                 KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15));
  for (int i = 0; i < 2; ++i)
    rows[i] = op(KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13),
                 KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15));
  return op(KVOPS_SHUFFLE(rows[0], rows[1], 0, 1, 2, 3, 8, 9, 10, 11),
            KVOPS_SHUFFLE(rows[0], rows[1], 4, 5, 6, 7, 12, 13, 14, 15));
#else
  for (int i = 0; i < 2; ++i)
    rows[i] = op(KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 0, 4, 1, 5),
                 KVOPS_SHUFFLE(rows[2 * i], rows[2 * i + 1], 2, 6, 3, 7));
  return op(KVOPS_SHUFFLE(rows[0], rows[1], 0, 1, 4, 5), KVOPS_SHUFFLE(rows[0], rows[1], 2, 3, 6, 7));
#endif
}
// KVOPS_LANES: the even (first = 0) or odd lanes of a, then those of b. KVOPS_ZIP: lanes of a and b alternating, from
// `first` on.
#if defined(__AVX512F__)
#define KVOPS_ZIP(first)                                                                                         \
  first, first + 16, first + 1, first + 17, first + 2, first + 18, first + 3, first + 19, first + 4, first + 20, \
      first + 5, first + 21, first + 6, first + 22, first + 7, first + 23
#define KVOPS_LANES(first)                                                                                       \
  first, first + 2, first + 4, first + 6, first + 8, first + 10, first + 12, first + 14, first + 16, first + 18, \
      first + 20, first + 22, first + 24, first + 26, first + 28, first + 30
#elif defined(__AVX2__)
#define KVOPS_ZIP(first) first, first + 8, first + 1, first + 9, first + 2, first + 10, first + 3, first + 11
#define KVOPS_LANES(first) first, first + 2, first + 4, first + 6, first + 8, first + 10, first + 12, first + 14
#else
#define KVOPS_ZIP(first) first, first + 4, first + 1, first + 5
#define KVOPS_LANES(first) first, first + 2, first + 4, first + 6
#endif
inline F evens(F a, F b) {
  return KVOPS_SHUFFLE(a, b, KVOPS_LANES(0));
}
inline F odds(F a, F b) {
  return KVOPS_SHUFFLE(a, b, KVOPS_LANES(1));
}

// Restores the order from evens and odds.
inline F zip_low(F a, F b) {
  return KVOPS_SHUFFLE(a, b, KVOPS_ZIP(0));
}
inline F zip_high(F a, F b) {
  return KVOPS_SHUFFLE(a, b, KVOPS_ZIP(VL / 2));
}

inline F sum_lanes(F* rows) {
  return reduce_lanes(rows, [](F a, F b) { return a + b; });
}

inline float sum(F x) {
  float total = 0;
  for (int i = 0; i < VL; ++i) total += x[i];
  return total;
}

inline double sum(D x) {
  double total = 0;
  for (int i = 0; i < VL / 2; ++i) total += x[i];
  return total;
}

// e^x to about 2 ulp; 0 below -87. (Cody-Waite reduction, then a polynomial on [-ln2/2, ln2/2].)
inline F exp(F x) {
  const F clamped = max(min(x, splat(88.0f)), splat(-87.0f));
  const F shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: puts the nearest integer into the low bits
  const F n = shifted - 12582912.0f;
  const F r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const F scaled = (F)((I)p + ((I)shifted << 23));
  return x < -87.0f ? F{} : scaled;
}

// The natural logarithm of a positive normal number, accurate to fp64: 2 artanh((m - 1) / (m + 1)) + e ln 2.
inline double log(double x) {
  int64_t bits;
  memcpy(&bits, &x, 8);
  const int64_t e = (bits - 0x3fe6a09e667f3bcd) >> 52;  // the mantissa m lies in [sqrt(1/2), sqrt(2))
  bits -= e << 52;
  double m;
  memcpy(&m, &bits, 8);
  const double z = (m - 1) / (m + 1);
  double series = 0, power = z;
  for (int i = 1; i <= 21; i += 2, power *= z * z) series += power / i;
  return 2 * series + static_cast<double>(e) * 0.6931471805599453;
}

// tanh x to a few ulp; NaN propagates. (A polynomial near 0, elsewhere via e^2|x|.)
inline F tanh(F x) {
  const F magnitude = x < 0.0f ? -x : x;
  const F z = x * x;
  F p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const F near = p * z * x + x;
  const F far = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  const F y = magnitude < 0.625f ? near : x < 0.0f ? -far : far;
  return x == x ? y : x;
}

// One register of stored elements, widened to kVecs<T> vectors of floats. For 2-byte types without a fast conversion,
// the even elements go to the first vector and the odd ones to the second. Statistics over channels do not depend on
// the order; `channel_slot` gives the position of a channel. fp8 fills half a register and is placed like the same
// channels of bf16, so sums have the same order and results equal bf16's to the last bit. So does int8, in order.
template <class T>
constexpr int kVecs = sizeof(T) == 4 ? 1 : 2;
template <class T>
constexpr int kStep = kVecs<T> * VL;  // elements in a register

inline void widen(U raw, F* out, const float*) {
  out[0] = (F)raw;
}
inline void widen(U raw, F* out, const BFloat16*) {
  out[0] = (F)(raw << 16);
  out[1] = (F)(raw & 0xffff0000u);
}
#if defined(__AVX512F__)
constexpr bool kHalfInOrder = true;
inline void widen(U raw, F* out, const Half*) {
  const __m512i x = (__m512i)raw;
  out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
  out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
}
#elif defined(__F16C__)
constexpr bool kHalfInOrder = true;
inline void widen(U raw, F* out, const Half*) {
  const __m256i x = (__m256i)raw;
  out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
  out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
}
#elif defined(__aarch64__)
constexpr bool kHalfInOrder = true;
inline void widen(U raw, F* out, const Half*) {
  const float16x8_t x = (float16x8_t)raw;
  out[0] = (F)vcvt_f32_f16(vget_low_f16(x));
  out[1] = (F)vcvt_f32_f16(vget_high_f16(x));
}
#else
constexpr bool kHalfInOrder = false;
inline F half_to_float(U h) {  // the half in the low 16 bits
  const U magnitude = (h & 0x7fffu) << 13;
  const F value = (F)magnitude * 0x1p112f;  // rebias the exponent; also correct for subnormals
  const U special = (U)((I)magnitude >= (0x7c00 << 13));
  return (F)(((U)value & ~special) | (((magnitude | 0x7f800000u)) & special) | ((h & 0x8000u) << 16));
}
inline void widen(U raw, F* out, const Half*) {
  out[0] = half_to_float(raw & 0xffffu);
  out[1] = half_to_float(raw >> 16);
}
#endif

// Whether `widen` and `narrow` keep the order of the channels.
template <class T>
constexpr bool kInOrder = sizeof(T) == 4 || (kHalfInOrder && __is_same(T, Half)) || __is_same(T, Int8);

// fp8 formats: mantissa bits, exponent bias, and the smallest magnitude that is not a finite number.
template <class T>
struct Fp8;
template <>
struct Fp8<E4M3> {
  static constexpr int kMantissa = 3, kBias = 7, kSpecial = 0x7f;  // NaN
};
template <>
struct Fp8<E5M2> {
  static constexpr int kMantissa = 2, kBias = 15, kSpecial = 0x7c;  // infinity, then NaN
};

// fp8 in the low 8 bits. Avoids subnormal floats, which a thread may flush to zero.
template <class T>
inline F fp8_to_float(U x) {
  constexpr int kUp = 23 - Fp8<T>::kMantissa;
  constexpr float kNormal = Fp8<T>::kBias == 7 ? 0x1p-6f : 0x1p-14f;  // the smallest
  const U magnitude = x & 0x7fu;
  const F normal = (F)((magnitude << kUp) + ((127u - Fp8<T>::kBias) << 23));
  // Exponent 0 means the same exponent as 1, but without the leading bit.
  const F value = (I)magnitude < (1 << Fp8<T>::kMantissa) ? normal + (normal - kNormal) : normal;
  const U bits = (I)magnitude < Fp8<T>::kSpecial ? (U)value : (magnitude << kUp) | 0x7f800000u;
  return (F)(bits | (x & 0x80u) << 24);
}

inline float to_float(float x) {
  return x;
}
inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
inline float to_float(Half x) {
  F out[2];
  widen(U{x.bits}, out, static_cast<const Half*>(nullptr));
  return out[0][0];
}
inline float to_float(E4M3 x) {
  return fp8_to_float<E4M3>(U{x.bits})[0];
}
inline float to_float(E5M2 x) {
  return fp8_to_float<E5M2>(U{x.bits})[0];
}

// The nearest value of the type; ties to even.
inline void from_float(float x, float* out) {
  *out = x;
}
inline void from_float(float x, BFloat16* out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  out->bits = static_cast<uint16_t>(x == x ? (bits + 0x7fffu + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40u);
}
inline void from_float(float x, Half* out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) {
    bits = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // rounds to above 65504
    bits = 0x7c00u;
  } else if (bits < 0x38800000u) {  // subnormal: the low bits of the sum count multiples of 2^-24
    float sum;
    memcpy(&sum, &bits, 4);
    sum += 0.5f;
    memcpy(&bits, &sum, 4);
    bits -= 0x3f000000u;
  } else {
    bits = (bits + 0xc8000fffu + (bits >> 13 & 1)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | bits);
}

// The inverse of `widen`: the nearest values of the type, ties to even.
inline U narrow(const F* x, const float*) {
  return (U)x[0];
}
inline U narrow(const F* x, const BFloat16*) {
  U bits[2];
  for (int i = 0; i < 2; ++i) {
    const U raw = (U)x[i];
    bits[i] = x[i] == x[i] ? raw + 0x7fffu + (raw >> 16 & 1u) : raw | 0x400000u;
  }
  return bits[0] >> 16 | (bits[1] & 0xffff0000u);
}
#if defined(__AVX512F__)
inline U narrow(const F* x, const Half*) {
  const __m256i low = _mm512_cvtps_ph(x[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i high = _mm512_cvtps_ph(x[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (U)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#elif defined(__F16C__)
inline U narrow(const F* x, const Half*) {
  const __m128i low = _mm256_cvtps_ph(x[0], _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(x[1], _MM_FROUND_TO_NEAREST_INT);
  return (U)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
#elif defined(__aarch64__)
inline U narrow(const F* x, const Half*) {
  return (U)vcombine_f16(vcvt_f16_f32((float32x4_t)x[0]), vcvt_f16_f32((float32x4_t)x[1]));
}
#else
inline U float_to_half(F x) {  // as from_float below
  const I bits = (I)x & 0x7fffffff;
  const I normal = (bits - 0x37fff001 + (bits >> 13 & 1)) >> 13;
  const I subnormal = (I)((F)bits + 0.5f) - 0x3f000000;
  const I half = bits > 0x7f800000   ? (I{} + 0x7e00)
                 : bits > 0x477fefff ? (I{} + 0x7c00)
                 : bits < 0x38800000 ? subnormal
                                     : normal;
  return (U)half | ((U)x >> 16 & 0x8000u);
}
inline U narrow(const F* x, const Half*) {
  return float_to_half(x[0]) | float_to_half(x[1]) << 16;
}
#endif

// Products of bf16, where the level has them: a vector holds pairs, two in each 32-bit lane.
#if defined(__AVX512BF16__)
#define KVOPS_BF16_PRODUCTS
inline F add_pairs(F sum, F a, F b) {  // a lane's sum + both products of its pairs
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
inline U round_pairs(F low, F high) {  // in the order of the elements
  return (U)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define KVOPS_BF16_PRODUCTS
#define KVOPS_BF16_MATRICES
inline F add_pairs(F sum, F a, F b) {
  return (F)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
inline F add_matrices(F sum, F a, F b) {  // sum[i][j] + a[i] . b[j], of matrices with 2 rows: [2][2] + [2][4] x [2][4]
  return (F)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
inline U round_pairs(F low, F high) {
  return (U)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}
#endif

template <class T>
inline void load(const T* p, F* out) {
  U raw;
  memcpy(&raw, p, VB);
  widen(raw, out, p);
}
#if defined(__AVX512F__)
inline void load(const Half* p, F* out) {  // converts from memory operands: half as many instructions
  for (int i = 0; i < 2; ++i) {
    __m256i half;
    memcpy(&half, p + i * VL, VB / 2);
    out[i] = _mm512_cvtph_ps(half);
  }
}
#endif

// `bytes` of fp8 or int8, at most half a register, as bf16 numbers of the same values; the rest is zeros. In 16-bit
// lanes, exponent and mantissa of fp8 only shift; numbers with exponent 0 come from a table.
template <class T>
inline U load_bytes(const T* p, int64_t bytes) {
#if defined(__AVX512BW__)
  constexpr int kMantissa = Fp8<T>::kMantissa, kUp = 7 - kMantissa, kLeast = (127 - Fp8<T>::kBias) << 7;
  // Numbers with exponent 0, by mantissa.
  alignas(64) static constexpr uint16_t kSubnormal[32] = {0,
                                                          kLeast - (kMantissa - 1) * 128,
                                                          kLeast - (kMantissa - 2) * 128,
                                                          kLeast - (kMantissa - 2) * 128 + 64,
                                                          kLeast,
                                                          kLeast + 32,
                                                          kLeast + 64,
                                                          kLeast + 96};
  __m256i raw = _mm256_setzero_si256();
  memcpy(&raw, p, bytes);
  const __m512i x = _mm512_cvtepu8_epi16(raw), magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, kUp), _mm512_set1_epi16(kLeast));
  value = _mm512_mask_permutexvar_epi16(value, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(1 << kMantissa)),
                                        magnitude, _mm512_load_si512(kSubnormal));
  value = _mm512_or_si512(
      value, _mm512_maskz_set1_epi16(_mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(Fp8<T>::kSpecial)), 0x7f80));
  return (U)_mm512_or_si512(value, _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16(-0x8000)));
#else
  typedef uint16_t Pairs __attribute__((vector_size(VB / 2)));
  Pairs raw = {};
  memcpy(&raw, p, bytes);
  const U pairs = __builtin_convertvector(raw, U);
  return (U)fp8_to_float<T>(pairs & 0xffu) >> 16 | (U)fp8_to_float<T>(pairs >> 8);
#endif
}
inline void load(const Int8* p, F* out) {
  for (int i = 0; i < 2; ++i) {
#if defined(__AVX2__)  // GCC converts such vectors element by element
    __m128i raw = _mm_setzero_si128();
    memcpy(&raw, p + i * VL, VL);
#if defined(__AVX512F__)
    const I whole = (I)_mm512_cvtepi8_epi32(raw);
#else
    const I whole = (I)_mm256_cvtepi8_epi32(raw);
#endif
#else
    typedef int8_t Bytes __attribute__((vector_size(VL)));
    Bytes raw;
    memcpy(&raw, p + i * VL, VL);
    const I whole = __builtin_convertvector(raw, I);
#endif
    out[i] = __builtin_convertvector(whole, F);
  }
}
inline void load_integers(const Int8* p, int64_t bytes, F* out) {
  Int8 whole[VB / 2] = {};
  memcpy(whole, p, bytes);
  load(whole, out);
}
inline U load_bytes(const Int8* p, int64_t bytes) {
  F x[2];
  load_integers(p, bytes, x);
#if defined(KVOPS_BF16_PRODUCTS)
  return round_pairs(x[0], x[1]);
#else
  return (U)evens(x[0], x[1]) >> 16 | ((U)odds(x[0], x[1]) & 0xffff0000u);
#endif
}
inline void load(const E4M3* p, F* out) {
  widen(load_bytes(p, VB / 2), out, static_cast<const BFloat16*>(nullptr));
}
inline void load(const E5M2* p, F* out) {
  widen(load_bytes(p, VB / 2), out, static_cast<const BFloat16*>(nullptr));
}

// Loads the last register of a row if it is partly filled: `bytes` of it (a multiple of 16), the rest zeros. For 1-byte
// types, `bytes` is the size in bf16.
template <class T>
inline void load_part(const T* p, int bytes, F* out) {
  if constexpr (__is_same(T, Int8)) {
    load_integers(p, bytes / 2, out);
  } else if constexpr (sizeof(T) == 1) {
    widen(load_bytes(p, bytes / 2), out, static_cast<const BFloat16*>(nullptr));
  } else {
#if defined(__AVX512F__)
    const U raw = (U)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (bytes / 4)) - 1), p);
#else
    U raw = {};
    for (int i = 0; i < bytes; i += 16)
      memcpy(reinterpret_cast<char*>(&raw) + i, reinterpret_cast<const char*>(p) + i, 16);
#endif
    widen(raw, out, p);
  }
}

// A row of d elements as registers: `full` whole ones, then one of `part` bytes unless that is 0.
struct RowShape {
  int full, part;
  int registers() const { return full + (part != 0); }
};
template <class T>
inline RowShape row_shape(int64_t row_bytes) {
  return {static_cast<int>(row_bytes / VB), static_cast<int>(row_bytes % VB)};
}

inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

// The rows of one head of K or V.
template <class T>
struct Rows {
  HeadRows head;
  int64_t count, d;
  RowShape shape;
  const T* row(int64_t i) const { return reinterpret_cast<const T*>(head.row(i)); }
  // Rows [i, i + N) below `end`; past it the last is repeated.
  template <int N>
  void take(int64_t i, int64_t end, const T** to) const {
    const int live = end - i < N ? static_cast<int>(end - i) : N;
    if (__builtin_expect(head.strided(i, live), 1)) {
      const char* const data = head.row(i);
      for (int r = 0; r < N; ++r) to[r] = reinterpret_cast<const T*>(data + (r < live ? r : live - 1) * head.stride_n);
      return;
    }
    RowWalk walk(head, i);
    for (int r = 0; r < live; ++r) to[r] = reinterpret_cast<const T*>(walk.next());
    for (int r = live; r < N; ++r) to[r] = to[live - 1];
  }
  // far[r]: byte offset from `from[r]`, which is row i + r, to the row `distance` after it, for prefetching.
  template <int N>
  void ahead(int64_t i, int64_t distance, const T* const* from, int64_t* far) const {
    if (!head.pages) {
      for (int r = 0; r < N; ++r) far[r] = distance * head.stride_n;
      return;
    }
    int64_t at = i + distance < 0 ? 0 : i + distance;
    if (at + N <= count && head.strided(at, N)) {
      const char* const data = head.row(at);
      for (int r = 0; r < N; ++r) far[r] = data + r * head.stride_n - reinterpret_cast<const char*>(from[r]);
      return;
    }
    RowWalk walk(head, at);
    for (int r = 0; r < N; ++r, ++at) far[r] = at < count ? walk.next() - reinterpret_cast<const char*>(from[r]) : 0;
  }
};

// Calls fn(register index, loader) for each register of a row; loader(p, F* out) reads that register of the row at p.
template <class T, class Fn>
inline void for_registers(RowShape shape, const Fn& fn) {
  for (int c = 0; c < shape.full; ++c) fn(c, [c](const T* p, F* out) { load(p + c * kStep<T>, out); });
  if (shape.part)
    fn(shape.full, [shape](const T* p, F* out) { load_part(p + shape.full * kStep<T>, shape.part, out); });
}

// Prefetches register c of the row `distance` bytes after p. The hardware prefetcher does not follow the steps in which
// tiles go through memory. Level: cache level 1 or 2.
template <int Level = 1, class T>
inline void prefetch(const T* p, int64_t c, int64_t distance) {
  __builtin_prefetch(reinterpret_cast<const char*>(p + c * kStep<T>) + distance, 0, 4 - Level);
}

// The index of channel c in an array of floats that was filled register by register.
template <class T>
inline int64_t channel_slot(int64_t c) {
  if (kInOrder<T>) return c;
  const int64_t in = c % kStep<T>;
  return c - in + (in % 2) * VL + in / 2;
}

// What a call works with: torch's threads, and uninitialized scratch memory.
struct Workers {
  decltype(Call::run) run;
  int64_t count;
  float* workspace;
};

// The number of workers for a call that touches `bytes`: one if starting more would cost more than the work.
inline int64_t threads_for(const Call& call, int64_t bytes) {
  return bytes < (int64_t{1} << 20) ? 1 : call.threads;
}

// Workers with `each` floats of scratch per worker and `shared` floats for all of them together.
inline Workers workers_for(Call& call, int64_t bytes, int64_t each = 0, int64_t shared = 0) {
  const int64_t count = threads_for(call, bytes);
  return {call.run, count, static_cast<float*>(call.workspace(4 * (count * each + shared)))};
}

// Calls fn(i) for i in [0, n) on torch's threads. fn must not throw.
template <class Fn>
inline void parallel_for(const Workers& workers, int64_t n, const Fn& fn) {
  if (n <= 1 || workers.count <= 1) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  workers.run(
      0, n, 1,
      [](int64_t begin, int64_t end, void* context) {
        for (int64_t i = begin; i < end; ++i) (*static_cast<const Fn*>(context))(i);
      },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

// Worker w of `workers` takes items [first, last) of n.
struct Share {
  int64_t first, last;
};
inline Share share(int64_t n, int64_t w, int64_t workers) {
  return {n * w / workers, n * (w + 1) / workers};
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
