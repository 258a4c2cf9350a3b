// The nearest prototype of each key on the CPU: a matrix product whose results never leave the registers.
//
//   assignment_i = argmax_c cos(k_i, p_c) = argmax_c k_i . (p_c / |p_c| - m)      ties to the lower c
//
// Neither the norm of k_i nor a vector subtracted from all prototypes changes the argmax. m is the mean of the unit
// prototypes, so that bf16 products round the differences that decide rather than what all prototypes have in common.
//
// Bytes that must move: K once; the work is n x C x d products. Prototypes that can win are packed per head, 16 to a
// vector (products.h): 500 of them with 128 channels take 128 KiB in bf16 and stay in the L2 cache. A block of 48 keys
// stays in L1 while all prototypes stream past it. Every lane keeps its best product and the vector it came from, and
// the lanes are compared at the end. Level v4_bf16 multiplies pairs of bf16 (exact products, fp32 sums) for every
// stored dtype; the other levels multiply floats. With n 65536, 8 heads, d 128 and 500 prototypes the kernel takes as
// long as torch's bf16 matrix product alone, for fp32 and for bf16 keys (bench/results/cpu-protokv.json).
//
// Keys are multiplied in place, or converted a block at a time. Keys whose largest element could overflow in a
// product, or could be flushed to zero (bf16 dot products flush subnormal numbers), are detected by their bits and
// first divided by that element. A non-finite key becomes NaN, so none of its products exceeds -inf.
#include "../dispatch.h"
#include "../ops/assign_prototypes.h"
#include "operands.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kKeys = 48;  // stay in L1 while all prototypes stream past
static_assert(kKeys % VL == 0 && kKeys % kKeysAtOnce<kVectors> == 0);

// A worker's scratch, in floats. Every array starts on a cache line.
struct Scratch {
  int64_t packed, keys, best, worker;

  explicit Scratch(const AssignPrototypesParams& p) {
    const int64_t width = most_operand_words(p.d), rows = (p.count + 15) / 16 * 16;
    packed = rows * width;
    keys = kKeys * width;
    best = 2 * kKeys * 16;
    worker = (packed + keys + best + 3 * p.count + 2 * p.d + 15) / 16 * 16;
  }
};

// The operand type of the products.
#if defined(KVOPS_BF16_PRODUCTS)
typedef BFloat16 Product;
#else
typedef float Product;
#endif

// Magnitudes within these bounds (the bits of a float for fp32, bf16 and fp16; in the upper half for 2-byte types) keep
// products with directions, and their sums, in the range of normal floats.
template <class T>
constexpr int32_t kLeast = 0x21800000;  // 2^-60
template <class T>
constexpr int32_t kMost = 0x71800000;  // 2^100
template <>
constexpr int32_t kLeast<Half> = 0x00010000;  // anything but 0
template <>
constexpr int32_t kMost<Half> = 0x7c000000;  // infinity

inline F larger_bits(F a, F b) {
  return (F)((I)a > (I)b ? (I)a : (I)b);
}

// Whether all elements of VL rows are within these bounds.
template <class T>
bool comfortable(const T* const* row, RowShape shape) {
  F largest[VL] = {};
  const auto outside = [&](int32_t least, int32_t most) {
    const I all = (I)reduce_lanes(largest, larger_bits);
    return any_nan(((all < least) | (all >= most)) ? splat(__builtin_nanf("")) : F{});
  };
  if constexpr (sizeof(T) == 1) {  // true for every number but 0
    for (int r = 0; r < VL; ++r)
      for_registers<T>(shape, [&](int64_t, auto&& load_row) {
        F x[2];
        load_row(row[r], x);
        for (const F& each : x) largest[r] = larger_bits(largest[r], (F)((U)each & 0x7fffffffu));
      });
    return !outside(1, 0x7f800000);
  }
  const auto see = [&](int r, U raw) {
    if (sizeof(T) == 2) largest[r] = larger_bits(largest[r], (F)(raw << 16 & 0x7fffffffu));
    largest[r] = larger_bits(largest[r], (F)(raw & (sizeof(T) == 2 ? 0x7fff0000u : 0x7fffffffu)));
  };
  for (int r = 0; r < VL; ++r) {
    const char* const bytes = reinterpret_cast<const char*>(row[r]);
    for (int c = 0; c < shape.full; ++c) {
      U raw;
      memcpy(&raw, bytes + c * VB, VB);
      see(r, raw);
    }
    for (int i = 0; i < shape.part; i += 16) {
      U raw = {};
      memcpy(&raw, bytes + shape.full * VB + i, 16);
      see(r, raw);
    }
  }
  return !outside(kLeast<T>, kMost<T>);
}

