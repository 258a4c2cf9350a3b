// TriAttention scores on the CPU:
//
//   score_i = sum_c center_c k_ic + sum_f norm_f |k_if|        |k_if|: the norm of the channels that RoPE rotates by f
//
// Bytes that must move: K once. A tile of VL keys is converted to floats in L1, and each key is extended by the norms
// of its pairs, so that the score of each query head is one dot product with that head's centers and norms. Four keys
// times four query heads are multiplied at a time: 16 multiply-adds for 8 loads.
//
// Pairs whose norm lies below 1e-19 count as 0, since their squares are not normal numbers; if a square overflows, the
// score is NaN.
#include "../dispatch.h"
#include "../ops/trig_scores.h"
#include "float_rows.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kRun = 64 * VL, kAtOnce = 4;

// A worker's scratch, in floats.
struct Scratch {
  int64_t width, worker;  // width: of a key with its norms

  explicit Scratch(const TrigScoresParams& p) : width(float_width(p.d) + (p.pairs + VL - 1) / VL * VL) {
    const int64_t heads = (p.group + kAtOnce - 1) / kAtOnce * kAtOnce;
    worker = heads * width + VL * width + kAtOnce * VL * VL;
  }
};

template <class T>
struct Trig {
  const TrigScoresParams& p;
  const Scratch sizes;
  float *heads, *keys, *sums;  // [group padded to kAtOnce][width], [VL][width], [kAtOnce][VL][VL]
  int64_t taken = -1;

  Trig(const TrigScoresParams& p_, float* memory)
      : p(p_),
        sizes(p_),
        heads(memory),
        keys(memory + (p_.group + kAtOnce - 1) / kAtOnce * kAtOnce * sizes.width),
        sums(keys + VL * sizes.width) {}

  void take_head(int64_t b, int64_t h) {
    memset(heads, 0, 4 * (keys - heads));
    for (int64_t g = 0; g < p.group; ++g) {
      float* const to = heads + g * sizes.width;
      memcpy(to, p.centers.row(b, h * p.group + g), 4 * p.d);
      if (p.pairs) memcpy(to + float_width(p.d), p.norms.row(b, h * p.group + g), 4 * p.pairs);
    }
  }

  // Writes the norms of a key's pairs, and zeros up to a whole vector. The last loads can pass the pairs, but not the
  // padded row.
  void norms(const float* key, float* to) const {
    const int64_t pairs = p.pairs;
    const bool interleaved = p.interleaved;
    for (int64_t f = 0; f < pairs; f += VL) {
      const F low = load(key + (interleaved ? 2 * f : f)), high = load(key + (interleaved ? 2 * f + VL : pairs + f));
      const F x = interleaved ? evens(low, high) : low, y = interleaved ? odds(low, high) : high;
      store(to + f, sqrt(x * x + y * y));
    }
    for (int64_t f = pairs; f % VL; ++f) to[f] = 0;
  }

  void operator()(int64_t head, int64_t begin, int64_t end) {
    const int64_t b = head / p.heads, h = head % p.heads, width = sizes.width, channels = float_width(p.d);
    if (head != taken) take_head(b, h);
    taken = head;
    const Rows<T> rows{p.k.head(b, h), end, p.d, row_shape<T>(p.k.row_bytes)};
    for (int64_t first = begin; first < end; first += VL) {
      const T* row[VL];
      int64_t far[VL];
      rows.template take<VL>(first, end, row);
      rows.template ahead<VL>(first, 2 * VL, row, far);
      for (int r = 0; r < VL; ++r) {
        float* const key = keys + r * width;
        prefetch_row(reinterpret_cast<const char*>(row[r]) + far[r], p.k.row_bytes);
        to_floats(row[r], rows.shape, channels, key);
        norms(key, key + channels);
      }
      const int64_t count = end - first < VL ? end - first : VL;
      for (int64_t g = 0; g < p.group; g += kAtOnce) {
        multiply(heads + g * width);
        for (int64_t i = 0; i < kAtOnce && g + i < p.group; ++i)
          store_scores(sums + i * VL * VL, count, p.scale, p.scores + (head * p.group + g + i) * p.n + first);
      }
    }
  }

  // sums[g][r] = the lanes' parts of the product of key r and query head g.
  void multiply(const float* of_heads) const {
    const int64_t width = sizes.width;
    const float* key = keys;
    float* to = sums;
    for (int r = 0; r < VL; r += kAtOnce, key += kAtOnce * width, to += kAtOnce * VL) {
      F x[kAtOnce][kAtOnce] = {};
      for (int64_t c = 0; c < width; c += VL) {
        F q[kAtOnce];
        for (int g = 0; g < kAtOnce; ++g) q[g] = load(of_heads + g * width + c);
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce; ++i) {
          const F k = load(key + i * width + c);
          for (int g = 0; g < kAtOnce; ++g) x[i][g] += k * q[g];
        }
      }
      for (int i = 0; i < kAtOnce; ++i)
        for (int g = 0; g < kAtOnce; ++g) store(to + (g * VL + i) * VL, x[i][g]);
    }
  }
};

}  // namespace

void trig_scores(const TrigScoresParams& p, Call& call) {
  const Scratch sizes(p);
  const Workers workers = workers_for(call, p.b * p.heads * p.n * p.k.row_bytes, sizes.worker);
  with_read_dtype(p.dtype, [&](auto type) {
    for_runs(p, p.scores, p.group, workers, sizes.worker, kRun, [&](float* memory) {
      return [own = Trig<decltype(type)>(p, memory)](int64_t head, int64_t begin, int64_t end) mutable {
        own(head, begin, end);
      };
    });
  });
}

}  // namespace kvops::KVOPS_ISA
