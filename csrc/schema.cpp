// Every operator of kvops: the table of contents. Contracts: kvops/ops.py; parameters and checks: ops/<op>.h.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(kvops, m) {
  // LagKV: min-max normalized by the next partition, std over channels, softmax over tokens.
  m.def(
      "lag_score(Tensor k, Tensor v, int lag, int prefix=0, float v_weight=1.0, bool self_reference=False, "
      "Tensor? starts=None, Tensor? lengths=None, Tensor? block_table=None) -> Tensor");
  // KeyDiff: minus the cosine between each key and the sum of normalized keys.
  m.def(
      "anchor_cosine(Tensor k, Tensor? anchor=None, bool normalize_anchor=True, Tensor? starts=None, "
      "Tensor? lengths=None, Tensor? block_table=None) -> (Tensor, Tensor)");
  // Observation window: how much the last queries attend to each key, reduced over rows and query groups.
  m.def(
      "window_scores(Tensor q, Tensor k, Tensor visible, Tensor? lse=None, *, float? scale=None, "
      "int score=0, int reduce=0, int group_reduce=1, Tensor? starts=None, float softcap=0.0, "
      "Tensor? sink_logits=None, Tensor? block_table=None) -> Tensor");
  // The attention of the last queries, its log-sum-exp, and the window's scores; of keys that are rotated on the way.
  m.def(
      "window_attention(Tensor q, Tensor k, Tensor v, Tensor visible, *, float? scale=None, int reduce=0, "
      "int group_reduce=1, Tensor? starts=None, float softcap=0.0, Tensor? sink_logits=None, Tensor? cos=None, "
      "Tensor? sin=None, bool interleaved=False, bool scores=True, Tensor? block_table=None) -> (Tensor, Tensor, "
      "Tensor)");
  // The slots to keep, ascending, by (score, lower slot), with sinks and window, per row or per segment.
  m.def(
      "select_topk(Tensor scores, int k, int sinks=0, int window=0, int? seq_len=None, Tensor? starts=None, "
      "Tensor? lengths=None, Tensor? budgets=None, bool fill_invalid=False) -> Tensor");
  // The kept rows of K and V.
  m.def("gather_kv(Tensor k, Tensor v, Tensor indices, Tensor? block_table=None) -> (Tensor, Tensor)");
  m.def(
      "gather_kv.out(Tensor k, Tensor v, Tensor indices, Tensor? block_table=None, *, Tensor(a!) k_out, "
      "Tensor(b!) v_out) -> ()");
  // The same in place, of one layer or of all at once.
  m.def("compact_kv_(Tensor(a!)[] k, Tensor(b!)[] v, Tensor[] indices, Tensor? block_table=None) -> ()");
  // LaCache: what the ladder keeps of each layer, all layers at once; the keys' RoPE is turned on while they move.
  m.def(
      "ladder_gather(Tensor[] k, Tensor[] v, int[] plan, int[] layer, *, Tensor? inv_freq=None, "
      "bool interleaved=False) -> (Tensor[], Tensor[])");
  m.def(
      "ladder_gather.out(Tensor[] k, Tensor[] v, int[] plan, int[] layer, *, Tensor? inv_freq=None, "
      "bool interleaved=False, Tensor(a!)[] k_out, Tensor(b!)[] v_out) -> ()");
  // The same in place.
  m.def(
      "ladder_compact_(Tensor(a!)[] k, Tensor(b!)[] v, int[] plan, int[] layer, *, Tensor? inv_freq=None, "
      "bool interleaved=False) -> ()");
  // Keys that are cached without positions, rotated at the slots they lie in.
  m.def("rope_at_slots(Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False) -> Tensor");
  m.def("rope_at_slots.out(Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False, Tensor(a!) k_out) -> ()");
  // ProtoKV: how little a key looks like its neighbours, in standard deviations.
  m.def(
      "outlier_degree(Tensor k, int kappa=5, bool standardize=True, Tensor? starts=None, Tensor? lengths=None, "
      "Tensor? block_table=None) -> Tensor");
  // The bucket of each chosen key: the signs of its random Fourier features.
  m.def("lsh_bucket(Tensor k, Tensor indices, Tensor projection, Tensor phase, Tensor? block_table=None) -> Tensor");
  // The mean key of each chunk of tokens, and of each bucket of semantic anchors; how many each is of.
  m.def(
      "build_prototypes(Tensor k, Tensor? sat_indices, Tensor? buckets, int num_chunks, int num_buckets=4, "
      "Tensor? starts=None, Tensor? lengths=None, Tensor? block_table=None) -> (Tensor, Tensor)");
  // The prototype of highest cosine for each key: a matrix product whose result is never written.
  m.def(
      "assign_prototypes(Tensor k, Tensor prototypes, Tensor? starts=None, Tensor? lengths=None, "
      "Tensor? block_table=None) -> Tensor");
  // The mean score of each cluster of tokens.
  m.def("cluster_mean(Tensor scores, Tensor assignment, int num_clusters, int reduce=1) -> Tensor");
  // Scores by which select_topk keeps whole clusters, best first, and of the one that does not fit the best tokens.
  m.def(
      "cluster_priority(Tensor scores, Tensor assignment, Tensor cluster_scores, int k, Tensor? budgets=None, "
      "bool whole=False) -> (Tensor, Tensor)");
}