// The state of one worker: the packed prototypes of a head, and the block of keys in progress.
template <class T>
struct Assigner {
  const AssignPrototypesParams& p;
  const RowShape shape;
  const int64_t words;  // in a row of products
  float* packed;        // chunks of kVectors vectors: [words][vectors]
  double* inverse;      // [C]: 1/|p_c|; 0 if the prototype cannot win
  double* mean;         // [d]: of the unit prototypes
  int32_t* ids;         // [C]: the packed prototypes
  float *keys, *best;   // [kKeys][words], [kKeys][VL]
  int32_t* which;       // [kKeys][VL]: the vector of prototypes that holds the best
  int64_t head = -1, usable = 0, vectors = 0;

  Assigner(const AssignPrototypesParams& p_, float* memory)
      : p(p_), shape(row_shape<T>(p_.k.row_bytes)), words(operand_words<Product, T>(p_.k.row_bytes)) {
    const Scratch sizes(p);
    packed = memory;
    keys = packed + sizes.packed;
    best = keys + sizes.keys;
    which = reinterpret_cast<int32_t*>(best + kKeys * VL);
    inverse = reinterpret_cast<double*>(best + sizes.best);
    mean = inverse + p.count;
    ids = reinterpret_cast<int32_t*>(mean + p.d);
  }

  // Packs the prototypes of a head, unless they are packed already.
  void take_head(int64_t index) {
    if (index == head) return;
    head = index;
    const float* const prototypes = p.prototypes + index * p.count * p.d;  // [C, d]
    usable = 0;
    for (int64_t c = 0; c < p.d; ++c) mean[c] = 0;
    for (int64_t i = 0; i < p.count; ++i) {
      const float* const x = prototypes + i * p.d;
      double squares = 0;
      for (int64_t c = 0; c < p.d; ++c) squares += double(x[c]) * x[c];
      if (!(squares > 0 && squares - squares == 0)) continue;
      inverse[usable] = 1 / __builtin_sqrt(squares);
      for (int64_t c = 0; c < p.d; ++c) mean[c] += x[c] * inverse[usable];
      ids[usable++] = static_cast<int32_t>(i);
    }
    for (int64_t c = 0; c < p.d; ++c) mean[c] /= static_cast<double>(usable);
    vectors = (usable + VL - 1) / VL;
    memset(packed, 0, 4 * vectors * VL * words);
    for (int64_t lane = 0; lane < vectors * VL; ++lane) {
      const int64_t i =
          lane < usable ? lane : usable - 1;  // repeat the last to fill the vector: on ties the first wins
      const float* const x = prototypes + ids[i] * p.d;
      pack_row<Product, T>(packed, lane, vectors, words, p.d,
                           [&](int64_t c) { return static_cast<float>(x[c] * inverse[i] - mean[c]); });
    }
  }

  // The block's rows as product operands: in place, or converted.
  void take_keys(Block& block) {
    const T* row[kKeys];
    for (int i = 0; i < kKeys; ++i) row[i] = reinterpret_cast<const T*>(block.row(i));
    bool plain = true;
    for (int i = 0; i < block.count; i += VL) plain &= comfortable(row + i, shape);
    if (kAsStored<Product, T> && plain) return;
    Product* const products = reinterpret_cast<Product*>(keys);
    for (int i = 0; i < block.count; ++i) {
      Product* const to = products + i * words * kPerWord<Product>;
      convert_row(row[i], shape, to);
      if (!plain) divide_by_largest(row[i], to);
    }
    block = made_block(block, keys, 4 * words);
  }

  void divide_by_largest(const T* row, Product* to) const {
    float largest = 0;
    bool finite = true;
    for (int64_t c = 0; c < p.d; ++c) {
      const float x = to_float(row[c]);
      finite &= is_finite(x);
      largest = x > largest ? x : -x > largest ? -x : largest;
    }
    const double factor = !finite ? __builtin_nan("") : largest > 0 ? 1 / double(largest) : 0.0;
    for (int64_t c = 0; c < p.d; ++c)
      from_float(static_cast<float>(to_float(row[c]) * factor), to + operand_slot<Product, T>(c));
  }

