"""Measurements of a model's keys and queries, on the tensors of one layer.

anchors.py     ProtoKV's: which keys differ from their neighbours, whether they cluster, and who attends to them
attention.py   where queries attend: to which tokens, to sinks, and to keys that differ from the mean key
geometry.py    KeyDiff's: cosines of keys and queries, the volume of the kept keys, the paper's bounds
report.py      all of them for every layer of a model; python -m kvops.analysis

`starts` and `lengths` are those of the operators. Invalid slots and keys that are not finite are ignored.
"""

from .anchors import (
    Clustering,
    attention_by_outlier_group,
    clustering_degree,
    neighbourhood_similarity,
    outlier_histogram,
    sat_counts,
)
from .attention import attention_rank_correlation, cumulative_attention, sink_attention
from .geometry import (
    AnchorBound,
    AttentionBound,
    Locality,
    anchor_bound,
    attention_bound,
    key_locality,
    log_volume,
    query_key_cosine,
)

__all__ = [
    "AnchorBound",
    "AttentionBound",
    "Clustering",
    "Locality",
    "anchor_bound",
    "attention_bound",
    "attention_by_outlier_group",
    "attention_rank_correlation",
    "clustering_degree",
    "cumulative_attention",
    "key_locality",
    "log_volume",
    "neighbourhood_similarity",
    "outlier_histogram",
    "query_key_cosine",
    "sat_counts",
    "sink_attention",
]
