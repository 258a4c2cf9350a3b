// The functions of kvops_c.h: each checks its arguments, fills the parameters of a kernel, and launches it, as
// ops/<op>.cpp does for torch.
#include "kvops_c.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../call.h"
#include "../ops/anchor_cosine.h"
#include "../ops/compact_kv_.h"
#include "../ops/gather_kv.h"
#include "../ops/lag_score.h"
#include "../ops/select_topk.h"
#include "../ops/window_attention.h"
#include "../ops/window_scores.h"

namespace kvops {
namespace {

thread_local std::string error;

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// The pool of this thread's call, and what its run returned when it failed.
thread_local const kvops_threads* pool;
thread_local int32_t failure;

class CCall final : public Call {
 public:
  CCall(const char* op, const kvops_threads* given) : Call(op) {
    pool = given;
    failure = 0;
    if (!pool) return;
    require(pool->count >= 1 && pool->count <= kMostThreads && pool->run, "threads must have a count in [1, ",
            kMostThreads, "] and a function, got count ", pool->count, pool->run ? "" : " and null");
    threads = pool->count;
    run = [](int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
      const int32_t status = pool->run(begin, end, grain, body, context);
      if (status) failure = status;
      return status;
    };
  }
  ~CCall() { operator delete(memory_, std::align_val_t{64}); }
  CCall(const CCall&) = delete;
  CCall& operator=(const CCall&) = delete;

  void* workspace(int64_t bytes) override {
    if (bytes) memory_ = operator new(bytes, std::align_val_t{64});
    return memory_;
  }

 private:
  static constexpr int64_t kMostThreads = 1 << 16;
  void* memory_ = nullptr;
};

// Runs fn(call) for an exported function: its exceptions become the error of this thread.
template <class Fn>
int guarded(const char* op, const kvops_threads* threads, const Fn& fn) {
  try {
    try {
      CCall call(op, threads);
      fn(call);
      if (failure) throw std::runtime_error("threads.run must return 0, got " + std::to_string(failure));
      return 0;
    } catch (const std::exception& thrown) {
      error = std::string(op) + ": " + thrown.what();
    }
  } catch (...) {  // no memory for the message: the one before it stays
  }
  return -1;
}

template <class T>
void require_pointer(const char* name, const T* x, int64_t size = 1) {
  require(x || size == 0, name, " must not be null");
}

ValidSlots slots_of(const kvops_shape* shape) {
  require_pointer("shape", shape);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto& [batch, heads, n, starts, lengths] = *shape;
  require(
      batch >= 0 && heads >= 0 && n >= 0 && batch <= kMost && heads <= kMost && n <= kMost && batch * heads <= kMost,
      "shape must have batch * heads and tokens in [0, 2^31), got ", batch, ", ", heads, " and ", n);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = starts ? starts[b] : 0, length = lengths ? lengths[b] : n - start;
    require(start >= 0 && length >= 0 && start + length <= n, "starts and lengths of request ", b,
            " must describe slots in [0, ", n, "], got start ", start, ", length ", length);
  }
  return {starts, lengths, n};
}

int64_t item_size(kvops_dtype dtype) {
  return dtype == KVOPS_F32 ? 4 : dtype == KVOPS_F16 || dtype == KVOPS_BF16 ? 2 : 1;
}

static_assert(static_cast<int>(DType::e5m2) == KVOPS_E5M2 && static_cast<int>(DType::bf16) == KVOPS_BF16);

void require_aligned(const char* name, const void* data, int64_t least, int64_t batch, int64_t head, int64_t row) {
  require((reinterpret_cast<intptr_t>(data) | batch | head | row) % least == 0, name, " must begin at a multiple of ",
          least, " bytes and have such strides, got ", data, " and strides ", batch, ", ", head, " and ", row);
}

// read: for kernels that compute with the rows, which count 2 bytes per element of 1-byte types.
KVView view_of(const char* name, const kvops_rows* x, const kvops_shape& shape, bool read) {
  require_pointer(name, x);
  require_pointer(name, x->data, shape.batch * shape.heads * shape.tokens);
  require(x->dtype >= KVOPS_F32 && x->dtype <= KVOPS_E5M2, name, " must have a kvops_dtype, got ",
          static_cast<int>(x->dtype));
  const int64_t item = item_size(x->dtype);
  require(x->dim > 0 && x->dim <= (1 << 24) && x->dim * item % 16 == 0, name, " must have a dim that is a multiple of ",
          16 / item, " (16 bytes), got ", x->dim);
  require_aligned(name, x->data, std::max<int64_t>(item, 2), x->stride_batch, x->stride_head, x->stride_token);
  return {static_cast<char*>(x->data), x->stride_batch, x->stride_head, x->stride_token,
          x->dim * (read && item == 1 ? 2 : item)};
}

void require_like(const char* name, const kvops_rows* x, const kvops_rows* like) {
  require(x->dtype == like->dtype, name, " must have k's dtype ", static_cast<int>(like->dtype), ", got ",
          static_cast<int>(x->dtype));
}

void check_kept(int64_t kept) {
  require(kept >= 0 && kept <= std::numeric_limits<int32_t>::max(), "kept must be in [0, 2^31), got ", kept);
}

// ascending: strictly, -1 only at the end.
IndexView indices_of(const int64_t* indices, int64_t kept, const kvops_shape& shape, bool ascending) {
  require_pointer("indices", indices, shape.batch * shape.heads * kept);
  for (int64_t row = 0; row < shape.batch * shape.heads; ++row) {
    int64_t last = -1;
    bool ended = false;
    for (int64_t i = 0; i < kept; ++i) {
      const int64_t index = indices[row * kept + i];
      require(index >= -1 && index < shape.tokens, "indices must lie in [-1, ", shape.tokens, "), got ", index,
              " at request ", row / shape.heads, ", head ", row % shape.heads, ", entry ", i);
      if (!ascending) continue;
      require(index == -1 || (!ended && index > last),
              "indices must be strictly ascending, and -1 only at the end, got ", index, " after ", ended ? -1 : last,
              " at request ", row / shape.heads, ", head ", row % shape.heads, ", entry ", i);
      ended |= index == -1;
      last = index;
    }
  }
  return {indices, shape.heads * kept, kept, 1, kept};
}

void check_lag(int64_t prefix, int64_t lag) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  require(lag >= 1 && lag <= kMost, "lag must be in [1, ", kMost, "], got ", lag);
  require(prefix >= 0, "prefix must be >= 0, got ", prefix);
}