  // Assigns keys [first, first + count) of the head, at most kKeys; `left` keys follow them.
  void assign(const HeadRows& rows, int64_t first, int count, int64_t left, int32_t* out) {
    const char* lie[kKeys];
    Block block = block_of(rows, first, count, lie);
    take_keys(block);
    for (int i = 0; i < kKeys * VL; i += VL) store(best + i, splat(-__builtin_inff()));
    memset(which, 0, 4 * kKeys * VL);
    int asked = 0;
    RowWalk next(rows, first + count);
    for (int64_t vector = 0; vector < vectors; vector += kVectors) {
      const int64_t rest = vectors - vector;
      with_count(rest < kVectors ? rest : kVectors, [&](auto n) {
        constexpr int N = decltype(n)::value;
        products<typename WordsOf<Product>::type, N>(block, packed + vector * VL * words, words,
                                                     [&](int key, F(&sums)[kKeysAtOnce<N>][N]) {
                                                       for (int k = 0; k < kKeysAtOnce<N>; ++k) {
                                                         F top = load(best + (key + k) * VL);
                                                         I at;
                                                         memcpy(&at, which + (key + k) * VL, VB);
                                                         for (int v = 0; v < N; ++v) {
                                                           const I better = sums[k][v] > top;
                                                           top = better ? sums[k][v] : top;
                                                           at = better ? I{} + static_cast<int32_t>(vector + v) : at;
                                                         }
                                                         store(best + (key + k) * VL, top);
                                                         memcpy(which + (key + k) * VL, &at, VB);
                                                       }
                                                     });
      });
      // Prefetch the next block's keys meanwhile.
      for (const int upto = static_cast<int>(kKeys * (vector + kVectors) / vectors); asked < upto && asked < kKeys;
           ++asked)
        if (asked < left) prefetch_row(next.next(), p.k.row_bytes);
    }
    for (int i = 0; i < count; i += VL) winners(i, count - i < VL ? count - i : VL, out + i);
  }

  // For each key, the best of its lanes; on ties the lowest prototype.
  void winners(int first, int count, int32_t* out) const {
    F rows[VL];
    for (int j = 0; j < VL; ++j) rows[j] = load(best + (first + j) * VL);
    float top[VL];
    store(top, reduce_lanes(rows, [](F a, F b) { return max(a, b); }));
    I lane;
    for (int i = 0; i < VL; ++i) lane[i] = i;
    for (int j = 0; j < VL; ++j) {
      I at;
      memcpy(&at, which + (first + j) * VL, VB);
      rows[j] = (F)(load(best + (first + j) * VL) == top[j] ? at * VL + lane : I{} + INT32_MAX);
    }
    const I winner = (I)reduce_lanes(rows, [](F a, F b) { return (F)((I)a < (I)b ? (I)a : (I)b); });
    for (int j = 0; j < count; ++j) out[j] = top[j] > -__builtin_inff() ? ids[winner[j]] : -1;
  }
};

template <class T>
void assign_heads(const AssignPrototypesParams& p, const Workers& workers) {
  constexpr int64_t kSplit = 32 * kKeys;  // tokens of a head that a worker takes at a time
  const int64_t splits = (p.n + kSplit - 1) / kSplit;
  const int64_t size = Scratch(p).worker;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    Assigner<T> mine(p, workers.workspace + worker * size);
    const Share items = share(p.b * p.heads * splits, worker, workers.count);
    for (int64_t item = items.first; item < items.last; ++item) {
      const int64_t index = item / splits, split = item % splits, b = index / p.heads;
      int32_t* const out = p.assignment + index * p.n;
      const int64_t first = p.slots.first(b), last = first + p.slots.count(b);
      if (split == 0) {
        for (int64_t i = 0; i < first; ++i) out[i] = -1;
        for (int64_t i = last; i < p.n; ++i) out[i] = -1;
      }
      mine.take_head(index);
      const HeadRows rows = p.k.head(b, index % p.heads);
      const int64_t begin = first + split * kSplit, end = last - begin < kSplit ? last : begin + kSplit;
      for (int64_t i = begin; i < end; i += kKeys)
        mine.assign(rows, i, static_cast<int>(end - i < kKeys ? end - i : kKeys), last - i - kKeys, out + i);
    }
  });
}

}  // namespace

void assign_prototypes(const AssignPrototypesParams& p, Call& call) {
  // 32 products take about as long as reading a byte.
  const Workers workers = workers_for(call, p.b * p.heads * p.n * p.d * (p.count / 32 + 1), Scratch(p).worker);
  with_read_dtype(p.dtype, [&](auto type) { assign_heads<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
