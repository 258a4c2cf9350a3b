// R-KV's redundancy on the CPU: the mean cosine of a key with all others, without the pairs that are spared.
//
//   last_i  = the last j != i with cos(k_i, k_j) > threshold, if any
//   score_j = (sum over i != j with last_i != j of cos(k_i, k_j)) / number of keys
//
// The sum over all i is linear: it is the product with the sum of the unit keys, which anchor_cosine has computed. So
// only last_i needs products of pairs, n^2 d multiply-adds at most, and these never leave the registers. The search
// starts from the end of the row and drops a key when it has found its last similar one. Keys that have one nearby, as
// cached keys mostly do, never meet the rest of the row.
//
// Bytes that must move: K once for the norms, and once per kRun keys for the search. A worker takes kRun keys of a head
// and packs panels of kPanel keys, last first, 16 to a vector (operands.h); the panel stays in L2 while the keys of the
// run that still search pass over it, 48 at a time. The products are exact: bf16 pairs for bf16 and fp8 keys where the
// level has them, floats otherwise. So a pair is similar on every machine unless its cosine is within fp32's rounding
// of the threshold. On 8 heads of 2048 random keys, d 128, where no key finds one, the kernel takes 0.8 (fp32) or 1.2
// (bf16) times as long as torch.matmul of K with K; if each key has a similar one near the end, a twelfth or less of it
// (bench/results/cpu-products.json).
//
// Keys whose squared norm is outside the safe fp32 range are scaled by a power of two first; their inverse norm, stored
// negative, is the scaled key's. A zero key's is 0 and a non-finite key's NaN, so that neither passes a comparison.
//
// At the end each head adds up, in ascending order and in double, what its keys are spared. No result depends on the
// number of threads.
#include "../dispatch.h"
#include "../ops/key_similarity.h"
#include "operands.h"
#include "unit_keys.h"

namespace kvops::KVOPS_ISA {
namespace {

constexpr int kKeys = 48, kPanel = 128;
constexpr int64_t kRun = 32 * kKeys;
static_assert(kKeys % VL == 0 && kKeys % kKeysAtOnce<kVectors> == 0 && kPanel % (kVectors * VL) == 0);

// A worker's scratch, in floats. Every array starts on a cache line.
struct Scratch {
  int64_t packed, keys, best, spared, worker;

  explicit Scratch(const KeySimilarityParams& p) {
    const int64_t width = most_operand_words(p.d);
    packed = kPanel * width;
    keys = kKeys * width;
    best = 2 * kKeys * 16;
    spared = (2 * p.n + 15) / 16 * 16;  // doubles
    worker = packed + keys + best + kPanel + kRun + spared;
  }
};

// What the first passes leave about each key, [b, Hk, n].
struct Found {
  float* inverse;  // 1/|k|; see above
  int32_t* last;   // last_i, or -1
  float* cosine;   // with it
};

// The power of two that brings a key's squared norm, which is not, into the safe range.
template <class T>
double rescaling(const T* row, int64_t d) {
  return careful_norm(row, d) < 1 ? 0x1p100 : 0x1p-80;
}

// Tokens [first, last) of a head: their inverse norms.
template <class T>
void inverse_norms(const Rows<T>& rows, int64_t first, int64_t last, float* inverse) {
  for (int64_t i = first; i < last; i += VL) {
    norms(rows, i, last, inverse + i, nullptr, true);
    for (int64_t r = i; r < last && r < i + VL; ++r) {
      if (inverse[r] != kRedo) continue;
      const T* const row = rows.row(r);
      inverse[r] = static_cast<float>(-1 / (careful_norm(row, rows.d) * rescaling(row, rows.d)));
    }
  }
}

template <class T>
struct Searcher {
  typedef typename ExactOperand<T>::type P;
  const KeySimilarityParams& p;
  const int64_t words;   // in a row of operands
  float *packed, *keys;  // [kPanel][words], [kKeys][words]
  float* best;           // [kKeys][VL]: the cosine with the last similar key of each lane
  int32_t* which;        // [kKeys][VL]: the vector of the panel that holds it, or -1
  float* panel_inverse;  // [kPanel]
  int32_t* searching;    // [kRun]: the keys that have found none yet
  double* spared;        // [n]