int64_t lag_width(const kvops_shape& shape, int64_t prefix, int64_t lag, int64_t keep) {
  return segment_width(shape.tokens, prefix, lag, keep, shape.starts || shape.lengths);
}

static_assert(static_cast<int>(Reduce::max) == KVOPS_MAX && static_cast<int>(Reduce::none) == KVOPS_NONE);

// Without the limits of its rows, which set_visible checks or makes.
Window window_of(const kvops_shape& shape, const kvops_queries* q, const kvops_rows* k, kvops_reduce over_rows,
                 kvops_reduce over_heads) {
  slots_of(&shape);
  const KVView view = view_of("k", k, shape, true);
  require_pointer("q", q);
  require(q->rows >= 1 && q->rows <= kMaxWindow, "q must have 1 to ", kMaxWindow, " rows, got ", q->rows);
  require(shape.heads > 0 ? q->heads > 0 && q->heads % shape.heads == 0 : q->heads == 0,
          "the heads of q must be a positive multiple of the KV heads ", shape.heads, ", got ", q->heads);
  require(q->heads <= std::numeric_limits<int32_t>::max(), "the heads of q must be in [0, 2^31), got ", q->heads);
  require_pointer("q's data", q->data, shape.batch * q->heads);
  const int64_t item = std::max<int64_t>(2, item_size(k->dtype));
  require_aligned("q", q->data, item, q->stride_batch, q->stride_head, q->stride_row);
  const auto one_of = [](const char* name, kvops_reduce x, kvops_reduce last) {
    require(x >= KVOPS_SUM && x <= last, name, " must be in [0, ", static_cast<int>(last), "], got ",
            static_cast<int>(x));
  };
  one_of("over_rows", over_rows, KVOPS_MAX);
  one_of("over_heads", over_heads, KVOPS_NONE);
  const auto normal = [](float x) { return x > 0 && std::isnormal(x); };
  const float scale = q->scale != 0 ? q->scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(k->dim)));
  require(normal(scale), "scale must be 0 or positive and a normal number, got ", scale);
  require(q->softcap == 0 || normal(q->softcap), "softcap must be 0 or positive and a normal number, got ", q->softcap);
  require(q->softcap == 0 || normal(scale / q->softcap), "scale / softcap must be a normal number, got ", scale, " / ",
          q->softcap);
  const DType stored = static_cast<DType>(k->dtype);
  return {.q = {static_cast<const char*>(q->data), q->stride_batch, q->stride_head, q->stride_row, item},
          .k = view,
          .rope = {},
          .visible = q->visible,
          .visible_stride = q->rows,
          .starts = shape.starts,
          .sink_logits = q->sink_logits,
          .row_weights = {},
          .key_bias = {},
          .k_scale = {},
          .v_scale = {},
          .scores = nullptr,
          .dtype = item_size(k->dtype) == 1 ? DType::bf16 : stored,
          .stored = stored,
          .reduce = static_cast<Reduce>(over_rows),
          .group_reduce = static_cast<Reduce>(over_heads),
          .scale = scale,
          .softcap = q->softcap,
          .b = shape.batch,
          .heads = shape.heads,
          .group = shape.heads ? q->heads / shape.heads : 1,
          .w = q->rows,
          .n = shape.tokens,
          .d = k->dim};
}

