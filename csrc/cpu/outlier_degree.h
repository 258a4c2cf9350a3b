// ProtoKV outlier degree on the CPU.
//
//   S_i = mean over valid |j - i| <= kappa of cos(k_i, k_j)        Theta_i = (E[S] - S_i) / sqrt(Var[S])
//
// Bytes that must move: K once, the scores twice (they stay in the cache). The sum of the unit keys in the window
// slides along the tokens: one row enters and one leaves, so the time does not depend on kappa. A token's S is the dot
// product of its unit key and that sum. The row that enters comes from memory; the token's own row and the one that
// leaves are still in the cache.
//
// A sliding sum accumulates the rounding of every step, so each block of tokens starts a new one. The block size
// depends on kappa alone, so that results do not depend on the number of threads, and is large enough that the rows a
// block shares with its neighbours do not matter. Each block records its count, mean and sum of squared deviations in
// fp64. These are combined in order, and a last pass over the scores standardizes them.
//
// The kernel reaches 80 % of the read bandwidth in fp32, 87 % in bf16 (bench/results/cpu-protokv.json). Two things made
// the difference: rows ahead are prefetched while the sums slide, not only during the pass for norms, so memory is
// never idle; and tiles without gaps need no bookkeeping per row.
//
// Rows are processed in tiles (unit_keys.h). A row that is no neighbour (outside, or not finite) is replaced by a row
// of zeros. Tiles with a key whose squared norm is outside the safe fp32 range are redone in double.
#include "../dispatch.h"
#include "../ops/outlier_degree.h"
#include "unit_keys.h"

namespace kvops::KVOPS_ISA {
namespace {

// VL steps of a sum of unit keys: row r of `leave` is subtracted, row r of `enter` is added, then dots[r] = row r of
// `here` . sum.
template <class T>
struct Slide {
  const T *enter[VL], *here[VL], *leave[VL];
  float in[VL], out[VL];  // 1/|k| of the entering and leaving rows
  int64_t far[VL];        // byte offset from `enter` to the rows to prefetch

  // Processes G registers; their sums stay in registers for all steps.
  template <int G, class Load>
  void step(int c, float* total, F* dots, const Load& load_register) const {
    constexpr int N = kVecs<T>;
    F sums[G * N];
    for (int j = 0; j < G * N; ++j) sums[j] = load(total + j * VL);
    for (int r = 0; r < VL; ++r) {
      F dot = dots[r];
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        F x[N], y[N], z[N];
        prefetch(enter[r], c + g, far[r]);
        load_register(enter[r], g, x);
        load_register(leave[r], g, y);
        load_register(here[r], g, z);
        for (int j = 0; j < N; ++j) {
          sums[g * N + j] += x[j] * in[r];
          sums[g * N + j] -= y[j] * out[r];
          dot += z[j] * sums[g * N + j];
        }
      }
      dots[r] = dot;
    }
    for (int j = 0; j < G * N; ++j) store(total + j * VL, sums[j]);
  }

  F dots(RowShape shape, float* total) const {
    constexpr int G = 8 / kVecs<T>;
    F dots[VL] = {};
    int c = 0;
    const auto whole = [&](const T* row, int g, F* out) { load(row + (c + g) * kStep<T>, out); };
    for (; c + G <= shape.full; c += G) step<G>(c, total + c * kStep<T>, dots, whole);
    for (; c < shape.full; ++c) step<1>(c, total + c * kStep<T>, dots, whole);
    if (shape.part)
      step<1>(c, total + c * kStep<T>, dots,
              [&](const T* row, int, F* out) { load_part(row + c * kStep<T>, shape.part, out); });
    return sum_lanes(dots);
  }
};

// Whether every entry is an actual 1/|k|: no gap, and no key to redo in double.
inline bool all_plain(F inverse) {
  return !any_nan(inverse >= 0.0f ? inverse : splat(__builtin_nanf("")));
}

// The tokens of one head, and a worker's scratch for one block of them.
template <class T>
struct Neighbourhood {
  const Rows<T> rows;  // the valid slots
  const int64_t kappa;
  float* total;    // the window's sum, in register order
  T* zeros;        // one row of zeros
  float* inverse;  // [1 + kappa + block + kappa + VL]: 1/|k| from token `first - kappa - 1` on; NaN: not a neighbour
  int64_t first = 0;

