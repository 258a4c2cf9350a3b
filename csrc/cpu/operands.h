// Rows of K or V, and rows that are packed once, as operands of products (products.h).
//
// P is the type that is multiplied: float, or BFloat16 where the level has bf16 dot products. Rows stored as P are read
// in place; others are converted, a block at a time.
#pragma once
#include "products.h"

namespace kvops::KVOPS_ISA {
namespace {

template <class P>
struct WordsOf {
  typedef FloatWords type;
};
#if defined(KVOPS_BF16_PRODUCTS)
template <>
struct WordsOf<BFloat16> {
  typedef Bf16Words type;
};
#endif

// The fastest type whose products with numbers of T are exact: bf16 holds every fp8 number.
#if defined(KVOPS_BF16_PRODUCTS)
template <class T>
struct ExactOperand {
  typedef float type;
};
template <>
struct ExactOperand<BFloat16> {
  typedef BFloat16 type;
};
template <>
struct ExactOperand<E4M3> {
  typedef BFloat16 type;
};
template <>
struct ExactOperand<E5M2> {
  typedef BFloat16 type;
};
#else
template <class>
struct ExactOperand {
  typedef float type;
};
#endif

template <class P>
constexpr int kPerWord = 4 / sizeof(P);
template <class P, class T>
constexpr bool kAsStored = __is_same(T, P);

// The number of words in a row of operands.
template <class P, class T>
inline int64_t operand_words(int64_t row_bytes) {
  return kAsStored<P, T> ? row_bytes / 4 : row_shape<T>(row_bytes).registers() * kStep<T> / kPerWord<P>;
}

// An upper bound for any stored dtype.
inline int64_t most_operand_words(int64_t d) {
  return (d + 31) / 32 * 32;
}

// Converts one register of stored elements to operands at `out`. Floats of 2-byte rows come in channel_slot order.
template <class T>
inline void convert(const F* x, float* out, const T*) {
  for (int j = 0; j < kVecs<T>; ++j) store(out + j * VL, x[j]);
}
#if defined(KVOPS_BF16_PRODUCTS)
template <class T>
inline void convert(const F* x, BFloat16* out, const T*) {
  if constexpr (sizeof(T) == 1 || kAsStored<BFloat16, T>) {  // put evens and odds back in place
    const U raw = (U)x[0] >> 16 | ((U)x[1] & 0xffff0000u);
    memcpy(out, &raw, VB);
  } else {
    const U pairs = round_pairs(x[0], x[kVecs<T> - 1]);
    memcpy(out, &pairs, kVecs<T> * VB / 2);
  }
}
#endif

template <class P, class T>
inline void convert_row(const T* row, RowShape shape, P* out) {
  for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
    F x[kVecs<T>];
    load_row(row, x);
    convert(x, out + c * kStep<T>, row);
  });
}

// The index of channel c in a row of operands.
template <class P, class T>
inline int64_t operand_slot(int64_t c) {
  return __is_same(P, float) ? channel_slot<T>(c) : c;
}

// Packs a row as lane `lane` of `vectors` vectors: in chunks of kVectors vectors, [words][vectors]. value(c) is its
// channel c. The memory must be zero at first if d is less than a row of operands.
template <class P, class T, class Value>
inline void pack_row(float* packed, int64_t lane, int64_t vectors, int64_t words, int64_t d, const Value& value) {
  const int64_t chunk = lane / VL / kVectors * kVectors;
  const int64_t width = (vectors - chunk < kVectors ? vectors - chunk : kVectors) * VL;
  float* const to = packed + chunk * VL * words + lane - chunk * VL;
  for (int64_t c = 0; c < d; ++c) {
    const int64_t slot = operand_slot<P, T>(c);
    from_float(value(c), reinterpret_cast<P*>(to + slot / kPerWord<P> * width) + slot % kPerWord<P>);
  }
}

// Calls take(Count<N>, vector, key, sums[keys][N]) for all products of the block's keys with packed rows: rows `vector
// * VL` and following, in ascending order for each key.
template <class P, class Take>
inline void multiply_packed(const Block& block, const float* packed, int64_t vectors, int64_t words, const Take& take) {
  for (int64_t vector = 0; vector < vectors; vector += kVectors)
    with_count(vectors - vector < kVectors ? vectors - vector : kVectors, [&](auto n) {
      constexpr int N = decltype(n)::value;
      products<typename WordsOf<P>::type, N>(block, packed + vector * VL * words, words,
                                             [&](int key, F(&sums)[kKeysAtOnce<N>][N]) { take(n, vector, key, sums); });
    });
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