// Checks the limits of the rows. Without any, the rows are the last tokens: makes their limits, [batch, rows], which
// must outlive the call.
std::vector<int32_t> set_visible(Window& window, const kvops_shape& shape) {
  const ValidSlots slots{shape.starts, shape.lengths, shape.tokens};
  std::vector<int32_t> causal(window.visible ? 0 : window.b * window.w);
  for (int64_t b = 0; b < window.b; ++b) {
    const int64_t end = slots.first(b) + slots.count(b);
    for (int64_t i = 0; i < window.w; ++i) {
      if (!window.visible) {
        causal[b * window.w + i] = static_cast<int32_t>(std::max<int64_t>(0, end - (window.w - 1 - i)));
      } else {
        const int32_t limit = window.visible[b * window.w + i];
        require(limit >= 0 && limit <= end, "visible must lie in [0, ", end, "], where the valid slots of request ", b,
                " end, got ", limit, " for row ", i);
      }
    }
  }
  if (!window.visible) window.visible = causal.data();
  return causal;
}

// What kvops_select_topk and kvops_lag_select ask for.
struct Selection {
  int64_t width, segments = -1, lag = 1, k = 0, sinks = 0, window = 0;
};

void select(const kvops_shape& shape, const ValidSlots& slots, const float* scores, const Selection& of,
            int64_t* indices, Call& call) {
  const int64_t row = of.segments < 0 ? shape.tokens : of.segments * of.lag;
  launch_select_topk({.scores = scores,
                      .stride_b = shape.heads * row,
                      .stride_h = row,
                      .stride_s = of.lag,
                      .indices = indices,
                      .slots = slots,
                      .budgets = nullptr,
                      .b = shape.batch,
                      .heads = shape.heads,
                      .n = shape.tokens,
                      .width = of.width,
                      .segments = of.segments,
                      .lag = of.lag,
                      .k = of.k,
                      .sinks = of.sinks,
                      .window = of.window,
                      .fill_invalid = false},
                     call);
}

}  // namespace
}  // namespace kvops

using namespace kvops;

const char* kvops_error(void) {
  return error.c_str();
}

