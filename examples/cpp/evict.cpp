// Calls kvops' operators from C++, without Python: evicts three quarters of a KV cache with KeyDiff.
#include <ATen/ATen.h>
#include <kvops_aten.h>

#include <iostream>

int main() {
  const at::Tensor cache =
      at::randn({2, 1, 8, 4096, 128}, at::kBFloat16);  // [K and V, batch, KV heads, tokens, head_dim]
  const kvops::Tensor k = kvops::from_aten(cache[0]), v = kvops::from_aten(cache[1]);
  const auto [scores, anchor] = kvops::anchor_cosine(k);
  const kvops::Tensor kept = kvops::select_topk(scores, 1024, {.sinks = 4});
  const auto [kept_k, kept_v] = kvops::gather_kv(k, v, kept);
  std::cout << "K " << cache[0].sizes() << " -> " << kvops::to_aten(kept_k).sizes() << "\n";
}