  Searcher(const KeySimilarityParams& p_, float* memory) : p(p_), words(operand_words<P, T>(p_.k.row_bytes)) {
    const Scratch sizes(p);
    packed = memory;
    keys = packed + sizes.packed;
    best = keys + sizes.keys;
    which = reinterpret_cast<int32_t*>(best + kKeys * VL);
    panel_inverse = best + sizes.best;
    searching = reinterpret_cast<int32_t*>(panel_inverse + kPanel);
    spared = reinterpret_cast<double*>(panel_inverse + kPanel + kRun);
  }

  // Finds the last similar key of each of the keys [begin, end).
  void search(const Rows<T>& rows, int64_t begin, int64_t end, const Found& found) {
    int64_t left = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (found.inverse[i] < 0 || found.inverse[i] > 0) searching[left++] = static_cast<int32_t>(i);
    }
    for (int64_t upto = rows.count; upto > 0 && left > 0;) {
      const int64_t from = (upto - 1) / kPanel * kPanel;
      const int64_t vectors = take_panel(rows, found.inverse, from, upto);
      for (int64_t i = 0; i < left; i += kKeys)
        meet(rows, searching + i, static_cast<int>(left - i < kKeys ? left - i : kKeys), from, vectors, found);
      int64_t still = 0;
      for (int64_t i = 0; i < left; ++i)
        if (found.last[searching[i]] < 0) searching[still++] = searching[i];
      left = still;
      upto = from;
    }
  }

  // Packs keys [from, upto).
  int64_t take_panel(const Rows<T>& rows, const float* inverse, int64_t from, int64_t upto) {
    const int64_t vectors = (upto - from + VL - 1) / VL;
    memset(packed, 0, 4 * vectors * VL * words);
    for (int64_t lane = 0; lane < vectors * VL; ++lane) {
      const float its = from + lane < upto ? inverse[from + lane] : 0.0f;
      panel_inverse[lane] = its < 0 ? -its : its;
      if (from + lane >= upto) continue;
      const T* const row = rows.row(from + lane);
      const double scale = its < 0 ? rescaling(row, rows.d) : 1.0;
      pack_row<P, T>(packed, lane, vectors, words, rows.d,
                     [&](int64_t c) { return static_cast<float>(to_float(row[c]) * scale); });
    }
    return vectors;
  }

  // Compares keys `own`, at most kKeys, with the panel that starts at `from`.
  void meet(const Rows<T>& rows, const int32_t* own, int count, int64_t from, int64_t vectors, const Found& found) {
    const char* lie[kKeys];
    for (int i = 0; i < count; ++i) {
      const T* const row = rows.row(own[i]);
      const bool scaled = found.inverse[own[i]] < 0;
      lie[i] = reinterpret_cast<const char*>(row);
      if (kAsStored<P, T> && !scaled) continue;
      P* const to = reinterpret_cast<P*>(keys + i * words);
      convert_row(row, rows.shape, to);
      if (scaled) {
        const double scale = rescaling(row, rows.d);
        for (int64_t c = 0; c < rows.d; ++c)
          from_float(static_cast<float>(to_float(row[c]) * scale), to + operand_slot<P, T>(c));
      }
      lie[i] = reinterpret_cast<const char*>(to);
    }
    const Block block{0, count, nullptr, 0, lie};
    for (int i = 0; i < kKeys * VL; ++i) which[i] = -1;
    I lane;
    for (int i = 0; i < VL; ++i) lane[i] = i;
    multiply_packed<P>(block, packed, vectors, words, [&](auto n, int64_t vector, int key, auto& sums) {
      constexpr int N = decltype(n)::value;
      F inverse[N];
      for (int v = 0; v < N; ++v) inverse[v] = load(panel_inverse + (vector + v) * VL);
      for (int k = 0; k < kKeysAtOnce<N> && key + k < count; ++k) {
        const float its = found.inverse[own[key + k]], scale = its < 0 ? -its : its;
        const int32_t self = static_cast<int32_t>(own[key + k] - from);
        F top = load(best + (key + k) * VL);
        I at;
        memcpy(&at, which + (key + k) * VL, VB);
        for (int v = 0; v < N; ++v) {
          const F cosine = sums[k][v] * inverse[v] * scale;
          const int32_t first = static_cast<int32_t>(vector + v);
          const I similar = (cosine > p.threshold) & (lane != self - first * VL);
          top = similar ? cosine : top;
          at = similar ? I{} + first : at;
        }
        store(best + (key + k) * VL, top);
        memcpy(which + (key + k) * VL, &at, VB);
      }
    });
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < VL; ++j) {
        const int32_t vector = which[i * VL + j], at = static_cast<int32_t>(from) + vector * VL + j;
        if (vector < 0 || at <= found.last[own[i]]) continue;
        found.last[own[i]] = at;
        found.cosine[own[i]] = best[i * VL + j];
      }
  }

