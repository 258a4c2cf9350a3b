// check.h first: it makes the checks in ops/ visible.
#include "../check.h"
//
#include <sys/mman.h>

#include "../ops/gather_kv.h"
#include "launch.h"

namespace kvops {

KVOPS_LEVELS(gather_kv, GatherKVParams)

namespace {

// Signs are collected and looked at once a row, so that the loop is a few vector instructions.
void check_values(const IndexView& indices, int64_t b, int64_t h, int64_t n) {
  const int64_t* row = indices.data + b * indices.stride_b + h * indices.stride_h;
  int64_t wrong = 0;
  for (int64_t i = 0; i < indices.m; ++i) {
    const int64_t index = row[i * indices.stride_m];
    wrong |= index < 0 ? index + 1 : n - 1 - index;
  }
  for (int64_t i = 0; wrong < 0 && i < indices.m; ++i) {
    const int64_t index = row[i * indices.stride_m];
    KVOPS_CHECK(index >= -1 && index < n, "gather_kv: indices must lie in [-1, ", n, "), got ", index, " at row ", b,
                ", head ", h, ", entry ", i);
  }
}

void run(const GatherKVParams& p) {
  if (p.b * p.heads * p.indices.m == 0) return;
  for (int64_t b = 0; b < p.b; ++b)
    for (int64_t h = 0; h < p.heads; ++h) check_values(p.indices, b, h, p.n);
  const Scratch none(0);
  gather_kv_cpu(p, none.workers(threads_for(p.b * p.heads * p.indices.m * (p.k.row_bytes + p.v.row_bytes))));
}

// The first touch of fresh memory costs a page fault a page, more than the copy itself: ask for huge pages.
void advise_huge_pages(const Tensor& x) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.mutable_data_ptr()), bytes = x.numel() * x.element_size();
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = (begin + bytes) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// A fresh contiguous [b, Hk, m, d] like `like`, and its rows.
Tensor fresh(const GatherKVParams& p, const Tensor& like, KVView& rows) {
  const Tensor out = empty(like, std::array{p.b, p.heads, p.indices.m, like.size(3)}, like.scalar_type());
  advise_huge_pages(out);
  rows = check_kv("gather_kv", "out", out, true);
  return out;
}

std::tuple<Tensor, Tensor> gather_kv(const Tensor& k, const Tensor& v, const Tensor& indices) {
  GatherKVParams p = check_gather_kv(k, v, indices);
  std::tuple out{fresh(p, k, p.k_out), fresh(p, v, p.v_out)};
  run(p);
  return out;
}

void gather_kv_out(const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& k_out, const Tensor& v_out) {
  GatherKVParams p = check_gather_kv(k, v, indices);
  check_gather_kv_targets(k, v, k_out, v_out, p);
  run(p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) {
  m.impl("gather_kv", TORCH_BOX(&gather_kv));
  m.impl("gather_kv.out", TORCH_BOX(&gather_kv_out));
}

}  // namespace kvops
