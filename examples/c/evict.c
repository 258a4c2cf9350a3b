/* Keeps a quarter of a KV cache with KeyDiff, in place, and decodes a token with it, from C and without torch. */
#include <kvops_c.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 8, QUERY_HEADS = 32, TOKENS = 4096, DIM = 128, KEEP = 1024 };

static float* random_floats(size_t count) {
  float* x = malloc(count * sizeof *x);
  for (size_t i = 0; x && i < count; ++i) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return x;
}

int main(void) {
  const struct kvops_shape shape = {1, HEADS, TOKENS, NULL, NULL};
  const int64_t token = DIM * sizeof(float), head = TOKENS * token;
  const struct kvops_rows k = {random_floats((size_t)HEADS * TOKENS * DIM), HEADS * head, head, token, DIM, KVOPS_F32};
  const struct kvops_rows v = {random_floats((size_t)HEADS * TOKENS * DIM), HEADS * head, head, token, DIM, KVOPS_F32};
  float* scores = malloc(sizeof(float) * HEADS * TOKENS);
  float* anchor = malloc(sizeof(float) * HEADS * DIM);
  int64_t* kept = malloc(sizeof(int64_t) * HEADS * KEEP);
  if (kvops_anchor_cosine(&shape, &k, scores, anchor, NULL) ||
      kvops_select_topk(&shape, scores, KEEP, 4, 32, kept, NULL) ||
      kvops_compact_kv(&shape, &k, &v, kept, KEEP, NULL)) {
    fprintf(stderr, "%s\n", kvops_error());
    return 1;
  }
  printf("%d of %d tokens; head 0 keeps", KEEP, TOKENS);
  for (int i = 0; i < 8; ++i) printf(" %lld", (long long)kept[i]);
  printf(" ...\n");

  const struct kvops_shape cache = {1, HEADS, KEEP, NULL, NULL};
  float* query = random_floats(QUERY_HEADS * DIM);
  const struct kvops_queries q = {.data = query, .stride_head = token, .heads = QUERY_HEADS, .rows = 1};
  float out[QUERY_HEADS * DIM], lse[QUERY_HEADS];
  if (kvops_window_attention(&cache, &q, &k, &v, KVOPS_SUM, KVOPS_MEAN, out, lse, NULL, NULL)) {
    fprintf(stderr, "%s\n", kvops_error());
    return 1;
  }
  printf("decoded: lse %.3f, out %.4f %.4f ...\n", lse[0], out[0], out[1]);
  free(k.data), free(v.data), free(scores), free(anchor), free(kept), free(query);
  return 0;
}
