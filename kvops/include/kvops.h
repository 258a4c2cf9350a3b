// kvops' operators as C++ functions, over torch's stable ABI. C++20; torch >= 2.10.
//
//   torch::stable::Tensor kept = kvops::select_topk(scores, 1024, {.sinks = 4, .window = 64});
//
// Arguments with a default are fields of the operator's options, named in order. What an operator computes and expects:
// docs/operators.md and `help(kvops.ops.select_topk)` in Python. Errors are std::runtime_error. Their message names the
// argument if the torch that runs is 2.13 or newer; before that it is in torch's log. kvops_aten.h converts at::Tensor.
// The program must link or load libkvops.so and, for CUDA tensors, libkvops_cuda.so.
//
// tools/tables.py writes the functions, from csrc/schema.cpp.
#pragma once
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Null before torch 2.13.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

#pragma GCC visibility push(hidden)  // as torch's tensors are
namespace kvops {

using torch::stable::Tensor;

// How several values are reduced to one: the rows of a window, the query heads of a group, or the tokens of a cluster.
enum class Reduce : int64_t { sum, mean, max, none };

// What window_scores adds up: softmax weights or dot products.
enum class Score : int64_t { softmax, dot };

namespace detail {

template <class T>
StableIValue value(const T& x) {
  if constexpr (std::is_enum_v<T>)
    return torch::stable::detail::from(static_cast<int64_t>(x));
  else
    return torch::stable::detail::from(x);
}

template <class... Results, class... Arguments>
auto call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, std::max(sizeof...(Arguments), sizeof...(Results))> stack{value(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    if (torch_exception_get_what_without_backtrace)
      throw std::runtime_error(torch_exception_get_what_without_backtrace());
    throw std::runtime_error(std::string(name) + " failed; torch's log says why");
  }
  return [&]<size_t... I>(std::index_sequence<I...>) {
    if constexpr (sizeof...(Results) == 1)
      return torch::stable::detail::to<Results...>(stack[0]);
    else if constexpr (sizeof...(Results) > 1)
      return std::tuple<Results...>{torch::stable::detail::to<Results>(stack[I])...};
  }(std::make_index_sequence<sizeof...(Results)>());
}

}  // namespace detail

// operators

struct LagScoreOptions {
  int64_t prefix = 0;
  double v_weight = 1.0;
  bool self_reference = false;
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Score tokens as LagKV does: by their spread over channels, normalized by the range of the next partition.
inline Tensor lag_score(const Tensor& k, const Tensor& v, int64_t lag, const LagScoreOptions& options = {}) {
  return detail::call<Tensor>("kvops::lag_score", "", k, v, lag, options.prefix, options.v_weight,
                              options.self_reference, options.starts, options.lengths, options.block_table);
}

struct AnchorCosineOptions {
  std::optional<Tensor> anchor{};
  bool normalize_anchor = true;
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Score keys as KeyDiff does: by their negative cosine similarity to the mean key (the anchor).
inline std::tuple<Tensor, Tensor> anchor_cosine(const Tensor& k, const AnchorCosineOptions& options = {}) {
  return detail::call<Tensor, Tensor>("kvops::anchor_cosine", "", k, options.anchor, options.normalize_anchor,
                                      options.starts, options.lengths, options.block_table);
}

struct WindowScoresOptions {
  std::optional<Tensor> lse{};
  std::optional<double> scale{};
  Score score = Score::softmax;
  Reduce reduce = Reduce::sum;
  Reduce group_reduce = Reduce::mean;
  std::optional<Tensor> starts{};
  double softcap = 0.0;
  std::optional<Tensor> sink_logits{};
  std::optional<Tensor> row_weights{};
  std::optional<Tensor> k_scale{};
  std::optional<Tensor> block_table{};
};

// Score keys by the attention of an observation window, as SnapKV and LAQ do.
inline Tensor window_scores(const Tensor& q, const Tensor& k, const Tensor& visible,
                            const WindowScoresOptions& options = {}) {
  return detail::call<Tensor>("kvops::window_scores", "", q, k, visible, options.lse, options.scale, options.score,
                              options.reduce, options.group_reduce, options.starts, options.softcap,
                              options.sink_logits, options.row_weights, options.k_scale, options.block_table);
}

struct WindowAttentionOptions {
  std::optional<double> scale{};
  Reduce reduce = Reduce::sum;
  Reduce group_reduce = Reduce::mean;
  std::optional<Tensor> starts{};
  double softcap = 0.0;
  std::optional<Tensor> sink_logits{};
  std::optional<Tensor> cos{};
  std::optional<Tensor> sin{};
  bool interleaved = false;
  bool scores = true;
  std::optional<Tensor> key_bias{};
  std::optional<Tensor> k_scale{};
  std::optional<Tensor> v_scale{};
  std::optional<Tensor> block_table{};
};

// Compute the attention of the last queries, or of one decode step, with `window_scores` as a by-product.
inline std::tuple<Tensor, Tensor, Tensor> window_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                                           const Tensor& visible,
                                                           const WindowAttentionOptions& options = {}) {
  return detail::call<Tensor, Tensor, Tensor>("kvops::window_attention", "", q, k, v, visible, options.scale,
                                              options.reduce, options.group_reduce, options.starts, options.softcap,
                                              options.sink_logits, options.cos, options.sin, options.interleaved,
                                              options.scores, options.key_bias, options.k_scale, options.v_scale,
                                              options.block_table);
}

struct DropScoresOptions {
  std::optional<double> scale{};
  Reduce group_reduce = Reduce::mean;
  std::optional<Tensor> starts{};
  double softcap = 0.0;
  std::optional<Tensor> sink_logits{};
  double epsilon = 1e-6;
  std::optional<Tensor> block_table{};
};

// Score keys by how far the outputs of the last queries move if the key is dropped, as DropKV does.
inline Tensor drop_scores(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& visible,
                          const DropScoresOptions& options = {}) {
  return detail::call<Tensor>("kvops::drop_scores", "", q, k, v, visible, options.scale, options.group_reduce,
                              options.starts, options.softcap, options.sink_logits, options.epsilon,
                              options.block_table);
}

struct SelectTopkOptions {
  int64_t sinks = 0;
  int64_t window = 0;
  std::optional<int64_t> seq_len{};
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> budgets{};
  bool fill_invalid = false;
};

// Select the k slots to keep: the first `sinks`, the last `window`, and the highest scores between them.
inline Tensor select_topk(const Tensor& scores, int64_t k, const SelectTopkOptions& options = {}) {
  return detail::call<Tensor>("kvops::select_topk", "", scores, k, options.sinks, options.window, options.seq_len,
                              options.starts, options.lengths, options.budgets, options.fill_invalid);
}

struct GatherKvOptions {
  std::optional<Tensor> block_table{};
};

// Copy the kept rows of K and V: k[b, h, indices[b, h, i]], and the same of v.
inline std::tuple<Tensor, Tensor> gather_kv(const Tensor& k, const Tensor& v, const Tensor& indices,
                                            const GatherKvOptions& options = {}) {
  return detail::call<Tensor, Tensor>("kvops::gather_kv", "", k, v, indices, options.block_table);
}

inline void gather_kv_out(const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& k_out,
                          const Tensor& v_out, const GatherKvOptions& options = {}) {
  return detail::call<>("kvops::gather_kv", "out", k, v, indices, options.block_table, k_out, v_out);
}

struct CompactKvOptions {
  std::optional<Tensor> block_table{};
};

// Move the kept rows of K and V to the front, in place: row indices[b, h, i] goes to slot i.
inline void compact_kv_(const std::vector<Tensor>& k, const std::vector<Tensor>& v, const std::vector<Tensor>& indices,
                        const CompactKvOptions& options = {}) {
  return detail::call<>("kvops::compact_kv_", "", k, v, indices, options.block_table);
}

struct LadderGatherOptions {
  std::optional<Tensor> inv_freq{};
  bool interleaved = false;
};

// Copy the slots that a LaCache plan keeps, for one layer or for all layers of a model at once.
inline std::tuple<std::vector<Tensor>, std::vector<Tensor>> ladder_gather(const std::vector<Tensor>& k,
                                                                          const std::vector<Tensor>& v,
                                                                          const std::vector<int64_t>& plan,
                                                                          const std::vector<int64_t>& layer,
                                                                          const LadderGatherOptions& options = {}) {
  return detail::call<std::vector<Tensor>, std::vector<Tensor>>("kvops::ladder_gather", "", k, v, plan, layer,
                                                                options.inv_freq, options.interleaved);
}

inline void ladder_gather_out(const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                              const std::vector<int64_t>& plan, const std::vector<int64_t>& layer,
                              const std::vector<Tensor>& k_out, const std::vector<Tensor>& v_out,
                              const LadderGatherOptions& options = {}) {
  return detail::call<>("kvops::ladder_gather", "out", k, v, plan, layer, options.inv_freq, options.interleaved, k_out,
                        v_out);
}

struct LadderCompactOptions {
  std::optional<Tensor> inv_freq{};
  bool interleaved = false;
};

// Move the slots that a LaCache plan keeps to the front, in place: `ladder_gather` without a copy.
inline void ladder_compact_(const std::vector<Tensor>& k, const std::vector<Tensor>& v,
                            const std::vector<int64_t>& plan, const std::vector<int64_t>& layer,
                            const LadderCompactOptions& options = {}) {
  return detail::call<>("kvops::ladder_compact_", "", k, v, plan, layer, options.inv_freq, options.interleaved);
}

struct RopeAtSlotsOptions {
  bool interleaved = false;
};

// Rotate cached keys (or queries) by RoPE: pair i of slot j by the angle of its own cosine and sine.
inline Tensor rope_at_slots(const Tensor& k, const Tensor& cos, const Tensor& sin,
                            const RopeAtSlotsOptions& options = {}) {
  return detail::call<Tensor>("kvops::rope_at_slots", "", k, cos, sin, options.interleaved);
}

inline void rope_at_slots_out(const Tensor& k, const Tensor& cos, const Tensor& sin, const Tensor& k_out,
                              const RopeAtSlotsOptions& options = {}) {
  return detail::call<>("kvops::rope_at_slots", "out", k, cos, sin, options.interleaved, k_out);
}

struct OutlierDegreeOptions {
  int64_t kappa = 5;
  bool standardize = true;
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Compute ProtoKV's outlier degree: how dissimilar each key is to its neighbours.
inline Tensor outlier_degree(const Tensor& k, const OutlierDegreeOptions& options = {}) {
  return detail::call<Tensor>("kvops::outlier_degree", "", k, options.kappa, options.standardize, options.starts,
                              options.lengths, options.block_table);
}

struct LshBucketOptions {
  std::optional<Tensor> block_table{};
};

// Hash chosen keys into buckets: the signs of r random Fourier features, read as an r-bit number.
inline Tensor lsh_bucket(const Tensor& k, const Tensor& indices, const Tensor& projection, const Tensor& phase,
                         const LshBucketOptions& options = {}) {
  return detail::call<Tensor>("kvops::lsh_bucket", "", k, indices, projection, phase, options.block_table);
}

struct BuildPrototypesOptions {
  int64_t num_buckets = 4;
  int64_t least_chunk = 1;
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Compute ProtoKV's prototypes in one read of K: the mean key of each chunk, then of each bucket of anchors.
inline std::tuple<Tensor, Tensor> build_prototypes(const Tensor& k, const std::optional<Tensor>& sat_indices,
                                                   const std::optional<Tensor>& buckets, int64_t num_chunks,
                                                   const BuildPrototypesOptions& options = {}) {
  return detail::call<Tensor, Tensor>("kvops::build_prototypes", "", k, sat_indices, buckets, num_chunks,
                                      options.num_buckets, options.least_chunk, options.starts, options.lengths,
                                      options.block_table);
}

struct AssignPrototypesOptions {
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Assign each key to the prototype of highest cosine: argmax over c of cos(k_i, prototype_c), ties to the lower c.
inline Tensor assign_prototypes(const Tensor& k, const Tensor& prototypes,
                                const AssignPrototypesOptions& options = {}) {
  return detail::call<Tensor>("kvops::assign_prototypes", "", k, prototypes, options.starts, options.lengths,
                              options.block_table);
}

struct QuadraticScoresOptions {
  std::optional<Tensor> cov{};
  std::optional<double> scale{};
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Score keys as Expected Attention does: by the attention weight that Gaussian queries give them on average.
inline Tensor quadratic_scores(const Tensor& k, const Tensor& mean, const QuadraticScoresOptions& options = {}) {
  return detail::call<Tensor>("kvops::quadratic_scores", "", k, mean, options.cov, options.scale, options.starts,
                              options.lengths, options.block_table);
}

struct TrigScoresOptions {
  std::optional<Tensor> norms{};
  bool interleaved = false;
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Score keys as TriAttention does: by a trigonometric series in their distance, and by their norms.
inline Tensor trig_scores(const Tensor& k, const Tensor& centers, const TrigScoresOptions& options = {}) {
  return detail::call<Tensor>("kvops::trig_scores", "", k, centers, options.norms, options.interleaved, options.starts,
                              options.lengths, options.block_table);
}

struct KeySimilarityOptions {
  double threshold = 0.5;
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Compute R-KV's redundancy before its softmax: each key's mean cosine with all others, some pairs spared.
inline Tensor key_similarity(const Tensor& k, const KeySimilarityOptions& options = {}) {
  return detail::call<Tensor>("kvops::key_similarity", "", k, options.threshold, options.starts, options.lengths,
                              options.block_table);
}

struct ValueNormOptions {
  Reduce group_reduce = Reduce::mean;
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Compute CriticalKV's value norms: the L1 norm of each value after the output projection.
inline Tensor value_norm(const Tensor& v, const Tensor& w_o, const ValueNormOptions& options = {}) {
  return detail::call<Tensor>("kvops::value_norm", "", v, w_o, options.group_reduce, options.starts, options.lengths,
                              options.block_table);
}

struct ValueRangeOptions {
  std::optional<Tensor> starts{};
  std::optional<Tensor> lengths{};
  std::optional<Tensor> block_table{};
};

// Compute VaSE's value ranges: the largest channel of each value minus the smallest.
inline Tensor value_range(const Tensor& v, const ValueRangeOptions& options = {}) {
  return detail::call<Tensor>("kvops::value_range", "", v, options.starts, options.lengths, options.block_table);
}

struct ClusterMeanOptions {
  Reduce reduce = Reduce::mean;
};

// Compute the mean (or sum) of the scores in each cluster.
inline Tensor cluster_mean(const Tensor& scores, const Tensor& assignment, int64_t num_clusters,
                           const ClusterMeanOptions& options = {}) {
  return detail::call<Tensor>("kvops::cluster_mean", "", scores, assignment, num_clusters, options.reduce);
}

struct ClusterPriorityOptions {
  std::optional<Tensor> budgets{};
  bool whole = false;
};

// Compute priorities that make `select_topk` keep whole clusters within a budget of k tokens.
inline std::tuple<Tensor, Tensor> cluster_priority(const Tensor& scores, const Tensor& assignment,
                                                   const Tensor& cluster_scores, int64_t k,
                                                   const ClusterPriorityOptions& options = {}) {
  return detail::call<Tensor, Tensor>("kvops::cluster_priority", "", scores, assignment, cluster_scores, k,
                                      options.budgets, options.whole);
}

// end

}  // namespace kvops
#pragma GCC visibility pop
