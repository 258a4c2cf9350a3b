// Calls operators through kvops.h and prints the sum and the size of each result, for test_cpp_header.py, which calls
// the same in Python. argv: a LaCache plan as integers.
#include <ATen/ATen.h>
#include <kvops_aten.h>

#include <cstdio>
#include <cstdlib>

void print(const char* name, const kvops::Tensor& x) {
  const at::Tensor y = kvops::to_aten(x);
  std::printf("%s %.9g %ld\n", name, y.to(at::kDouble).sum().item<double>(), static_cast<long>(y.numel()));
}

kvops::Tensor waves(int64_t heads, int64_t tokens, double step) {  // [1, heads, tokens, 64]
  const at::Tensor x = at::sin(at::arange(heads * tokens * 64, at::kDouble) * step);
  return kvops::from_aten(x.to(at::kFloat).view({1, heads, tokens, 64}));
}

int main(int argc, char** argv) {
  const kvops::Tensor k = waves(2, 64, 0.37), v = waves(2, 64, 0.71), q = waves(4, 3, 0.93);
  const kvops::Tensor visible = kvops::from_aten(at::arange(62, 65, at::kInt));
  const kvops::Tensor scores = kvops::lag_score(k, v, 8, {.prefix = 4, .v_weight = 0.5});
  print("lag_score", scores);
  const kvops::Tensor bias = kvops::value_range(v);
  const auto [out, lse, attention] = kvops::window_attention(
      q, k, v, visible,
      {.scale = 0.3, .reduce = kvops::Reduce::mean, .group_reduce = kvops::Reduce::max, .key_bias = bias});
  print("out", out), print("lse", lse), print("attention", attention);
  print("dot", kvops::window_scores(q, k, visible, {.score = kvops::Score::dot}));
  const kvops::Tensor kept = kvops::select_topk(bias, 16, {.sinks = 2, .window = 3});
  print("kept", kept);
  const kvops::Tensor clusters = kvops::from_aten(at::arange(128, at::kInt).remainder(5).view({1, 2, 64}));
  print("sums", kvops::cluster_mean(bias, clusters, 5, {.reduce = kvops::Reduce::sum}));
  const kvops::Tensor k_out = waves(2, 16, 0.0), v_out = waves(2, 16, 0.0);
  kvops::gather_kv_out(k, v, kept, k_out, v_out);
  print("k_out", k_out), print("v_out", v_out);
  std::vector<int64_t> plan;
  for (int i = 1; i < argc; ++i) plan.push_back(std::atoll(argv[i]));
  const auto [ladder_k, ladder_v] = kvops::ladder_gather({k, v}, {v, k}, plan, {0, 1});
  print("ladder 0", ladder_k[0]), print("ladder 1", ladder_v[1]);
  kvops::compact_kv_({k}, {v}, {kept});
  print("compacted", k);
  try {
    kvops::select_topk(bias, -1);
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
}
