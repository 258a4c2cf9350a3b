"""KeyDiff's view of keys and queries: their cosines, the volume that keys span, and the paper's bounds, both sides.

Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments", Sec. 3.3, App. C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..ops.checks import check_int, check_queries, check_rank, plain
from ..ops.window import outside_prefix, span_ends

TINY = torch.finfo(torch.float64).tiny


def query_key_cosine(k: Tensor, q: Tensor, *, starts: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """Compute the mean cosine between queries and keys, over all pairs.

    Its sign is that of the cosine between the mean unit key and the mean unit query, which is negative in the models
    that KeyDiff's paper measures (Fig. 14).

    Args:
        k: [b, Hk, n, d].
        q: [b, Hq, any, d].
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        fp64 [b, Hq], in [-1, 1].

    Raises:
        TypeError: q or k is not a tensor.
        ValueError: q or k has the wrong shape.

    Source: KeyDiff, App. C.3.
    """
    check_queries("query_key_cosine", "q", q, k)
    unit, counts = _unit_keys(k, starts, lengths)
    mean_key = unit.sum(2) / counts.sum(-1, keepdim=True)  # [b, Hk, d]
    mean_query = normalize(q.double(), dim=-1, eps=TINY).mean(2)  # [b, Hq, d]
    return (_per_kv_head(mean_query, k) * mean_key.unsqueeze(2)).sum(-1).flatten(1)


class Locality(NamedTuple):
    """The result of `key_locality`; each tensor is fp64 [b, Hk].

    Attributes:
        adjacent: The mean cosine of keys that follow one another.
        distant: The mean cosine of keys that are at least `distance` slots apart.
    """

    adjacent: Tensor
    distant: Tensor

    @property
    def ratio(self) -> Tensor:
        """How many times farther apart distant keys are than adjacent ones: (1 - distant) / (1 - adjacent)."""
        return (1 - self.distant) / (1 - self.adjacent)


def key_locality(
    k: Tensor, distance: int = 64, *, starts: Tensor | None = None, lengths: Tensor | None = None
) -> Locality:
    """Compare the keys of neighbours with those of tokens far apart.

    The function forms no pairs: O(n d).

    Args:
        k: [b, Hk, n, d].
        distance: The least distance of distant keys, in slots.
        starts: int32 [b], the first valid slot of each row.
        lengths: int32 [b], the number of valid slots of each row.

    Returns:
        The mean cosines of adjacent and of distant keys; NaN where there is no such pair.

    Raises:
        TypeError: distance is not an int, or k is not a tensor.
        ValueError: distance is less than 1, or k has the wrong shape.

    Source: LagKV, Sec. 2.2 (token-wise locality); ProtoKV, Sec. 3.1.
    """
    check_rank("key_locality", k)
    check_int("key_locality", "distance", distance, 1)
    unit, counts = _unit_keys(k, starts, lengths)
    n, distance = k.shape[2], min(plain(distance), k.shape[2])

    def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of x_i . x_i+1, and of x_i . x_j with j >= i + distance. x: [b, Hk, n, any]."""
        later = x.flip(2).cumsum(2).flip(2)  # row i: the sum of the rows from i on
        near = (x[:, :, :-1] * x[:, :, 1:]).sum((2, 3))
        return near, (x[:, :, : n - distance] * later[:, :, distance:]).sum((2, 3))

    sums, numbers = pairs(unit), pairs(counts.unsqueeze(-1).double())
    return Locality(*(total / number for total, number in zip(sums, numbers)))


def log_volume(k: Tensor, indices: Tensor | None = None) -> Tensor:
    """Compute log det of the Gram matrix of the kept keys: the log of the squared volume that they span.

    The paper's log det(K K^T) is -inf if there are more keys than dims. This function takes the smaller of the two Gram
    matrices, K K^T or K^T K, which have the same eigenvalues other than 0. Only compare sets of equally many keys.

    Args:
        k: [b, Hk, n, d], finite.
        indices: int64 [b, Hk, m], the kept slots, -1 for none, as `compress` returns them; None: all keys.

    Returns:
        fp64 [b, Hk]. -inf if the kept keys lie in a smaller subspace.

    Raises:
        TypeError: k is not a tensor.
        ValueError: k has the wrong shape.

    Source: KeyDiff, App. C.2, Fig. 12.
    """
    check_rank("log_volume", k)
    k = k.double()
    count = torch.full(k.shape[:2], k.shape[2], device=k.device)
    if indices is not None:
        kept = indices.unsqueeze(-1)
        k = torch.where(kept >= 0, k.gather(2, kept.clamp(min=0).expand(*indices.shape, k.shape[3])), 0.0)
        count = (indices >= 0).sum(-1)
    values = torch.linalg.svdvals(k)  # descending; the rows of missing slots add zeros at the end
    used = torch.arange(values.shape[-1], device=k.device) < count.unsqueeze(-1)
    return torch.where(used, 2 * values.log(), 0.0).sum(-1)


class AttentionBound(NamedTuple):
    """The result of `attention_bound`; each tensor is fp64 [b, Hq, rows, n].

    Attributes:
        weight: w, the attention weight of each key.
        cosine: cos(k, q).
        bound: The lower bound of the cosine.
    """

    weight: Tensor
    cosine: Tensor
    bound: Tensor


