// The logarithm of the expected attention weight of each key, for queries of a Gaussian, on the CPU:
//
//   score_i = scale mean . k_i + scale^2 / 2 k_i^T C k_i = sum_c k_ic (scale mean_c + sum_{j <= c} U_cj k_ij)
//
// with U = scale^2 / 2 (C + C^T) below the diagonal of C, and half of that on it. The triangle halves the products.
//
// Bytes that must move: K once; the work is n d^2 / 2 multiply-adds per query head, so the kernel is compute-bound. U
// is packed per query head, 16 of its rows to a vector (products.h): with 128 channels it takes 40 KiB and stays in the
// L2 cache with those of the group's other heads. A block of 48 keys is converted to floats, which stay in L1 while all
// of U streams past. A vector of the products U k_i is multiplied with the same channels of k_i and added to one vector
// per key, so no product is ever stored. A chunk of rows of U ends with the chunk's own channels, since all later ones
// are zero.
//
// Products are fp32 at every level: the score is an exponent, where the rounding of bf16 operands would show.
#include "../dispatch.h"
#include "../ops/quadratic_scores.h"
#include "float_rows.h"
#include "products.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kKeys = 48, kRun = 8 * kKeys;
static_assert(kKeys % VL == 0 && kKeys % kKeysAtOnce<kVectors> == 0);

// A worker's scratch, in floats.
struct Scratch {
  int64_t width, head, worker;  // head: U and the mean of one query head

  explicit Scratch(const QuadraticScoresParams& p) : width(float_width(p.d)) {
    head = width * width + width;
    worker = p.group * head + kKeys * width + kKeys * VL;
  }
};

template <class T>
struct Quadratic {
  const QuadraticScoresParams& p;
  const Scratch sizes;
  float *heads, *keys, *sums;  // [group][head], [kKeys][width], [kKeys][VL]
  int64_t packed = -1;

  Quadratic(const QuadraticScoresParams& p_, float* memory)
      : p(p_), sizes(p_), heads(memory), keys(memory + p_.group * sizes.head), sums(keys + kKeys * sizes.width) {}

  // Packs U and the mean of query head `query` of row b: chunks of kVectors vectors of rows, [words][vectors].
  void pack(int64_t b, int64_t query, float* to) const {
    const int64_t d = p.d, width = sizes.width;
    const float *const mean = p.mean.row(b, query), *const cov = p.cov + b * p.cov_stride_b + query * d * d;
    const double scale = p.scale, half = scale * scale / 2;
    for (int64_t c = 0; c < width; ++c) to[c] = c < d ? static_cast<float>(scale * mean[c]) : 0.0f;
    to += width;
    for (int64_t first = 0; first < width; first += kVectors * VL) {
      const int64_t rows = width - first < kVectors * VL ? width - first : kVectors * VL, words = first + rows;
      for (int64_t j = 0; j < words; ++j)
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t c = first + row;
          double u = 0;
          if (j <= c && c < d) u = half * (j == c ? double(cov[c * d + c]) : double(cov[c * d + j]) + cov[j * d + c]);
          *to++ = static_cast<float>(u);
        }
    }
  }

  void operator()(int64_t head, int64_t begin, int64_t end) {
    const int64_t b = head / p.heads, h = head % p.heads, width = sizes.width;
    if (head != packed) {
      packed = head;
      for (int64_t g = 0; g < p.group; ++g) pack(b, h * p.group + g, heads + g * sizes.head);
    }
    const RowShape shape = row_shape<T>(p.k.row_bytes);
    RowWalk walk(p.k.head(b, h), begin);
    for (int64_t first = begin; first < end; first += kKeys) {
      const int count = static_cast<int>(end - first < kKeys ? end - first : kKeys);
      for (int i = 0; i < count; ++i)
        to_floats(reinterpret_cast<const T*>(walk.next()), shape, width, keys + i * width);
      for (int64_t g = 0; g < p.group; ++g) {
        score(count, heads + g * sizes.head);
        store_scores(sums, count, 1.0f, p.scores + (head * p.group + g) * p.n + first);
      }
    }
  }

  void score(int count, const float* of_head) const {
    const int64_t width = sizes.width;
    const Block block{0, count, reinterpret_cast<const char*>(keys), 4 * width};
    const float *const mean = of_head, *rows = of_head + width;
    memset(sums, 0, sizeof(float) * kKeys * VL);
    for (int64_t first = 0; first < width; first += kVectors * VL) {
      const int64_t vectors = (width - first < kVectors * VL ? width - first : kVectors * VL) / VL;
      const int64_t words = first + vectors * VL;
      with_count(vectors, [&](auto n) {
        constexpr int N = decltype(n)::value;
        products<FloatWords, N>(block, rows, words, [&](int key, F(&x)[kKeysAtOnce<N>][N]) {
          for (int k = 0; k < kKeysAtOnce<N>; ++k) {
            const float* const own = reinterpret_cast<const float*>(block.row(key + k)) + first;
            F sum = load(sums + (key + k) * VL);
            for (int v = 0; v < N; ++v) sum += (x[k][v] + load(mean + first + v * VL)) * load(own + v * VL);
            store(sums + (key + k) * VL, sum);
          }
        });
      });
      rows += words * vectors * VL;
    }
  }
};

}  // namespace

void quadratic_scores(const QuadraticScoresParams& p, Call& call) {
  // 32 products take about as long as reading a byte.
  const Scratch sizes(p);
  const Workers workers = workers_for(call, p.b * p.heads * p.n * p.d * (p.group * p.d / 64 + 1), sizes.worker);
  with_read_dtype(p.dtype, [&](auto type) {
    for_runs(p, p.scores, p.group, workers, sizes.worker, kRun, [&](float* memory) {
      return [own = Quadratic<decltype(type)>(p, memory)](int64_t head, int64_t begin, int64_t end) mutable {
        own(head, begin, end);
      };
    });
  });
}

}  // namespace kvops::KVOPS_ISA
