// ProtoKV's outlier degree on the CPU.
//
//   S_i = mean over valid |j - i| <= kappa of cos(k_i, k_j)        Theta_i = (E[S] - S_i) / sqrt(Var[S])
//
// Bytes that must move: K once, the scores twice (they stay in the cache). The sum of the window's unit keys slides
// along the tokens: one row enters, one leaves, so the time does not depend on kappa; a token's S is the product of its
// unit key with that sum. The row that enters comes from memory, the token's own and the one that leaves are still in
// the cache.
//
// A sum that slides collects the rounding of every step, so it starts anew with each block of tokens: of a size that
// depends on kappa alone, so that no result depends on the number of threads, and large enough for the rows that a
// block shares with its neighbours not to matter. Each block leaves its count, mean and sum of squared deviations, in
// fp64; they are combined in order, and a last pass over the scores standardizes them.
//
// Rows go in tiles (unit_keys.h). A row that is no neighbour (outside, not finite) is a row of zeros in its place;
// tiles with a key whose squared norm is not a comfortable float are done in double.
#include "../dispatch.h"
#include "../ops/outlier_degree.h"
#include "unit_keys.h"

namespace kvops::KVOPS_ISA {
namespace {

// sum(lanes) += row[r] of `enter`, dots[r] = row[r] of `here` . sum, sum -= row[r] of `leave`, for r in turn.
template <class T>
struct Slide {
  const T *enter[VL], *here[VL], *leave[VL];
  float in[VL], out[VL];  // 1/|k| of the rows that enter and leave

  F dots(RowShape shape, float* total) const {
    F dots[VL] = {};
    for_registers<T>(shape, [&](int64_t c, auto&& load_row) {
      F sums[kVecs<T>];
      for (int j = 0; j < kVecs<T>; ++j) sums[j] = load(total + (c * kVecs<T> + j) * VL);
#pragma GCC unroll 16
      for (int r = 0; r < VL; ++r) {
        F x[kVecs<T>];
        load_row(enter[r], x);
        for (int j = 0; j < kVecs<T>; ++j) sums[j] += x[j] * in[r];
        load_row(here[r], x);
        for (int j = 0; j < kVecs<T>; ++j) dots[r] += x[j] * sums[j];
        load_row(leave[r], x);
        for (int j = 0; j < kVecs<T>; ++j) sums[j] -= x[j] * out[r];
      }
      for (int j = 0; j < kVecs<T>; ++j) store(total + (c * kVecs<T> + j) * VL, sums[j]);
    });
    return sum_lanes(dots);
  }
};

// The tokens of one head, and what a worker needs for a block of them.
template <class T>
struct Neighbourhood {
  const Rows<T> rows;  // from the first valid slot
  const int64_t count, kappa;
  float* total;    // the window's sum, in the order of registers
  T* zeros;        // a row
  float* inverse;  // [kappa + block + kappa + VL]: 1/|k| from token `first - kappa` on; NaN: no neighbour
  int64_t first = 0;

  float& inverse_of(int64_t i) const { return inverse[i - first + kappa]; }
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

  // The similarities of tokens [begin, end).
  void block(int64_t begin, int64_t end, float* similarity) {
    first = begin;
    const int64_t from = begin < kappa ? 0 : begin - kappa, to = end + kappa < count ? end + kappa : count;
    const int64_t warm = begin + kappa < count ? begin + kappa : count;  // rows below are in the first window, but one
    for (int64_t i = begin - kappa; i < end + kappa + VL; ++i) inverse_of(i) = __builtin_nanf("");
    for (int64_t c = 0; c < rows.shape.registers() * kStep<T>; ++c) total[c] = 0.0f;
    for (int64_t i = from; i < warm; i += VL) norms(rows, i, warm, &inverse_of(i), total, true);
    int64_t neighbours = 0;
    for (int64_t i = from; i < warm; ++i) neighbours += inverse_of(i) == inverse_of(i);
    for (int64_t i = begin; i < end; i += VL) {
      if (i + kappa < to) norms(rows, i + kappa, to, &inverse_of(i + kappa), nullptr, true);
      const int64_t tokens = end - i < VL ? end - i : VL;
      float own[VL], of[VL];  // 1/|k|, neighbours
      Slide<T> slide;
      bool redo = false;
      for (int64_t r = 0; r < VL; ++r) {
        const int64_t token = r < tokens ? i + r : i + tokens - 1;
        neighbours += inverse_of(token + kappa) == inverse_of(token + kappa);
        of[r] = static_cast<float>(neighbours);
        own[r] = inverse_of(token);
        neighbours -= inverse_of(token - kappa) == inverse_of(token - kappa);
        slide.enter[r] = row(token + kappa);
        slide.here[r] = row(token);
        slide.leave[r] = row(token - kappa);
        slide.in[r] = weight(token + kappa);
        slide.out[r] = weight(token - kappa);
        redo |= slide.in[r] == kRedo || own[r] == kRedo || slide.out[r] == kRedo;
      }
      if (__builtin_expect(!redo, 1)) {
        store_first(similarity + i, slide.dots(rows.shape, total) * load(own) / load(of), tokens);
        continue;
      }
      for (int64_t r = 0; r < tokens; ++r) {
        add_carefully(i + r + kappa, 1);
        double dot = 0;
        for (int64_t c = 0; c < rows.d; ++c) dot += double(to_float(slide.here[r][c])) * total[channel_slot<T>(c)];
        const double factor = own[r] == own[r] ? careful_inverse(i + r) : __builtin_nan("");
        similarity[i + r] = static_cast<float>(dot * factor / of[r]);
        add_carefully(i + r - kappa, -1);
      }
    }
  }
};

// How many values, their mean and the sum of squared deviations from it; NaN is no value.
struct Moments {
  double count, mean, squares;

  static Moments of(const float* x, int64_t n) {
    Moments all{0, 0, 0};
    for (int64_t i = 0; i < n; ++i)
      if (x[i] == x[i]) all.count += 1, all.mean += x[i];
    if (all.count > 0) all.mean /= all.count;
    for (int64_t i = 0; i < n; ++i)
      if (x[i] == x[i]) all.squares += (x[i] - all.mean) * (x[i] - all.mean);
    return all;
  }
  void add(const Moments& x) {
    if (x.count == 0) return;
    const double sum = count + x.count, apart = x.mean - mean;
    squares += x.squares + apart * apart * count * x.count / sum;
    mean += apart * x.count / sum;
    count = sum;
  }
};

template <class T>
void score_heads(const OutlierDegreeParams& p, const Workers& workers) {
  const OutlierScratch sizes(p);
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
      const Rows<T> rows{p.k.row(b, index % p.heads, first), p.k.stride_n, p.d, row_shape<T>(p.k.row_bytes)};
      Neighbourhood<T> here{rows, count, p.kappa, total, zeros, total + 2 * sizes.row};
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

void outlier_degree(const OutlierDegreeParams& p, const Workers& workers) {
  with_dtype(p.dtype, [&](auto type) { score_heads<decltype(type)>(p, workers); });
}

}  // namespace kvops::KVOPS_ISA