def attention_bound(k: Tensor, q: Tensor, *, scale: float | None = None, limit: bool = False) -> AttentionBound:
    """Compute both sides of KeyDiff's Lemma 3.1: a key with much attention is aligned with the query.

    ```text
    cos(k*, q) >= (log(n / (n + 1)) - log(1 - w)) / (2 M) - 1        w: the attention weight of k*, n other keys
    ```

    The lemma has ||q|| = 1 and scale 1. Here the query's norm and the scale are moved into the keys, so that
    M = max over j of (scale ||q|| ||k_j||)^2. The attention of a model makes M large and the bound close to -1.

    As printed the lemma is not true for all keys: its proof replaces k* . q by -M cos(k*, q), which needs cos >= 0. A
    short key with a negative cosine can violate it. For cos >= 0 and M >= 1/4 it holds.

    Args:
        k: [b, Hk, n + 1, d], finite. Each key in turn is k*, the others are the n keys.
        q: [b, Hq, rows, d]. Each query sees all keys.
        scale: The scale of the model's attention; 1 / sqrt(d) if None.
        limit: Leave log(n / (n + 1)) out, as the lemma does for n to infinity. The bound is then larger by up to
            1 / (2 M n), and can exceed the cosine.

    Returns:
        The weights, the cosines and the bounds.

    Raises:
        TypeError: q or k is not a tensor.
        ValueError: q or k has the wrong shape.

    Source: KeyDiff, Lemma 3.1; App. C.3, Theorem C.1.
    """
    check_queries("attention_bound", "q", q, k)
    scale = k.shape[3] ** -0.5 if scale is None else scale
    keys, queries = k.double().unsqueeze(2), _per_kv_head(q.double(), k)  # [b, Hk, 1, n, d], [b, Hk, G, rows, d]
    logits = scale * queries @ keys.mT
    weight = logits.softmax(-1)
    norms = scale * queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(3)
    largest = norms.square().amax(-1, keepdim=True)
    others = _log_sum_exp_of_others(logits) - logits.logsumexp(-1, keepdim=True)  # log(1 - w), without cancellation
    n = k.shape[2] - 1
    finite = 0.0 if limit else torch.tensor(n / (n + 1), dtype=torch.float64).log()
    cosine = normalize(queries, dim=-1, eps=TINY) @ normalize(keys, dim=-1, eps=TINY).mT
    return AttentionBound(*(x.flatten(1, 2) for x in (weight, cosine, (finite - others) / (2 * largest) - 1)))


class AnchorBound(NamedTuple):
    """The result of `anchor_bound`.

    Attributes:
        similarity: fp64 [b, Hq, 1, n], cos(k_mean, k), the negative of KeyDiff's score.
        bound: fp64 [b, Hq, rows, n], the upper bound of the similarity.
        key_query: fp64 [b, Hq, rows, n], beta = cos(k, q).
        mean_query: fp64 [b, Hq, rows, 1], alpha = cos(k_mean, q).
    """

    similarity: Tensor
    bound: Tensor
    key_query: Tensor
    mean_query: Tensor

    @property
    def premise(self) -> Tensor:
        """Where the theorem's assumption alpha < 0 < beta holds: bool [b, Hq, rows, n]."""
        return (self.mean_query < 0) & (self.key_query > 0)


def anchor_bound(k: Tensor, q: Tensor) -> AnchorBound:
    """Compute both sides of KeyDiff's Theorem 3.2: a key aligned with the query differs from the mean key.

    ```text
    cos(k_mean, k*) <= 1 + alpha beta - alpha^2 / 2 - beta^2 / 2 = 1 - (alpha - beta)^2 / 2
    alpha = cos(k_mean, q) < 0        beta = cos(k*, q) > 0
    ```

    The inequality itself holds for any signs. Those of the theorem (`AnchorBound.premise`) make the bound fall as a
    key's attention grows.

    Args:
        k: [b, Hk, n, d], finite. Each key in turn is k*; k_mean is the mean of all keys.
        q: [b, Hq, rows, d].

    Returns:
        The similarities, their bounds, and the two cosines.

    Raises:
        TypeError: q or k is not a tensor.
        ValueError: q or k has the wrong shape.

    Source: KeyDiff, Theorem 3.2; App. C.3.
    """
    check_queries("anchor_bound", "q", q, k)
    unit = normalize(k.double(), dim=-1, eps=TINY).unsqueeze(2)
    mean = normalize(k.double().mean(2), dim=-1, eps=TINY)[:, :, None, None]  # [b, Hk, 1, 1, d]
    queries = normalize(_per_kv_head(q.double(), k), dim=-1, eps=TINY)
    beta, alpha = queries @ unit.mT, queries @ mean.mT
    similarity = (mean @ unit.mT).expand(-1, -1, queries.shape[2], -1, -1)
    return AnchorBound(*(x.flatten(1, 2) for x in (similarity, 1 - (alpha - beta).square() / 2, beta, alpha)))


def _unit_keys(k: Tensor, starts: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Unit keys, fp64 [b, Hk, n, d], zero where they do not count; and which count, bool [b, Hk, n]."""
    counts = k.isfinite().all(-1) & ~outside_prefix(k, 0, starts, span_ends(k, starts, lengths))
    return normalize(torch.where(counts.unsqueeze(-1), k, 0.0).double(), dim=-1, eps=TINY), counts


def _per_kv_head(q: Tensor, k: Tensor) -> Tensor:
    """[b, Hq, ...] -> [b, Hk, G, ...]."""
    return q.unflatten(1, (k.shape[1], -1))


def _log_sum_exp_of_others(logits: Tensor) -> Tensor:
    """Per entry, the log-sum-exp of all other entries of the last dim, from prefixes and suffixes."""
    empty = torch.full_like(logits[..., :1], -torch.inf)
    before = torch.cat((empty, logits.logcumsumexp(-1)[..., :-1]), -1)
    after = torch.cat((logits.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:], empty), -1)
    return before.logaddexp(after)
