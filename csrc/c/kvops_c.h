/* libkvops_c.so: C functions that call the CPU kernels of eviction, and of attention over what is kept, for programs
 * without torch.
 *
 * K and V of a layer are [batch, heads, tokens, dim]: an address and strides in bytes. dim is contiguous, and a row is
 * a multiple of 16 bytes. Scores and indices are contiguous. The indices of a head are the slots it keeps, ascending,
 * and -1 after the last one if it keeps fewer.
 *
 * A function returns 0; or -1, and then kvops_error() says what was expected and what came, and nothing has been
 * written, unless it was the caller's threads that failed. Several threads may call at once. Memory that is written
 * must not overlap memory that is read.
 */
#ifndef KVOPS_C_H
#define KVOPS_C_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVOPS_API __attribute__((visibility("default")))
#ifdef __cplusplus
#define KVOPS_INT : int /* so that the library may look at a value that is not in the enum */
#else
#define KVOPS_INT
#endif

enum kvops_dtype KVOPS_INT { KVOPS_F32, KVOPS_F16, KVOPS_BF16, KVOPS_E4M3, KVOPS_E5M2 };

struct kvops_rows {
  void* data;
  int64_t stride_batch, stride_head, stride_token; /* bytes */
  int64_t dim;
  enum kvops_dtype dtype;
};

/* The valid slots of request b are the lengths[b] slots from starts[b] on. Null: from 0 on, and up to the end. */
struct kvops_shape {
  int64_t batch, heads, tokens;
  const int32_t *starts, *lengths;
};

/* The last `rows` queries of each query head, [batch, heads, rows, dim], in k's dtype (bf16 if k is fp8) and dim; an
 * address and strides in bytes, dim is contiguous. `heads` is a multiple of k's; query head h reads KV head
 * h / (heads / k's heads). A row's logits are x = scale q . k, or softcap tanh(x / softcap). */
struct kvops_queries {
  const void* data;
  int64_t stride_batch, stride_head, stride_row;
  int64_t heads, rows;      /* rows: 1 to 256 */
  const int32_t* visible;   /* [batch, rows]: one past the last slot that a row sees, at most where the valid slots end.
                             * Null: the rows are the last tokens, each sees one slot more than the row before it, and
                             * the last one all valid slots. */
  const float* sink_logits; /* [heads]: one more logit in the softmax of every row, without a key. Null: none */
  float scale;              /* 0: 1 / sqrt(dim) */
  float softcap;            /* 0: none */
};

/* What becomes of the scores of several rows, and of the query heads of a KV head. Only heads may stay apart
 * (KVOPS_NONE). */
enum kvops_reduce KVOPS_INT { KVOPS_SUM, KVOPS_MEAN, KVOPS_MAX, KVOPS_NONE };

/* A pool of `count` threads. run calls body(first, last, context) for parts of [begin, end), of at least `grain` if it
 * can be, and returns 0 when all of them have returned, another number if it could not. */
struct kvops_threads {
  int64_t count;
  int32_t (*run)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
};

/* Why the last call in this thread that failed did. */
KVOPS_API const char* kvops_error(void);

/* KeyDiff. scores: [batch, heads, tokens], minus the cosine between each key and the sum of all normalized keys;
 * invalid slots are never selected. anchor: [batch, heads, dim], that sum. threads: null for one thread, here and
 * below. */
KVOPS_API int kvops_anchor_cosine(const struct kvops_shape* shape, const struct kvops_rows* k, float* scores,
                                  float* anchor, const struct kvops_threads* threads);

/* The slots of the `keep` highest scores, among them always the first `sinks` and the last `window` valid ones. Of
 * equal scores, the lower slots. indices: [batch, heads, min(keep, tokens)]. */
KVOPS_API int kvops_select_topk(const struct kvops_shape* shape, const float* scores, int64_t keep, int64_t sinks,
                                int64_t window, int64_t* indices, const struct kvops_threads* threads);

/* The softmax weight that each slot gets from the queries, reduced over the rows that see it and over each KV head's
 * query heads; 0 if no row sees it. SnapKV pools these scores over neighbours, H2O adds them up over steps. scores:
 * [batch, heads, tokens], or [batch, query heads, tokens] if over_heads is KVOPS_NONE. */
KVOPS_API int kvops_window_scores(const struct kvops_shape* shape, const struct kvops_queries* q,
                                  const struct kvops_rows* k, enum kvops_reduce over_rows, enum kvops_reduce over_heads,
                                  float* scores, const struct kvops_threads* threads);

/* Attention: with rows = 1 a step of decoding. out: [batch, query heads, rows, v's dim], in the dtype of q. lse:
 * [batch, query heads, rows], the log of the sum of a row's exp(logits), without the sink. For a row that sees nothing,
 * zeros and minus infinity. scores: as those of kvops_window_scores, in the same call; null if they are not wanted. */
KVOPS_API int kvops_window_attention(const struct kvops_shape* shape, const struct kvops_queries* q,
                                     const struct kvops_rows* k, const struct kvops_rows* v,
                                     enum kvops_reduce over_rows, enum kvops_reduce over_heads, void* out, float* lse,
                                     float* scores, const struct kvops_threads* threads);

/* LagKV (Eq. 5 to 9): the partitions of `lag` tokens after the first `prefix` are scored by their successor. scores:
 * [batch, heads, kvops_lag_segments(), lag]. */
KVOPS_API int64_t kvops_lag_segments(int64_t tokens, int64_t prefix, int64_t lag);
KVOPS_API int kvops_lag_score(const struct kvops_shape* shape, const struct kvops_rows* k, const struct kvops_rows* v,
                              int64_t prefix, int64_t lag, float* scores, const struct kvops_threads* threads);

/* LagKV (Eq. 10): the first `prefix` slots, the `keep` highest scores of each scored partition, and everything after
 * them. indices: [batch, heads, kvops_lag_kept()]. */
KVOPS_API int64_t kvops_lag_kept(const struct kvops_shape* shape, int64_t prefix, int64_t lag, int64_t keep);
KVOPS_API int kvops_lag_select(const struct kvops_shape* shape, const float* scores, int64_t prefix, int64_t lag,
                               int64_t keep, int64_t* indices, const struct kvops_threads* threads);

/* Copies the rows of `kept` indices per head. k_out, v_out: [batch, heads, kept, dim]; an index of -1 makes zeros. */
KVOPS_API int kvops_gather_kv(const struct kvops_shape* shape, const struct kvops_rows* k, const struct kvops_rows* v,
                              const int64_t* indices, int64_t kept, const struct kvops_rows* k_out,
                              const struct kvops_rows* v_out, const struct kvops_threads* threads);

/* Moves them to the front in place. */
KVOPS_API int kvops_compact_kv(const struct kvops_shape* shape, const struct kvops_rows* k, const struct kvops_rows* v,
                               const int64_t* indices, int64_t kept, const struct kvops_threads* threads);

#undef KVOPS_INT

#ifdef __cplusplus
}
#endif

#endif
