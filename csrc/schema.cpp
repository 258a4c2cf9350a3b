// Every operator of kvops: the table of contents. Contracts: kvops/ops/api.py. Parameters and checks: ops/<op>.h, .cpp.
#include "registry.h"

KVOPS_REGISTER(DEF, nullptr, m) {
  // LagKV scores: min-max normalize by the next partition, take the std over channels, then softmax over tokens.
  m.def(
      "lag_score(Tensor k, Tensor v, int lag, int prefix=0, float v_weight=1.0, bool self_reference=False, "
      "Tensor? starts=None, Tensor? lengths=None, Tensor? block_table=None) -> Tensor");
  // KeyDiff scores: minus the cosine between each key and the sum of all normalized keys (the anchor).
  m.def(
      "anchor_cosine(Tensor k, Tensor? anchor=None, bool normalize_anchor=True, Tensor? starts=None, "
      "Tensor? lengths=None, Tensor? block_table=None) -> (Tensor, Tensor)");
  // SnapKV, H2O, TOVA: the attention each key receives from the last queries, reduced over rows and query groups.
  m.def(
      "window_scores(Tensor q, Tensor k, Tensor visible, Tensor? lse=None, *, float? scale=None, "
      "int score=0, int reduce=0, int group_reduce=1, Tensor? starts=None, float softcap=0.0, "
      "Tensor? sink_logits=None, Tensor? row_weights=None, Tensor? k_scale=None, Tensor? block_table=None) -> Tensor");
  // The last queries' attention output, log-sum-exp and window scores in one call; can rotate keys as it reads them.
  m.def(
      "window_attention(Tensor q, Tensor k, Tensor v, Tensor visible, *, float? scale=None, int reduce=0, "
      "int group_reduce=1, Tensor? starts=None, float softcap=0.0, Tensor? sink_logits=None, Tensor? cos=None, "
      "Tensor? sin=None, bool interleaved=False, bool scores=True, Tensor? key_bias=None, Tensor? k_scale=None, "
      "Tensor? v_scale=None, Tensor? block_table=None) -> (Tensor, Tensor, Tensor)");
  // DropKV scores: how far the outputs of the last queries move if a token is dropped.
  m.def(
      "drop_scores(Tensor q, Tensor k, Tensor v, Tensor visible, *, float? scale=None, int group_reduce=1, "
      "Tensor? starts=None, float softcap=0.0, Tensor? sink_logits=None, float epsilon=1e-6, "
      "Tensor? block_table=None) -> Tensor");
  // The slots to keep, ascending: top k, ties to the lower slot, with sinks and recent window, per row or segment.
  m.def(
      "select_topk(Tensor scores, int k, int sinks=0, int window=0, int? seq_len=None, Tensor? starts=None, "
      "Tensor? lengths=None, Tensor? budgets=None, bool fill_invalid=False) -> Tensor");
  // Copies the kept rows of K and V to new memory (or to `out`).
  m.def("gather_kv(Tensor k, Tensor v, Tensor indices, Tensor? block_table=None) -> (Tensor, Tensor)");
  m.def(
      "gather_kv.out(Tensor k, Tensor v, Tensor indices, Tensor? block_table=None, *, Tensor(a!) k_out, "
      "Tensor(b!) v_out) -> ()");
  // Moves the kept rows of K and V to the front of the same memory, for one layer or many in one call.
  m.def("compact_kv_(Tensor(a!)[] k, Tensor(b!)[] v, Tensor[] indices, Tensor? block_table=None) -> ()");
  // LaCache: gathers the slots its ladder keeps, all layers at once, and can re-rotate keys to their new slots.
  m.def(
      "ladder_gather(Tensor[] k, Tensor[] v, int[] plan, int[] layer, *, Tensor? inv_freq=None, "
      "bool interleaved=False) -> (Tensor[], Tensor[])");
  m.def(
      "ladder_gather.out(Tensor[] k, Tensor[] v, int[] plan, int[] layer, *, Tensor? inv_freq=None, "
      "bool interleaved=False, Tensor(a!)[] k_out, Tensor(b!)[] v_out) -> ()");
  // The same, in place.
  m.def(
      "ladder_compact_(Tensor(a!)[] k, Tensor(b!)[] v, int[] plan, int[] layer, *, Tensor? inv_freq=None, "
      "bool interleaved=False) -> ()");
  // RoPE for keys that are cached without positions: rotates each key by the slot it lies in.
  m.def("rope_at_slots(Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False) -> Tensor");
  m.def("rope_at_slots.out(Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False, Tensor(a!) k_out) -> ()");
  // ProtoKV outlier degree: how dissimilar a key is from its neighbours, in standard deviations.
  m.def(
      "outlier_degree(Tensor k, int kappa=5, bool standardize=True, Tensor? starts=None, Tensor? lengths=None, "
      "Tensor? block_table=None) -> Tensor");
  // ProtoKV hash: the bucket of each chosen key, given by the signs of its random Fourier features.
  m.def("lsh_bucket(Tensor k, Tensor indices, Tensor projection, Tensor phase, Tensor? block_table=None) -> Tensor");
  // ProtoKV prototypes: the mean key, and number of keys, of each chunk of tokens and each bucket of anchors.
  m.def(
      "build_prototypes(Tensor k, Tensor? sat_indices, Tensor? buckets, int num_chunks, int num_buckets=4, "
      "int least_chunk=1, Tensor? starts=None, Tensor? lengths=None, Tensor? block_table=None) -> (Tensor, Tensor)");
  // The nearest prototype (by cosine) of each key: a matrix product with a fused argmax, so it is never written.
  m.def(
      "assign_prototypes(Tensor k, Tensor prototypes, Tensor? starts=None, Tensor? lengths=None, "
      "Tensor? block_table=None) -> Tensor");
  // Expected Attention: the logarithm of the expected attention weight of each key, for queries of a Gaussian.
  m.def(
      "quadratic_scores(Tensor k, Tensor mean, Tensor? cov=None, *, float? scale=None, Tensor? starts=None, "
      "Tensor? lengths=None, Tensor? block_table=None) -> Tensor");
  // TriAttention: the product of each key with rotated query centers, and with weights the norms of its RoPE pairs.
  m.def(
      "trig_scores(Tensor k, Tensor centers, Tensor? norms=None, *, bool interleaved=False, Tensor? starts=None, "
      "Tensor? lengths=None, Tensor? block_table=None) -> Tensor");
  // R-KV redundancy: the mean cosine of each key with all others, except where it is the last similar key of one.
  m.def(
      "key_similarity(Tensor k, float threshold=0.5, Tensor? starts=None, Tensor? lengths=None, "
      "Tensor? block_table=None) -> Tensor");
  // CriticalKV value norms: the L1 norm of each value after the output projection of the group's query heads.
  m.def(
      "value_norm(Tensor v, Tensor w_o, *, int group_reduce=1, Tensor? starts=None, Tensor? lengths=None, "
      "Tensor? block_table=None) -> Tensor");
  // VaSE value ranges: the largest channel of each value minus the smallest.
  m.def("value_range(Tensor v, *, Tensor? starts=None, Tensor? lengths=None, Tensor? block_table=None) -> Tensor");
  // The mean (or sum) of the token scores in each cluster.
  m.def("cluster_mean(Tensor scores, Tensor assignment, int num_clusters, int reduce=1) -> Tensor");
  // Token priorities that make select_topk keep whole clusters, best first, then the best tokens of one more.
  m.def(
      "cluster_priority(Tensor scores, Tensor assignment, Tensor cluster_scores, int k, Tensor? budgets=None, "
      "bool whole=False) -> (Tensor, Tensor)");
}