  // The scores of a head, from its cosines with the sum of all unit keys.
  void finish(int64_t count, const float* anchor, const Found& found, float* scores) const {
    double squares = 0;
    for (int64_t c = 0; c < p.d; ++c) squares += double(anchor[c]) * anchor[c];
    const double length = __builtin_sqrt(squares);
    int64_t finite = 0, zero = 0;
    for (int64_t i = 0; i < count; ++i) {
      spared[i] = 0;
      finite += found.inverse[i] == found.inverse[i];
      zero += found.inverse[i] == 0;
    }
    const bool alone = finite - zero < 2;  // no pair of keys has a cosine but 0
    for (int64_t i = 0; i < count; ++i)
      if (found.last[i] >= 0) spared[found.last[i]] += found.cosine[i];
    for (int64_t i = 0; i < count; ++i) {  // NaN and 0 stay as they are
      const double itself = found.inverse[i] != 0;
      const double others = alone ? scores[i] - scores[i] : -scores[i] * length - itself - spared[i];
      scores[i] = static_cast<float>(others / static_cast<double>(finite));
    }
  }
};

template <class T>
void score_heads(const KeySimilarityParams& p, const Workers& workers) {
  const int64_t heads = p.b * p.heads, splits = (p.n + kRun - 1) / kRun, size = Scratch(p).worker;
  float* const shared = workers.workspace + workers.count * size;
  const auto found_in = [&](int64_t index) {
    const int64_t at = index * p.n, all = heads * p.n;
    return Found{shared + at, reinterpret_cast<int32_t*>(shared + all) + at, shared + 2 * all + at};
  };
  const auto rows_of = [&](int64_t index) {
    const int64_t b = index / p.heads;
    return Rows<T>{p.k.head(b, index % p.heads).from(p.slots.first(b)), p.slots.count(b), p.d,
                   row_shape<T>(p.k.row_bytes)};
  };
  const auto for_runs = [&](const auto& fn) {
    parallel_for(workers, workers.count, [&](int64_t worker) {
      Searcher<T> mine(p, workers.workspace + worker * size);
      const Share items = share(heads * splits, worker, workers.count);
      for (int64_t item = items.first; item < items.last; ++item) {
        const Rows<T> rows = rows_of(item / splits);
        const int64_t begin = item % splits * kRun, end = rows.count - begin < kRun ? rows.count : begin + kRun;
        fn(mine, rows, begin, end, found_in(item / splits));
      }
    });
  };
  for_runs([&](Searcher<T>&, const Rows<T>& rows, int64_t begin, int64_t end, const Found& found) {
    inverse_norms(rows, begin, end, found.inverse);
    for (int64_t i = begin; i < end; ++i) found.last[i] = -1;
  });
  if (p.threshold < 1)
    for_runs([&](Searcher<T>& mine, const Rows<T>& rows, int64_t begin, int64_t end, const Found& found) {
      mine.search(rows, begin, end, found);
    });
  parallel_for(workers, workers.count, [&](int64_t worker) {
    const Searcher<T> mine(p, workers.workspace + worker * size);
    const Share own = share(heads, worker, workers.count);
    for (int64_t index = own.first; index < own.last; ++index) {
      const int64_t b = index / p.heads;
      mine.finish(p.slots.count(b), p.anchor + index * p.d, found_in(index), p.scores + index * p.n + p.slots.first(b));
    }
  });
}

}  // namespace

void key_similarity(const KeySimilarityParams& p, Call& call) {
  const int64_t tokens = p.b * p.heads * p.n;
  // 32 products take about as long as reading a byte.
  const Workers workers = workers_for(call, tokens * p.d * (p.n / 32 + 1), Scratch(p).worker, 3 * tokens);
  with_read_dtype(p.dtype, [&](auto type) { score_heads<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