  float& inverse_of(int64_t i) const { return inverse[i - first + kappa + 1]; }
  const T* row(int64_t i) const { return inverse_of(i) == inverse_of(i) ? rows.row(i) : zeros; }
  float weight(int64_t i) const { return inverse_of(i) == inverse_of(i) ? inverse_of(i) : 0.0f; }

  // total += sign * k_i / |k_i|, in double.
  void add_carefully(int64_t i, double sign) const {
    const double factor = sign * careful_inverse(i);
    const T* const x = row(i);
    for (int64_t c = 0; c < rows.d; ++c) total[channel_slot<T>(c)] += static_cast<float>(to_float(x[c]) * factor);
  }
  double careful_inverse(int64_t i) const {
    return inverse_of(i) == kRedo ? 1 / careful_norm(rows.row(i), rows.d) : weight(i);
  }

  // Computes the similarities of tokens [begin, end).
  void block(int64_t begin, int64_t end, float* similarity) {
    first = begin;
    const int64_t from = begin < kappa ? 0 : begin - kappa, to = end + kappa < rows.count ? end + kappa : rows.count;
    const int64_t warm =
        begin + kappa < rows.count ? begin + kappa : rows.count;  // rows before this start in the window
    for (int64_t i = begin - kappa - 1; i < end + kappa + VL; ++i) inverse_of(i) = __builtin_nanf("");
    for (int64_t c = 0; c < rows.shape.registers() * kStep<T>; ++c) total[c] = 0.0f;
    for (int64_t i = from; i < warm; i += VL) norms(rows, i, warm, &inverse_of(i), total, true);
    int64_t neighbours = 0;
    for (int64_t i = from; i < warm; ++i) neighbours += inverse_of(i) == inverse_of(i);
    for (int64_t i = begin; i < end; i += VL) {
      if (i + kappa < to) norms(rows, i + kappa, to, &inverse_of(i + kappa), nullptr, true);
      const int64_t tokens = end - i < VL ? end - i : VL;
      float own[VL], of[VL];  // the token's 1/|k|, and its number of neighbours
      Slide<T> slide;
      const F in = load(&inverse_of(i + kappa)), here = load(&inverse_of(i)), out = load(&inverse_of(i - kappa - 1));
      bool redo = false;
      if (neighbours == 2 * kappa + 1 && all_plain(in) && all_plain(here) && all_plain(out)) {  // the common case
        store(slide.in, in);
        store(slide.out, out);
        store(own, here);
        store(of, splat(static_cast<float>(neighbours)));
        rows.template take<VL>(i + kappa, i + kappa + VL, slide.enter);
        rows.template take<VL>(i, i + VL, slide.here);
        rows.template take<VL>(i - kappa - 1, i - kappa - 1 + VL, slide.leave);
      } else {
        for (int64_t r = 0; r < VL; ++r) {
          const int64_t token = r < tokens ? i + r : i + tokens - 1;
          const int64_t next = token + kappa, last = token - kappa - 1;
          neighbours += (inverse_of(next) == inverse_of(next)) - (inverse_of(last) == inverse_of(last));
          of[r] = static_cast<float>(neighbours);
          own[r] = inverse_of(token);
          slide.enter[r] = row(next);
          slide.here[r] = row(token);
          slide.leave[r] = row(last);
          slide.in[r] = weight(next);
          slide.out[r] = weight(last);
          redo |= slide.in[r] == kRedo || own[r] == kRedo || slide.out[r] == kRedo;
        }
      }
      // Prefetch before the next tile's norms do.
      rows.template ahead<VL>(i + kappa, kAheadRows + VL, slide.enter, slide.far);
      if (__builtin_expect(!redo, 1)) {
        store_first(similarity + i, slide.dots(rows.shape, total) * load(own) / load(of), tokens);
        continue;
      }
      for (int64_t r = 0; r < tokens; ++r) {
        add_carefully(i + r + kappa, 1);
        add_carefully(i + r - kappa - 1, -1);
        double dot = 0;
        for (int64_t c = 0; c < rows.d; ++c) dot += double(to_float(slide.here[r][c])) * total[channel_slot<T>(c)];
        const double factor = own[r] == own[r] ? careful_inverse(i + r) : __builtin_nan("");
        similarity[i + r] = static_cast<float>(dot * factor / of[r]);
      }
    }
  }
};

// The number of values, their mean, and the sum of squared deviations from it. NaN entries do not count.
struct Moments {
  double count, mean, squares;

