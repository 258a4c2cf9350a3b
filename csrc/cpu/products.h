// Products of a block of keys with packed rows (queries or prototypes), the inner loop of the window and prototype
// kernels.
//
// The rows are packed once, word by word, so that a vector holds one word of VL rows. K is then read in place:
// each word is broadcast against up to 4 vectors of rows, and a register block of 6 keys x 4 vectors (AVX-512) takes 24
// multiply-adds for 10 loads. Keys are never transposed, rows only once.
//
// Arm's BFMMLA multiplies 2 rows of 4 bf16 channels with 2 keys, twice as many products as its dot product. Two words
// of 4 packed rows become two such operands by a zip, and 8 bytes of two keys, read in place, become the other.
#pragma once
#include "simd.h"

namespace kvops::KVOPS_ISA {
namespace {

// Products of 32-bit words of K with the same words of VL rows: a word is one float, or two bf16 channels.
struct FloatWords {
  typedef float Word;
  static F add(F sum, F rows, float key) { return sum + rows * key; }
  static F add_all(F sum, F rows, F keys) { return sum + rows * keys; }
};
#if defined(KVOPS_BF16_PRODUCTS)
struct Bf16Words {
  typedef int32_t Word;
  static F add(F sum, F rows, int32_t key) { return add_all(sum, rows, (F)(key + I{})); }
  static F add_all(F sum, F rows, F keys) { return add_pairs(sum, rows, keys); }
};
#endif

// The register block: vectors of rows, and for each number of vectors N the number of keys.
constexpr int kVectors = VB == 64 ? 4 : 2;
template <int N>
constexpr int kKeysAtOnce = VB == 64 ? (N == 4   ? 6
                                        : N == 3 ? 8
                                                 : 12)
                                     : (N == 2 ? 6 : 12);  // even

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls fn(Count<n>), 1 <= n <= kVectors.
template <class Fn>
inline void with_count(int64_t n, const Fn& fn) {
  if (n == 1) fn(Count<1>{});
  if (n == 2) fn(Count<2>{});
  if constexpr (kVectors > 2) {
    if (n == 3) fn(Count<3>{});
    if (n == 4) fn(Count<4>{});
  }
}

// Keys [first, first + count) of a head: rows of whole 16-byte pieces, `stride` bytes apart, or at the addresses in
// `rows`.
struct Block {
  int64_t first;
  int count;
  const char* data;
  int64_t stride;
  const char* const* rows = nullptr;

  const char* row(int i) const {
    const int own = i < count ? i : count - 1;
    return rows ? rows[own] : data + own * stride;
  }
  // Byte offset from row i to the row `distance` after it, for prefetching. With `rows`, it stays within the block.
  int64_t ahead(int i, int64_t distance) const {
    if (!rows) return distance * stride;
    return rows[i + distance < count ? i + distance : count - 1] - row(i);
  }
};

// A block of keys in place. If it spans pages, the addresses of its keys are looked up once, into `rows`.
inline Block block_of(const HeadRows& head, int64_t first, int64_t count, const char** rows) {
  Block block{first, static_cast<int>(count), nullptr, head.stride_n};
  if (head.strided(first, count)) {
    block.data = head.row(first);
    return block;
  }
  RowWalk walk(head, first);
  for (int i = 0; i < block.count; ++i) rows[i] = walk.next();
  block.rows = rows;
  return block;
}

// A block of converted keys, stored contiguously.
inline Block made_block(const Block& of, const void* data, int64_t stride) {
  return {of.first, of.count, reinterpret_cast<const char*>(data), stride};
}

#if defined(KVOPS_BF16_MATRICES)
// The sums of `products` for the keys at `row`.
template <int N>
void matrix_products(const char* const* row, const float* q, int64_t words, F (*sums)[N]) {
  constexpr int K = kKeysAtOnce<N>;
  F both[K / 2][2 * N] = {};  // [two keys][two rows]: the lanes are row by row
  for (int64_t word = 0; word < words; word += 2) {
    F rows[2 * N];
    for (int v = 0; v < N; ++v) {
      const F even = load(q + (word * N + v) * VL), odd = load(q + ((word + 1) * N + v) * VL);
      rows[2 * v] = zip_low(even, odd);
      rows[2 * v + 1] = zip_high(even, odd);
    }
    for (int k = 0; k < K / 2; ++k) {
      F keys;
      memcpy(&keys, row[2 * k] + 4 * word, 8);
      memcpy(reinterpret_cast<char*>(&keys) + 8, row[2 * k + 1] + 4 * word, 8);
      for (int v = 0; v < 2 * N; ++v) both[k][v] = add_matrices(both[k][v], rows[v], keys);
    }
  }
  for (int k = 0; k < K / 2; ++k)
    for (int v = 0; v < N; ++v) {
      sums[2 * k][v] = evens(both[k][2 * v], both[k][2 * v + 1]);
      sums[2 * k + 1][v] = odds(both[k][2 * v], both[k][2 * v + 1]);
    }
}
#endif

// Calls take(first, sums[keys][N]) with sums = q . k over `words` words (a multiple of 4), for kKeysAtOnce<N> keys from
// `first` on; past the end, the block's last key is repeated. q: [words][N vectors].
template <class Words, int N, class Take>
void products(const Block& block, const float* q, int64_t words, const Take& take) {
  constexpr int K = kKeysAtOnce<N>;
  for (int first = 0; first < block.count; first += K) {
    const char* row[K];
    for (int k = 0; k < K; ++k) row[k] = block.row(first + k);
#if defined(KVOPS_BF16_MATRICES)
    if constexpr (__is_same(Words, Bf16Words)) {
      F sums[K][N];
      matrix_products<N>(row, q, words, sums);
      take(first, sums);
      continue;
    }
#endif
    F sums[K][N] = {};
    for (int64_t word = 0; word < words; word += 4)
#pragma GCC unroll 4
      for (int64_t i = word; i < word + 4; ++i) {
        F rows[N];
        for (int v = 0; v < N; ++v) rows[v] = load(q + (i * N + v) * VL);
#pragma GCC unroll 12
        for (int k = 0; k < K; ++k) {
          typename Words::Word key;
          memcpy(&key, row[k] + 4 * i, 4);
          for (int v = 0; v < N; ++v) sums[k][v] = Words::add(sums[k][v], rows[v], key);
        }
      }
    take(first, sums);
  }
}

}  // namespace
}  // namespace kvops::KVOPS_ISA