int kvops_anchor_cosine(const kvops_shape* shape, const kvops_rows* k, float* scores, float* anchor,
                        const kvops_threads* threads) {
  return guarded("kvops_anchor_cosine", threads, [&](Call& call) {
    const ValidSlots slots = slots_of(shape);
    const KVView view = view_of("k", k, *shape, true);
    const int64_t rows = shape->batch * shape->heads;
    require_pointer("scores", scores, rows * shape->tokens);
    require_pointer("anchor", anchor, rows);
    if (rows == 0) return;
    launch_anchor_cosine({.k = view,
                          .given_anchor = nullptr,
                          .anchor = anchor,
                          .scores = scores,
                          .dtype = static_cast<DType>(k->dtype),
                          .slots = slots,
                          .b = shape->batch,
                          .heads = shape->heads,
                          .n = shape->tokens,
                          .d = k->dim,
                          .normalize_anchor = true},
                         call);
  });
}

int kvops_select_topk(const kvops_shape* shape, const float* scores, int64_t keep, int64_t sinks, int64_t window,
                      int64_t* indices, const kvops_threads* threads) {
  return guarded("kvops_select_topk", threads, [&](Call& call) {
    const ValidSlots slots = slots_of(shape);
    const int64_t n = shape->tokens, rows = shape->batch * shape->heads;
    require(keep >= 0 && sinks >= 0 && window >= 0, "keep, sinks and window must be >= 0, got ", keep, ", ", sinks,
            " and ", window);
    require(sinks <= keep && window <= keep - sinks, "sinks + window must be <= keep, expected at most ", keep,
            ", got ", sinks, " + ", window);
    const int64_t width = std::min(keep, n);
    require_pointer("scores", scores, rows * n);
    require_pointer("indices", indices, rows * width);
    if (rows * width == 0) return;
    select(*shape, slots, scores, {.width = width, .k = keep, .sinks = sinks, .window = window}, indices, call);
  });
}

int kvops_window_scores(const kvops_shape* shape, const kvops_queries* q, const kvops_rows* k, kvops_reduce over_rows,
                        kvops_reduce over_heads, float* scores, const kvops_threads* threads) {
  return guarded("kvops_window_scores", threads, [&](Call& call) {
    require_pointer("shape", shape);
    Window window = window_of(*shape, q, k, over_rows, over_heads);
    const int64_t count = window.b * window.heads * window.n;
    require_pointer("scores", scores, count);
    if (count == 0) return;
    const std::vector<int32_t> causal = set_visible(window, *shape);
    window.scores = scores;
    launch_window_scores({.window = window, .lse = {}, .softmax = true}, call);
  });
}

int kvops_window_attention(const kvops_shape* shape, const kvops_queries* q, const kvops_rows* k, const kvops_rows* v,
                           kvops_reduce over_rows, kvops_reduce over_heads, void* out, float* lse, float* scores,
                           const kvops_threads* threads) {
  return guarded("kvops_window_attention", threads, [&](Call& call) {
    require_pointer("shape", shape);
    Window window = window_of(*shape, q, k, over_rows, over_heads);
    const KVView v_view = view_of("v", v, *shape, true);
    require_like("v", v, k);
    const int64_t rows = window.b * window.heads;
    require_pointer("out", out, rows);
    require_pointer("lse", lse, rows);
    if (rows == 0) return;
    const std::vector<int32_t> causal = set_visible(window, *shape);
    window.scores = scores;
    launch_window_attention({.window = window, .v = v_view, .out = static_cast<char*>(out), .lse = lse, .dv = v->dim},
                            call);
  });
}

int64_t kvops_lag_segments(int64_t tokens, int64_t prefix, int64_t lag) {
  return tokens < 0 || prefix < 0 || lag < 1 ? 0 : num_segments(tokens, prefix, lag);
}

