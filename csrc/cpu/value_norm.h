// CriticalKV's value norms on the CPU: a matrix product whose results never leave the registers.
//
//   norm_i = mean (or max, sum) over the group's query heads h of sum over c of |W_O[c, h] . v_i|
//
// Bytes that must move: V and W_O once; the work is n x Hq x hidden x dv multiply-adds, as much as the projection of n
// attention outputs. The [n, hidden] products are never written.
//
// A worker takes kRun values of a KV head. It packs panels of kPanel output channels of a query head, 16 to a vector
// (operands.h); the panel stays in L2 while the values pass over it, 48 at a time. Each lane adds up the magnitudes of
// its channels, and the lanes are added per panel. The products are exact: bf16 pairs for bf16 and fp8 values where the
// level has them, floats otherwise. The order of the sums depends on the shape alone. The kernel takes 0.9 times as
// long as torch.matmul of V with the weights, which writes the products (bench/results/cpu-products.json).
//
// A result that is not finite is redone in double: it is NaN if the value is not finite, and infinity on overflow.
#include "../dispatch.h"
#include "../ops/value_norm.h"
#include "operands.h"
#include "runs.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kValues = 48, kPanel = 128;
constexpr int64_t kRun = 32 * kValues;
static_assert(kValues % VL == 0 && kValues % kKeysAtOnce<kVectors> == 0 && kPanel % (kVectors * VL) == 0);

// A worker's scratch, in floats. Every array starts on a cache line.
struct Scratch {
  int64_t packed, values, lanes, worker;

  explicit Scratch(const ValueNormParams& p) {
    const int64_t width = most_operand_words(p.dv);
    packed = kPanel * width;
    values = kValues * width;
    lanes = kValues * 16;
    worker = packed + values + lanes + 2 * kRun;
  }
};

// The weights have the type that values are computed in.
template <class T>
struct WeightOf {
  typedef T type;
};
template <>
struct WeightOf<E4M3> {
  typedef BFloat16 type;
};
template <>
struct WeightOf<E5M2> {
  typedef BFloat16 type;
};

template <class T>
struct Projector {
  typedef typename ExactOperand<T>::type P;
  typedef typename WeightOf<T>::type W;
  const ValueNormParams& p;
  const int64_t words;     // in a row of operands
  float *packed, *values;  // [kPanel][words], [kValues][words]
  float* lanes;            // [kValues][VL]: sums of magnitudes
  double* sums;            // [kRun]: of one query head

  Projector(const ValueNormParams& p_, float* memory) : p(p_), words(operand_words<P, T>(p_.v.row_bytes)) {
    const Scratch sizes(p);
    packed = memory;
    values = packed + sizes.packed;
    lanes = values + sizes.values;
    sums = reinterpret_cast<double*>(lanes + sizes.lanes);
  }

  // The norms of the first `count` values of `rows`, at most kRun, of a KV head.
  void project(const Rows<T>& rows, int64_t head, int64_t count, float* out) {
    for (int64_t g = 0; g < p.group; ++g) {
      for (int64_t i = 0; i < count; ++i) sums[i] = 0;
      for (int64_t from = 0; from < p.hidden; from += kPanel) {
        const int64_t vectors = take_panel(head * p.group + g, from);
        for (int64_t i = 0; i < count; i += kValues)
          add(rows, i, static_cast<int>(count - i < kValues ? count - i : kValues), vectors, sums + i);
      }
      for (int64_t i = 0; i < count; ++i) reduce(g, static_cast<float>(sums[i]), out[i]);
    }
    for (int64_t i = 0; i < count; ++i)
      if (!is_finite(out[i])) out[i] = carefully(rows.row(i), head);
  }

  // Adds query head g's norm to a result.
  template <class Float>
  void reduce(int64_t g, Float norm, Float& out) const {
    if (g == 0)
      out = norm;
    else if (p.group_reduce == Reduce::max)
      out = norm > out || norm != norm ? norm : out;
    else
      out += norm;
    if (g == p.group - 1 && p.group_reduce == Reduce::mean) out /= static_cast<Float>(p.group);
  }