  static Moments of(const float* x, int64_t n) {
    D numbers{}, total{}, squares{};
    const auto each = [&](const auto& fn) {
      for (int64_t i = 0; i < n; i += VL) {
        const Doubles wide = to_double(load_first(x + i, n - i < VL ? n - i : VL, __builtin_nanf("")));
        fn(wide.low), fn(wide.high);
      }
    };
    each([&](D x) {
      numbers += x == x ? D{} + 1 : D{};
      total += x == x ? x : D{};
    });
    const double count = sum(numbers), mean = sum(total) / count;
    each([&](D x) { squares += x == x ? (x - mean) * (x - mean) : D{}; });
    return {count, mean, sum(squares)};
  }
  void add(const Moments& x) {
    if (x.count == 0) return;
    const double sum = count + x.count, apart = x.mean - mean;
    squares += x.squares + apart * apart * count * x.count / sum;
    mean += apart * x.count / sum;
    count = sum;
  }
};

// How a call is split, and its scratch in floats: three fp64 moments per block; per worker two rows and the inverse
// norms around a block.
struct Scratch {
  int64_t tokens, blocks;  // in a block; of a head
  int64_t moments, row, worker;

  explicit Scratch(const OutlierDegreeParams& p) {
    tokens = (128 + 8 * p.kappa + 15) / 16 * 16;
    blocks = (p.n + tokens - 1) / tokens;
    moments = (6 * p.b * p.heads * blocks + 15) / 16 * 16;
    row = (p.d + 31) / 32 * 32;
    worker = 2 * row + (1 + tokens + 2 * p.kappa + 16 + 15) / 16 * 16;
  }
};

template <class T>
void score_heads(const OutlierDegreeParams& p, const Scratch& sizes, const Workers& workers) {
  const int64_t heads = p.b * p.heads, tokens = sizes.tokens;
  Moments* const moments = reinterpret_cast<Moments*>(workers.workspace);
  float* const own = workers.workspace + sizes.moments;
  parallel_for(workers, workers.count, [&](int64_t worker) {
    float* const total = own + worker * sizes.worker;
    T* const zeros = reinterpret_cast<T*>(total + sizes.row);
    memset(zeros, 0, 4 * sizes.row);
    const Share items = share(heads * sizes.blocks, worker, workers.count);
    for (int64_t item = items.first; item < items.last; ++item) {
      const int64_t index = item / sizes.blocks, block = item % sizes.blocks, b = index / p.heads;
      const int64_t first = p.slots.first(b), count = p.slots.count(b);
      float* const scores = p.scores + index * p.n;
      if (block == 0) {
        for (int64_t i = 0; i < first; ++i) scores[i] = __builtin_nanf("");
        for (int64_t i = first + count; i < p.n; ++i) scores[i] = __builtin_nanf("");
      }
      const int64_t begin = block * tokens, end = count - begin < tokens ? count : begin + tokens;
      moments[item] = {0, 0, 0};
      if (begin >= end) continue;
      const Rows<T> rows{p.k.head(b, index % p.heads).from(first), count, p.d, row_shape<T>(p.k.row_bytes)};
      Neighbourhood<T> here{rows, p.kappa, total, zeros, total + 2 * sizes.row};
      here.block(begin, end, scores + first);
      if (p.standardize) moments[item] = Moments::of(scores + first + begin, end - begin);
    }
  });
  if (!p.standardize) return;
  parallel_for(workers, heads, [&](int64_t index) {
    Moments all{0, 0, 0};
    for (int64_t block = 0; block < sizes.blocks; ++block) all.add(moments[index * sizes.blocks + block]);
    const double spread = __builtin_sqrt(all.squares / all.count);
    const double factor = spread > kFlatSimilarity ? 1 / spread : 0.0;
    float* const scores = p.scores + index * p.n;
    for (int64_t i = 0; i < p.n; ++i) scores[i] = static_cast<float>((all.mean - scores[i]) * factor);
  });
}

}  // namespace

void outlier_degree(const OutlierDegreeParams& p, Call& call) {
  const Scratch sizes(p);
  const Workers workers = workers_for(call, p.b * p.heads * p.n * p.k.row_bytes, sizes.worker, sizes.moments);
  with_read_dtype(p.dtype, [&](auto type) { score_heads<decltype(type)>(p, sizes, workers); });
}

}  // namespace kvops::KVOPS_ISA