int kvops_lag_score(const kvops_shape* shape, const kvops_rows* k, const kvops_rows* v, int64_t prefix, int64_t lag,
                    float* scores, const kvops_threads* threads) {
  return guarded("kvops_lag_score", threads, [&](Call& call) {
    const ValidSlots slots = slots_of(shape);
    const KVView k_view = view_of("k", k, *shape, true), v_view = view_of("v", v, *shape, true);
    require_like("v", v, k);
    check_lag(prefix, lag);
    const int64_t segments = num_segments(shape->tokens, prefix, lag), rows = shape->batch * shape->heads;
    require_pointer("scores", scores, rows * segments);
    if (rows * segments == 0) return;
    launch_lag_score({.k = k_view,
                      .v = v_view,
                      .scores = scores,
                      .dtype = static_cast<DType>(k->dtype),
                      .slots = slots,
                      .b = shape->batch,
                      .heads = shape->heads,
                      .d = k->dim,
                      .dv = v->dim,
                      .segments = segments,
                      .lag = lag,
                      .prefix = prefix,
                      .v_weight = 1.0f,
                      .self_reference = false},
                     call);
  });
}

int64_t kvops_lag_kept(const kvops_shape* shape, int64_t prefix, int64_t lag, int64_t keep) {
  return !shape || shape->tokens < 0 || prefix < 0 || lag < 1 || keep < 0 || keep > lag
             ? 0
             : lag_width(*shape, prefix, lag, keep);
}

int kvops_lag_select(const kvops_shape* shape, const float* scores, int64_t prefix, int64_t lag, int64_t keep,
                     int64_t* indices, const kvops_threads* threads) {
  return guarded("kvops_lag_select", threads, [&](Call& call) {
    const ValidSlots slots = slots_of(shape);
    check_lag(prefix, lag);
    require(keep >= 0 && keep <= lag, "keep must be in [0, ", lag, "], got ", keep);
    const int64_t segments = num_segments(shape->tokens, prefix, lag), rows = shape->batch * shape->heads;
    const int64_t width = lag_width(*shape, prefix, lag, keep);
    require_pointer("scores", scores, rows * segments);
    require_pointer("indices", indices, rows * width);
    if (rows * width == 0) return;
    select(*shape, slots, scores, {.width = width, .segments = segments, .lag = lag, .k = keep, .sinks = prefix},
           indices, call);
  });
}

int kvops_gather_kv(const kvops_shape* shape, const kvops_rows* k, const kvops_rows* v, const int64_t* indices,
                    int64_t kept, const kvops_rows* k_out, const kvops_rows* v_out, const kvops_threads* threads) {
  return guarded("kvops_gather_kv", threads, [&](Call& call) {
    slots_of(shape);
    const KVView k_view = view_of("k", k, *shape, false), v_view = view_of("v", v, *shape, false);
    require_like("v", v, k);
    check_kept(kept);
    const kvops_shape out{shape->batch, shape->heads, kept, nullptr, nullptr};
    const KVView k_to = view_of("k_out", k_out, out, false), v_to = view_of("v_out", v_out, out, false);
    require_like("k_out", k_out, k);
    require_like("v_out", v_out, k);
    require(k_out->dim == k->dim && v_out->dim == v->dim, "k_out and v_out must have the dims of k and v, ", k->dim,
            " and ", v->dim, ", got ", k_out->dim, " and ", v_out->dim);
    const IndexView view = indices_of(indices, kept, *shape, false);
    if (shape->batch * shape->heads * kept == 0) return;
    launch_gather_kv({.k = k_view,
                      .v = v_view,
                      .k_out = k_to,
                      .v_out = v_to,
                      .indices = view,
                      .b = shape->batch,
                      .heads = shape->heads,
                      .n = shape->tokens},
                     call);
  });
}

int kvops_compact_kv(const kvops_shape* shape, const kvops_rows* k, const kvops_rows* v, const int64_t* indices,
                     int64_t kept, const kvops_threads* threads) {
  return guarded("kvops_compact_kv", threads, [&](Call& call) {
    slots_of(shape);
    CompactKVLayer layer{view_of("k", k, *shape, false), view_of("v", v, *shape, false), {}};
    require_like("v", v, k);
    check_kept(kept);
    require(kept <= shape->tokens, "kept must be at most the ", shape->tokens, " tokens, got ", kept);
    layer.indices = indices_of(indices, kept, *shape, true);
    if (shape->batch * shape->heads * kept == 0) return;
    launch_compact_kv_({&layer, 1, shape->batch, shape->heads, shape->tokens}, call);
  });
}