  // Packs the output channels from `from` on, as many as there are.
  int64_t take_panel(int64_t query_head, int64_t from) {
    const int64_t count = p.hidden - from < kPanel ? p.hidden - from : kPanel, vectors = (count + VL - 1) / VL;
    memset(packed, 0, 4 * vectors * VL * words);
    for (int64_t lane = 0; lane < count; ++lane) {
      const W* const weights = reinterpret_cast<const W*>(p.weights(from + lane, query_head, sizeof(W)));
      pack_row<P, T>(packed, lane, vectors, words, p.dv, [&](int64_t c) { return to_float(weights[c]); });
    }
    return vectors;
  }

  // Adds the panel's magnitudes for values [first, first + count), at most kValues.
  void add(const Rows<T>& rows, int64_t first, int count, int64_t vectors, double* to) {
    const char* lie[kValues];
    Block block = block_of(rows.head, first, count, lie);
    if (!kAsStored<P, T>) {
      P* const operands = reinterpret_cast<P*>(values);
      for (int i = 0; i < count; ++i)
        convert_row(reinterpret_cast<const T*>(block.row(i)), rows.shape, operands + i * words * kPerWord<P>);
      block = made_block(block, values, 4 * words);
    }
    memset(lanes, 0, 4 * kValues * VL);
    multiply_packed<P>(block, packed, vectors, words, [&](auto n, int64_t, int value, auto& products) {
      constexpr int N = decltype(n)::value;
      for (int k = 0; k < kKeysAtOnce<N>; ++k) {
        F sum = load(lanes + (value + k) * VL);
        for (int v = 0; v < N; ++v) sum += (F)((U)products[k][v] & 0x7fffffffu);
        store(lanes + (value + k) * VL, sum);
      }
    });
    for (int i = 0; i < count; i += VL) {
      F rows_of[VL];
      for (int j = 0; j < VL; ++j) rows_of[j] = load(lanes + (i + j) * VL);
      const F total = sum_lanes(rows_of);
      for (int j = 0; j < VL && i + j < count; ++j) to[i + j] += total[j];
    }
  }

  float carefully(const T* value, int64_t head) const {
    for (int64_t c = 0; c < p.dv; ++c)
      if (!is_finite(to_float(value[c]))) return __builtin_nanf("");
    double result = 0;
    for (int64_t g = 0; g < p.group; ++g) {
      double norm = 0;
      for (int64_t c = 0; c < p.hidden; ++c) {
        const W* const weights = reinterpret_cast<const W*>(p.weights(c, head * p.group + g, sizeof(W)));
        double product = 0;
        for (int64_t i = 0; i < p.dv; ++i) product += double(to_float(weights[i])) * to_float(value[i]);
        norm += product < 0 ? -product : product;
      }
      reduce(g, norm, result);
    }
    return static_cast<float>(result);
  }
};

template <class T>
void project_heads(const ValueNormParams& p, const Workers& workers) {
  for_runs(p, p.norms, 1, workers, Scratch(p).worker, kRun, [&](float* scratch) {
    return [&p, mine = Projector<T>(p, scratch)](int64_t head, int64_t first, int64_t last) mutable {
      const int64_t b = head / p.heads, h = head % p.heads;
      const Rows<T> rows{p.v.head(b, h).from(first), last - first, p.dv, row_shape<T>(p.v.row_bytes)};
      mine.project(rows, h, last - first, p.norms + head * p.n + first);
    };
  });
}

}  // namespace

void value_norm(const ValueNormParams& p, Call& call) {
  // 32 products take about as long as reading a byte.
  const int64_t bytes = p.b * p.heads * p.n * p.dv * (p.group * p.hidden / 32 + 1);
  const Workers workers = workers_for(call, bytes, Scratch(p).worker);
  with_read_dtype(p.dtype, [&](auto type) { project_heads<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
