# Written by `make tables` from the policies.

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor
from typing_extensions import Unpack

from kvops.methods.attention_matching import MatchCall, Matched
from kvops.methods.base import Compressed, LayerSpans, Policy
from kvops.methods.gates import Gates
from kvops.methods.kvzip import RepeatCall
from kvops.methods.queries import QueryCall
from kvops.methods.statistics import QueryStatistics
from kvops.ops.rope import Rope

__all__ = [
    "attentionmatching_compress",
    "attentionmatching_compress_",
    "chunkkv_compress",
    "chunkkv_compress_",
    "criticalkv_compress",
    "criticalkv_compress_",
    "defensivekv_compress",
    "defensivekv_compress_",
    "expectedattention_compress",
    "expectedattention_compress_",
    "h2o_compress",
    "h2o_compress_",
    "keydiff_compress",
    "keydiff_compress_",
    "kvzap_compress",
    "kvzap_compress_",
    "kvzip_compress",
    "kvzip_compress_",
    "l2_compress",
    "l2_compress_",
    "lacache_compress",
    "lacache_compress_",
    "lagkv_compress",
    "lagkv_compress_",
    "laq_compress",
    "laq_compress_",
    "protokv_compress",
    "protokv_compress_",
    "pyramidkv_compress",
    "pyramidkv_compress_",
    "random_compress",
    "random_compress_",
    "rkv_compress",
    "rkv_compress_",
    "satkv_compress",
    "satkv_compress_",
    "snapkv_compress",
    "snapkv_compress_",
    "streamingllm_compress",
    "streamingllm_compress_",
    "tova_compress",
    "tova_compress_",
    "triattention_compress",
    "triattention_compress_",
    "vase_compress",
    "vase_compress_",
]

def attentionmatching_compress(
    k: Tensor,
    v: Tensor,
    q_reference: Tensor,
    budget: int | float | Tensor,
    *,
    row_weights: Tensor | None = None,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    scope: Literal["layer", "model"] = "layer",
    chunk: int = 2048,
    previous: int = 8,
    instruction: tuple[int, ...] | None = None,
    next_instruction: tuple[int, ...] | None = None,
    suffix: tuple[int, ...] | None = None,
    queries: int = 4096,
    max_bias: float = 3.0,
    ridge: float = 0.001,
    **call: Unpack[MatchCall],
) -> Matched:
    """Attention Matching: replaces the prompt by fewer keys with biases and fitted values, once.

    `kvops.AttentionMatching` with these settings in one call of `compress`, which ignores settings of caches.

    What the attention over a prompt gives a query i is its output o_i and its mass m_i; with both, it can be merged
    with the attention over any later tokens. So the kept keys, with a bias each, and their values are fitted to the
    outputs and masses of reference queries:

    ```text
    a[i, j] = exp(scale * q_i . k_j) / m_i         m_i = sum over all j of exp(scale * q_i . k_j)
    score   = max over the group's query heads and i of r_i a[i, j]                      the best keys are kept
    bias    = log w,  |bias| <= max_bias
              w = argmin of the sum over i of r_i^2 (sum over the kept j of a[i, j] w_j - 1)^2
    x[i, j] = a[i, j] w_j / sum over the kept j of a[i, j] w_j
    values  = argmin over c of
              the sum over i of r_i^2 |sum over the kept j of x[i, j] c_j - o_i|^2 + damping |c - v|^2
    ```

    The reference queries are those of a second reading of the prompt, in KVzip's passes (`RepeatPolicy`). Their
    weight r_i is the part of the query's softmax that was on the prompt; the rest was on tokens of the pass. Or they
    are any that a one-shot call gets. A query counts for its KV head. The sinks of a softmax (`sink_logits`)
    change neither keys nor values.

    Args:
        k: [b, Hk, n, d], the keys.
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_reference: [b, Hq, rows, d], the reference queries, rotated like k. Each sees all valid keys.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1.
        row_weights: fp32 [b, Hq, rows], finite and at least 0: how much each reference query counts; None: 1.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        scope: Which heads share a budget with head_mode="adaptive": those of a "layer", or of the whole "model", which
            keeps its highest scores in whichever layers and heads they are. The budget is then the mean over all heads,
            without the floor of `kvops.head_budgets`, and only `kvops.hf` evicts.
        chunk: How many tokens of the prompt a pass repeats.
        previous: How many of the tokens before its chunk a pass reads between instruction and chunk.
        instruction: The token ids of the instruction of the first pass. None: not given yet.
        next_instruction: The token ids of the instruction of each later pass, or None.
        suffix: The token ids between them and the chunk, or None: with a chat model, those that end the user's turn and
            begin the answer. `kvops.hf` needs all three, which `kvops.hf.repeat_prompts` makes from a tokenizer; with
            () for each a pass reads the chunk alone. `kvops.Cache` and one-shot calls do not use them, because their
            caller runs the passes.
        queries: About how many reference queries of a head a cache remembers of all passes, evenly spaced; at least one
            of each pass.
        max_bias: The largest absolute change of a bias by one fit, at most 30; 0 fits none.
        ridge: The damping of the values' changes, as a fraction of the mean diagonal of the normal equations, at least
            1e-4.
        **call: scale, softcap (0), sink_logits, starts, lengths, fill_invalid, out, layout, layer, num_layers; see
            `MatchCall`, `Logits`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots, v fitted, with the biases as the attribute `key_bias`; see `Matched`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: Attention Matching, Zweiger et al., 2026, Sec. 3, with "highest attention" keys.
    """

def attentionmatching_compress_(
    k: Tensor,
    v: Tensor,
    q_reference: Tensor,
    budget: int | float | Tensor,
    *,
    row_weights: Tensor | None = None,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    scope: Literal["layer", "model"] = "layer",
    chunk: int = 2048,
    previous: int = 8,
    instruction: tuple[int, ...] | None = None,
    next_instruction: tuple[int, ...] | None = None,
    suffix: tuple[int, ...] | None = None,
    queries: int = 4096,
    max_bias: float = 3.0,
    ridge: float = 0.001,
    **call: Unpack[MatchCall],
) -> Matched:
    """`attentionmatching_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `attentionmatching_compress` except `out`.
    """

def chunkkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 1,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    chunk: int = 20,
    **call: Unpack[QueryCall],
) -> Compressed:
    """ChunkKV: keeps whole chunks of tokens, by the mean of SnapKV's scores (without pooling) over all heads.

    `kvops.ChunkKV` with these settings in one call of `compress`, which ignores settings of caches.

    The w newest tokens are kept. The tokens before them are cut into chunks; the last chunk may be shorter. Chunks are
    kept whole by descending mean score. Of the chunk that straddles the budget, the best tokens are kept, so the budget
    is met exactly. All KV heads keep the same tokens. Keys whose score is NaN do not count in the mean of their chunk
    and are evicted first.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1; the
            same for all heads. It must hold the window.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: Without effect, since all heads keep the same tokens; "adaptive" is refused.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        kernel_size: The slots over which scores are pooled; odd. The default, 1, does not pool.
        pooling: "max", or "avg" (over kernel_size slots, where slots outside count as 0).
        pool_first: Pool the scores of each query head, then reduce the group.
        score: "softmax"; "dot": the sum of the logits themselves; or "drop": how far the rows' outputs move if the
            token is dropped (`kvops.ops.drop_scores`), which needs the values too.
        chunk: Tokens per chunk.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: ChunkKV, Liu et al., 2025.
    """

def chunkkv_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 1,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    chunk: int = 20,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`chunkkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `chunkkv_compress` except `out`.
    """

def criticalkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    w_o: Tensor | Sequence[Tensor] | None = None,
    first_stage_ratio: float = 0.5,
    epsilon: float = 0.0001,
    **call: Unpack[QueryCall],
) -> Compressed:
    """CriticalKV: keeps tokens by attention first, then by attention times the norm of the projected value, per head.

    `kvops.CriticalKV` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    s[j]    = SnapKV's score: the pooled attention of the prompt's last w queries
    norm[j] = mean over the group's query heads h of ||W_O^h v_j||_1                  (`ops.value_norm`)
    kept    = the w newest tokens;
              of the c = budget - w others first_stage_ratio * c, rounded down, by s;
              and the rest by (s / w + epsilon) * norm
    ```

    The rule needs the weights of the output projection, W_O. `kvops.hf.for_model` takes them from a model, which
    `kvops.hf.compress`, `kvops.hf.generate` and the evaluation do by themselves. Caches evict when `SnapKV`'s do.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It must hold the window.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention. With "adaptive" the heads share
            the layer's budget by s, and each splits its own into the two stages. With "shared" both scores are means
            over the heads.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        kernel_size: The slots over which scores are pooled; odd. 1 does not pool.
        pooling: "max", or "avg" (over kernel_size slots, where slots outside count as 0).
        pool_first: Pool the scores of each query head, then reduce the group.
        score: "softmax"; "dot": the sum of the logits themselves; or "drop": how far the rows' outputs move if the
            token is dropped (`kvops.ops.drop_scores`), which needs the values too.
        w_o: [hidden, Hq * dv], the weights of the output projection as torch.nn.Linear stores them; or a list of them,
            one for each layer that evicts, in which case one-shot calls need `layer`. They are converted to v's dtype
            if they have another.
        first_stage_ratio: The part of the budget without the protected tokens that attention alone decides, in [0, 1].
            With 1 the rule is SnapKV's.
        epsilon: Added to the mean attention of a query, at least 0, so that tokens without attention are ordered by
            their norms.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: CriticalKV, Feng et al., 2025.
    """

def criticalkv_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    w_o: Tensor | Sequence[Tensor] | None = None,
    first_stage_ratio: float = 0.5,
    epsilon: float = 0.0001,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`criticalkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `criticalkv_compress` except `out`.
    """

def defensivekv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    kernel_size: int = 5,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    prior: float = 1.0,
    stages: bool = True,
    first_stage_mass: float = 0.9,
    w_o: Tensor | Sequence[Tensor] | None = None,
    **call: Unpack[QueryCall],
) -> Compressed:
    """DefensiveKV: keeps the tokens to which at least one of the prompt's last queries attends, per head.

    `kvops.DefensiveKV` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    a[i, j] = softmax over j of scale * q_i . k_j      the last w queries, each over the keys up to its own
    m[j]    = mean over the group's query heads and the rows i of a[i, j]       for j < n - w
    r[j]    = max over the group's query heads and the rows i of a[i, j]        the worst-case risk
    p[j]    = the highest r among the kernel_size slots centred on j
    risk[j] = max(p[j], prior * mean of p over all j < n - w)                   the prior-risk correction
    norm[j] = mean over the group's query heads h of ||W_O^h v_j||_1            (`ops.value_norm`)
    kept    = the w newest tokens;
              the tokens of highest m, as long as the attention m of all others is more than 1 - first_stage_mass;
              and up to the budget the tokens of highest risk * norm / (sum of norm over all j < n - w)
    ```

    A key that is important for a single query has a low mean, and SnapKV evicts it. Here its one high weight counts.
    The correction gives each key a risk of at least the head's mean. The two stages are CriticalKV's; without them
    (`stages=False`) the risk alone decides, and W_O is not needed. Keys whose score is NaN do not count in the sums and
    are evicted first, and so are tokens whose value is not finite.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It must hold the window.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention. With "adaptive" the heads share
            the layer's budget, and each stage is one for all of them: the first keeps the layer's highest m, as long as
            the attention of all others is more than 1 - first_stage_mass on average over the heads. With "shared" m and
            the second stage's scores are means over the heads.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum". Of r; m
            is always a mean.
        kernel_size: The slots over which scores are pooled; odd. 1 does not pool.
        pooling: "max", or "avg" (over kernel_size slots, where slots outside count as 0).
        pool_first: Pool the scores of each query head, then reduce the group.
        score: "softmax"; or "dot", see `WindowPolicy`, which needs `stages=False`.
        prior: The least risk of a key, as a multiple of the head's mean risk; at least 0. 0 does not correct.
        stages: Keep the tokens of most attention first, and weight the risk by the norms of the projected values.
        first_stage_mass: The part of the attention, in [0, 1], that the window, the sinks and the first stage are to
            hold. The token that would reach it is left to the second stage.
        w_o: The weights of the output projection, see `CriticalKV`. Only needed with `stages`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: DefensiveKV, Feng et al., 2025, and its released code.
    """

def defensivekv_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    kernel_size: int = 5,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    prior: float = 1.0,
    stages: bool = True,
    first_stage_mass: float = 0.9,
    w_o: Tensor | Sequence[Tensor] | None = None,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`defensivekv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `defensivekv_compress` except `out`.
    """

def expectedattention_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    statistics: QueryStatistics | str | None = None,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """Expected Attention: keeps the tokens with the largest expected contribution to the next queries' output.

    `kvops.ExpectedAttention` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    R        = mean over the next `future` positions of their RoPE
    mu, C    = R mean, R cov R^T                                    of the query statistics
    z[h, i]  = scale mu_h . k_i + scale^2 / 2 k_i^T C_h k_i         log of the mean weight of a Gaussian query
    a        = softmax over the tokens after the sinks of z
    score[i] = (mean over the group of a[h, i] + epsilon) * ||v_i||
    ```

    `head_mode="adaptive"` shares a layer's budget among its heads, as AdaKV does.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1.
        sinks: First tokens that are always kept; they count towards the budget. The softmax leaves these tokens out.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        recent: Newest tokens that are always kept (int), or a fraction in [0, 1) of the budget (float); they count
            towards the budget. With head_mode="adaptive" each head protects this fraction of its own budget, in a cache
            of the mean budget; the budgets themselves are computed with this fraction of the mean budget protected in
            every head.
        statistics: A `QueryStatistics` of the model, or the path of its file. It is required: calls without it raise
            ValueError. If it covers several layers, single calls need `layer` and `num_layers`. Or "prompt", as in
            kvpress: the mean and the covariance of the prompt's own queries, per row, without those of the first
            `sinks` tokens. A cache gathers them and needs `rope`, which `kvops.hf` fills in; one-shot calls and engines
            raise ValueError. Later steps of several tokens add to them. Evictions in decode use them too. A row whose
            prompt has at most `sinks` tokens has mean 0 and covariance 0.
        future: How many next positions the queries are expected at, at most 2^40.
        covariance: If False, only the mean query counts: C is 0.
        value_norm: If False, the score is without epsilon and ||v_i||.
        epsilon: Added to the expected weight, at least 0. kvpress uses 0.01 with adaptive budgets.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: Expected Attention, Devoto et al., 2025; code: kvpress, expected_attention_press.py.
    """

def expectedattention_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    statistics: QueryStatistics | str | None = None,
    future: int = 512,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`expectedattention_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `expectedattention_compress` except `out`.
    """

def h2o_compress(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0.5,
    **call: Unpack[QueryCall],
) -> Compressed:
    """H2O: keeps the newest tokens (half of the budget) and the highest scores among the older ones, per head.

    `kvops.H2O` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    score[j] = mean over the group's query heads of sum over all queries i of softmax(q_i k)_j       causal
    ```

    A one-shot call takes the queries of the last t slots; t = n, the whole prompt, is H2O. The n x n weights are never
    written: blocks of 256 rows are scored and added up.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q: [b, Hq, t, d], the queries of the last t slots; t = n, the whole prompt, is H2O. Query head h belongs to KV
            head h // (Hq / Hk).
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once. The paper's buffer is 1.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        recent: Newest tokens that are always kept: an int, or a fraction in [0, 1) of the budget (float). With
            head_mode="adaptive" as in `KeyPolicy`.
        **call: See `QueryCall`; lse is fp32 [b, Hq, t].

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: H2O, Zhang et al., 2023.
    """

def h2o_compress_(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0.5,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`h2o_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `h2o_compress` except `out`.
    """

def keydiff_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    merge: bool = False,
    normalize_anchor: bool = True,
    metric: Literal["cosine", "dot", "euclidean"] = "cosine",
    anchor: Literal["mean", "median", "pairwise"] = "mean",
    refresh: int = 1024,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """KeyDiff: keeps the keys that are least similar to the mean key, per head.

    `kvops.KeyDiff` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    mu       = mean over j of k_j / ||k_j||
    score[i] = -cos(k_i, mu)
    ```

    If the prompt is appended in blocks (128 tokens in the paper), a cache never holds more than budget + block tokens;
    `keydiff_compress` takes the whole prompt at once. In decode the cache evicts as `buffer` says. The anchor mu is
    then a running sum: the cache adds new keys and subtracts evicted ones. It recomputes the sum after `refresh`
    evictions, because fp32 sums drift, or when that is less work.

    The ablations run in plain PyTorch.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1.
        sinks: First tokens that are always kept; they count towards the budget. The paper protects none.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once. The paper evicts after
            every token: buffer=1.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        recent: Newest tokens that are always kept (int), or a fraction in [0, 1) of the budget (float); they count
            towards the budget. With head_mode="adaptive" each head protects this fraction of its own budget, in a cache
            of the mean budget; the budgets themselves are computed with this fraction of the mean budget protected in
            every head.
        merge: Average evicted values into the kept tokens with the most similar keys; not part of the paper. This needs
            n * m * d multiply-adds per head for m kept tokens, and 8 n dv bytes of memory per head until it is done.
            Pages, and engines that move tokens by themselves, are refused.
        normalize_anchor: If False, mu is the mean of the keys without normalization.
        metric: "cosine"; ablations "dot" (-k_i . mu) and "euclidean" (||k_i - mu||).
        anchor: "mean"; ablations "median" (per channel) and "pairwise" (Eq. 7: minus the mean cosine with every key).
        refresh: Evictions after which a cache recomputes the anchor.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: KeyDiff, Sec. 3, Eq. 7, 8; ablations: Sec. 4.4.
    """

def keydiff_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    merge: bool = False,
    normalize_anchor: bool = True,
    metric: Literal["cosine", "dot", "euclidean"] = "cosine",
    anchor: Literal["mean", "median", "pairwise"] = "mean",
    refresh: int = 1024,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`keydiff_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `keydiff_compress` except `out`.
    """

def kvzap_compress(
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0.125,
    gates: Gates | str | Path | None = None,
    threshold: float | None = None,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """KVzap: keeps the tokens to which learned gates give the highest scores, or all above a threshold.

    `kvops.KVzap` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    score[h, i] = gate of the layer(hidden state of token i)[h]          a prediction of log KVzip+ (`KVzip`)
    ```

    A token is scored once, by the hidden state that the layer's attention is called with when the token arrives. The
    scores know no question. K and V are not read: a linear gate takes hidden * Hk products per token.

    With a threshold, how much is kept follows from the text: a head keeps the tokens that score at least the threshold,
    within the budget, and those that are always kept. A budget of 1.0 sets no limit:

    ```python
    policy = kvops.KVzap(1.0, gates="model.safetensors", threshold=-4.0, recent=128, head_mode="adaptive")
    ```

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        hidden: Floating point [b, n, hidden], what the layer's attention was called with, for all slots.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. With a threshold, the upper limit.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once. With a threshold a cache
            evicts in decode after this many tokens; a fraction of a budget of 1.0 is one of all tokens seen, so give it
            in tokens.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        recent: Newest tokens that are always kept (int), or a fraction in [0, 1) of the budget (float); they count
            towards the budget. With head_mode="adaptive" each head protects this fraction of its own budget, in a cache
            of the mean budget; the budgets themselves are computed with this fraction of the mean budget protected in
            every head.
        gates: `Gates` of the model (`kvops.fit_gates`), or the path of their file, which is read at once: one that
            `Gates.save` wrote, or the model.safetensors of a published KVzap model. The first step or call needs them.
        threshold: The least score of a token that is kept, one for all layers. It needs head_mode="adaptive" and
            `recent` in tokens. KVzap's gates predict logarithms: -4 keeps what adds at least 1.8 % to a hidden state.
            None: only the budget counts.
        **call: starts, lengths, fill_invalid, out, layout, layer, num_layers; see `Spans` and `LayerSpans`. With gates
            of several layers `layer` must be given.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: KVzap, Jegou and Jeblick, 2026.
    """

def kvzap_compress_(
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0.125,
    gates: Gates | str | Path | None = None,
    threshold: float | None = None,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`kvzap_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `kvzap_compress` except `out`.
    """

def kvzip_compress(
    k: Tensor,
    v: Tensor,
    q_repeat: Tensor,
    budget: int | float | Tensor,
    *,
    k_repeat: Tensor,
    passes: Sequence[int] | None = None,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    scope: Literal["layer", "model"] = "layer",
    chunk: int = 2048,
    previous: int = 8,
    instruction: tuple[int, ...] | None = None,
    next_instruction: tuple[int, ...] | None = None,
    suffix: tuple[int, ...] | None = None,
    plus: bool = False,
    gradients: bool = False,
    w_o: Tensor | Sequence[Tensor] | None = None,
    **call: Unpack[RepeatCall],
) -> Compressed:
    """KVzip: keeps the whole prompt until the model has read it a second time, which shows what the prompt needs.

    `kvops.KVzip` with these settings in one call of `compress`, which ignores settings of caches.

    The second reading is in passes, one for each `chunk` of the prompt: an instruction to repeat it, the tokens before
    the chunk, the end of the user's turn, then the chunk's own tokens. The queries of a pass score the chunk's keys in
    the cache:

    ```text
    a[i, j] = softmax over j of scale * q_i . k_j      j: the sinks, the chunk, and the tokens of the pass up to i
    score   = max over the group's query heads and the rows i of the pass of a[i, j]      for j in the chunk
    ```

    KVzip+ (plus=True) scores what a token adds to the hidden state h_i that the layer's attention is called with:

    ```text
    score   = max over the group's query heads h and the rows i of the pass of a[i, j] * ||W_O^h v_j|| / ||h_i||
    ```

    KVgrad (gradients=True) weights the rows by how sensitive the model's last hidden states are to what the layer's
    output projection returns for them, r_i, instead:

    ```text
    score   = max over the group's query heads h and the rows i of the pass of a[i, j] * ||W_O^h v_j|| * g_i
    g_i     = ||d Phi / d r_i||        Phi: the sum over the pass of the squared norms of what the last layer returns
    ```

    The tokens of a pass are forgotten afterwards. The scores know no question, so one compressed prompt can serve many.
    A one-shot call (`compress`) gets the queries and keys of the passes. A cache runs them:

    ```python
    cache = kvops.Cache(kvops.KVzip(1024))
    cache.attend(q, k, v)                 # the prompt, in one step or in chunks; everything is kept
    with cache.repeating(0):              # a pass for the chunk that begins at token 0; then for the other chunks
        cache.attend(q, k, v)
    cache.evict()                         # keep the budget's best tokens
    ```

    Args:
        k: [b, Hk, n, d], the keys of the prompt alone.
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_repeat: [b, Hq, t, d], the queries of all passes, one pass after the other. A pass ends with the tokens of its
            chunk: the first pass with those of the first `chunk` tokens of each row, and so on. In a padded batch, a
            row with fewer tokens in the chunk than other rows has as many rows less at the end of the pass; the values
            there are ignored.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1.
        k_repeat: [b, Hk, t, d], the keys of the same tokens.
        passes: The rows of each pass, with the sum t; one pass for each chunk of the longest row. None: one pass.
        sinks: First tokens that are always kept. They also take part in the softmax of the passes for later chunks.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        scope: Which heads share a budget with head_mode="adaptive": those of a "layer", or of the whole "model", which
            keeps its highest scores in whichever layers and heads they are. The budget is then the mean over all heads,
            without the floor of `kvops.head_budgets`, and only `kvops.hf` evicts.
        chunk: How many tokens of the prompt a pass repeats.
        previous: How many of the tokens before its chunk a pass reads between instruction and chunk.
        instruction: The token ids of the instruction of the first pass. None: not given yet.
        next_instruction: The token ids of the instruction of each later pass, or None.
        suffix: The token ids between them and the chunk, or None: with a chat model, those that end the user's turn and
            begin the answer. `kvops.hf` needs all three, which `kvops.hf.repeat_prompts` makes from a tokenizer; with
            () for each a pass reads the chunk alone. `kvops.Cache` and one-shot calls do not use them, because their
            caller runs the passes.
        plus: The scores of KVzip+.
        gradients: The scores of KVgrad, whose chunks have 256 tokens. `kvops.hf` computes the gradients: one more
            forward and one backward for each pass, through torch's attention.
        w_o: With plus=True or gradients=True the weights of the output projection; see `CriticalKV`.
        **call: hidden_repeat, gradients_repeat, scale, softcap, sink_logits, starts, lengths, fill_invalid, out,
            layout, layer, num_layers; see `RepeatCall`, `Logits`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: KVzip, Kim et al., 2025; KVzip+ in KVzap, Jegou and Jeblick, 2026; KVgrad, 2026, and kvpress,
    kvgrad_press.py.
    """

def kvzip_compress_(
    k: Tensor,
    v: Tensor,
    q_repeat: Tensor,
    budget: int | float | Tensor,
    *,
    k_repeat: Tensor,
    passes: Sequence[int] | None = None,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    scope: Literal["layer", "model"] = "layer",
    chunk: int = 2048,
    previous: int = 8,
    instruction: tuple[int, ...] | None = None,
    next_instruction: tuple[int, ...] | None = None,
    suffix: tuple[int, ...] | None = None,
    plus: bool = False,
    gradients: bool = False,
    w_o: Tensor | Sequence[Tensor] | None = None,
    **call: Unpack[RepeatCall],
) -> Compressed:
    """`kvzip_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `kvzip_compress` except `out`.
    """

def l2_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    merge: bool = False,
    skip_layers: tuple[int, ...] = (0, 1),
    **call: Unpack[LayerSpans],
) -> Compressed:
    """L2 norm: keeps the keys with the lowest L2 norm, which get the most attention.

    `kvops.L2` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    score[i] = -||k_i||
    ```

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It is the budget of each layer that is not skipped.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        recent: Newest tokens that are always kept (int), or a fraction in [0, 1) of the budget (float); they count
            towards the budget. With head_mode="adaptive" each head protects this fraction of its own budget, in a cache
            of the mean budget; the budgets themselves are computed with this fraction of the mean budget protected in
            every head.
        merge: Average evicted values into the kept tokens with the most similar keys; not part of the paper. This needs
            n * m * d multiply-adds per head for m kept tokens, and 8 n dv bytes of memory per head until it is done.
            Pages, and engines that move tokens by themselves, are refused.
        skip_layers: Layers that keep everything, in models of more than 8 layers. Layers then differ in length.
            One-shot calls skip only if `layer` and `num_layers` are given.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", Devoto et al., 2024.
    """

def l2_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    merge: bool = False,
    skip_layers: tuple[int, ...] = (0, 1),
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`l2_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `l2_compress` except `out`.
    """

def lacache_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float,
    *,
    layer: int,
    num_layers: int,
    rope: Rope | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    layout: Literal["bhnd", "bnhd"] | None = None,
    positions: Literal["slots", "original"] = "slots",
    span: int | None = None,
    overlap: int | None = None,
    sinks: int | None = None,
    pattern: Literal["paper", "official", "short"] = "paper",
    compaction: Literal["ladder", "whole"] = "ladder",
    task: Literal["modeling", "understanding"] = "modeling",
) -> Compressed:
    """LaCache: keeps a ladder of tokens, in the paper's pattern early tokens in early layers, late ones in deep layers.

    `kvops.LaCache` with these settings in one call of `compress`, which ignores settings of caches.

    Which slots a layer keeps depends only on (layer, slot), never on scores (see `lacache_plan`). All layers keep the
    same number of slots, and all heads of a layer the same slots: at most budget + R // 2, where R is the number of
    slots that a ladder frees in each layer.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens (int), or a fraction (float). It must hold the sinks, the newest num_layers slots and one
            ladder's kept slots. In a cache a fraction is of the tokens seen, but never less than that minimum.
        layer: The index of the layer in the model.
        num_layers: The number of layers of the model.
        rope: The rotary embedding, if keys were rotated at their slots: they are rotated to their new slots. None moves
            the keys as they are, for keys that are not rotated or keep their original positions.
        out: (k_out, v_out) of the result's shapes to write to.
        layout: "bhnd" (default) or "bnhd"; see `Spans`.
        positions: "slots": tokens take the positions of their slots, 0, 1, ..., without gaps for evicted tokens; or
            "original": keys keep the positions at which they were rotated. For "slots" a cache needs the model's rotary
            embedding (`kvops.Cache(policy, rope=...)`). Without it the cache moves the keys as they are, and the caller
            rotates them (`kvops.ops.rope_at_slots`).
        span: See `lacache_plan`. None depends on the task: max(1, round(num_layers / 4)) for "modeling",
            round(num_layers * budget / n) for "understanding". A cache for "understanding" with a budget in tokens
            needs it.
        overlap: See `lacache_plan`. None is span // 2 for "modeling", 0 for "understanding".
        sinks: First tokens that are always kept. None is 4 for "modeling", min(128, budget // 4) for "understanding".
        pattern: See `lacache_plan`.
        compaction: See `lacache_plan`.
        task: "modeling" (language modeling), or "understanding" (a prompt, then a short answer).

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: LaCache, Sec. 3.2, 3.3, 4.1.
    """

def lacache_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float,
    *,
    layer: int,
    num_layers: int,
    rope: Rope | None = None,
    layout: Literal["bhnd", "bnhd"] | None = None,
    positions: Literal["slots", "original"] = "slots",
    span: int | None = None,
    overlap: int | None = None,
    sinks: int | None = None,
    pattern: Literal["paper", "official", "short"] = "paper",
    compaction: Literal["ladder", "whole"] = "ladder",
    task: Literal["modeling", "understanding"] = "modeling",
) -> Compressed:
    """`lacache_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `lacache_compress` except `out`.
    """

def lagkv_compress(
    k: Tensor,
    v: Tensor,
    L: int = 1024,
    r: float = 0.5,
    *,
    sinks: int = 16,
    v_weight: float = 1.0,
    reference: Literal["lag", "self"] = "lag",
    score: Literal["std", "l2"] = "std",
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """LagKV: keeps the tokens of each partition that stand out most against the range of the next partition.

    `kvops.LagKV` with these settings in one call of `compress`, which ignores settings of caches.

    The slots after the first `sinks` are cut into partitions of `L` tokens. Of each complete partition except the
    last, LagKV keeps the floor(r * L) tokens with the highest scores, per head:

    ```text
    N     = (X - min Y) / (max Y - min Y)      per channel; X is a partition, Y the next one
    score = softmax(std N of K) + v_weight * softmax(std N of V)
    ```

    Of n >= sinks + 2 L tokens it keeps sinks + floor(r * L) ((n - sinks) // L - 1) + L + (n - sinks) % L
    (Eq. 10), and of fewer tokens all.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        L: Tokens per partition.
        r: The fraction of them to keep, in [0, 1].
        sinks: First tokens that are always kept.
        v_weight: The weight of V's scores.
        reference: "lag", or "self" for LocalKV (Y is X itself).
        score: "std", or "l2": minus the L2 norm of the key. With "l2", V, v_weight and reference are ignored, and
            layers 0 and 1 keep everything, so layers differ in length.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive" (one-shot calls without padding only): the heads share the tokens that they keep of a
            partition by one threshold for their scores, which are comparable (Limitations). Heads then differ in length
            and end in -1.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: LagKV, Sec. 2.2, Eq. 5-10; LocalKV and L2 norm: App. A.2.
    """

def lagkv_compress_(
    k: Tensor,
    v: Tensor,
    L: int = 1024,
    r: float = 0.5,
    *,
    sinks: int = 16,
    v_weight: float = 1.0,
    reference: Literal["lag", "self"] = "lag",
    score: Literal["std", "l2"] = "std",
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`lagkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `lagkv_compress` except `out`.
    """

def laq_compress(
    k: Tensor,
    v: Tensor,
    q_lookahead: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    q_window: Tensor | None = None,
    lookahead_lengths: Tensor | None = None,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    steps: int = 8,
    template: tuple[int, ...] = (),
    stage1: Policy | str = "snapkv",
    stage1_budget: int | None = None,
    compat_mask: bool = False,
    **call: Unpack[QueryCall],
) -> Compressed:
    """LAQ: keeps the whole prompt until a draft of the answer shows which tokens to keep.

    `kvops.LAQ` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    s[j]  = sum over the window's rows i of softmax over the prompt's keys of scale * q_i . k_j
    score = max-pooling of the mean of s over the group's query heads
    ```

    A one-shot call (`compress`) is the second stage, given the queries of the draft. A cache runs both stages:

    ```python
    cache = kvops.Cache(kvops.LAQ(1024))
    cache.attend(q, k, v)             # the prompt, in one step or in chunks; everything is kept
    draft = cache.draft()             # stage 1: a small cache of the same prompt
    draft.attend(q, k, v)             # `steps` tokens of the draft, one by one
    cache.evict(draft)                # stage 2: keep the budget's best tokens for the draft's queries
    cache.attend(q, k, v)             # decode from the end of the prompt; every new token is kept
    ```

    Args:
        k: [b, Hk, n, d], the keys of the prompt alone.
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_lookahead: [b, Hq, steps, d], the queries of tokens that follow the prompt, drafted with any small cache. They
            see all keys of the prompt.
        budget: The budget of both stages; see `BudgetPolicy`.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        q_window: [b, Hq, window, d], the queries of the prompt's last tokens (LAQ++). They observe too, each up to its
            own key, and their tokens are kept. Without them (LAQ) none of the newest tokens is protected.
        lookahead_lengths: int32 [b], how many lookahead rows count, if the drafts of some rows ended early.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        kernel_size: The slots over which scores are pooled; odd. 1 does not pool.
        pooling: "max", or "avg" (over kernel_size slots, where slots outside count as 0).
        pool_first: Pool the scores of each query head, then reduce the group.
        score: "softmax"; "dot": the sum of the logits themselves; or "drop": how far the rows' outputs move if the
            token is dropped (`kvops.ops.drop_scores`), which needs the values too.
        steps: The intended number of tokens in the draft.
        template: Token ids of a fixed text that `kvops.hf` reads in place of a draft, such as those of "The answer is"
            (App. B); () drafts `steps` tokens.
        stage1: The policy of the draft, such as kvops.StreamingLLM(64) or "streamingllm:budget=64", or its name in
            kvops.METHODS, such as "full". A name alone stands for the settings that meet `stage1_budget`: SnapKV then
            has a window of min(32, stage1_budget // 2). Policies that need `w_o` or `statistics` of a model are not
            given by name; `kvops.hf.for_model` fills in those of a policy.
        stage1_budget: The tokens of the draft's cache if stage1 is a name; None is the budget of stage 2.
        compat_mask: Use the mask of the released code, in which row i of all window + steps rows sees keys up to n -
            (window + steps) + i.
        **call: See `QueryCall`; lse is fp32 [b, Hq, window + steps], the window's rows first, over exactly the keys
            that each row sees.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: LAQ, Sec. 4, Eq. 4; LAQ++: Eq. 5.
    """

def laq_compress_(
    k: Tensor,
    v: Tensor,
    q_lookahead: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    q_window: Tensor | None = None,
    lookahead_lengths: Tensor | None = None,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    steps: int = 8,
    template: tuple[int, ...] = (),
    stage1: Policy | str = "snapkv",
    stage1_budget: int | None = None,
    compat_mask: bool = False,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`laq_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `laq_compress` except `out`.
    """

def protokv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kappa: int = 5,
    num_sats: int = 32,
    num_chunks: int | None = None,
    projection: Tensor | None = None,
    phase: Tensor | None = None,
    seed: int = 0,
    hash_bits: int = 2,
    clusters: Literal["prototypes", "chunks", "lsh"] = "prototypes",
    score: Literal["softmax", "dot", "drop"] = "dot",
    cluster_reduce: Literal["mean", "sum"] = "mean",
    whole_clusters: bool = False,
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    alpha: int = 8,
    **call: Unpack[QueryCall],
) -> Compressed:
    """ProtoKV: keeps whole clusters of similar tokens, by the attention of the prompt's last queries.

    `kvops.ProtoKV` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    anchors    = the num_sats highest outlier degrees                         (`ops.outlier_degree`)
    prototypes = the mean key of each of num_chunks chunks without the anchors, and of each of 2^hash_bits buckets
                 of anchors                                     (`ops.lsh_bucket`, `ops.build_prototypes`)
    cluster    = the prototype of highest cosine                              (`ops.assign_prototypes`)
    s[j]       = mean over the group of sum over the window of scale * q_i . k_j
    score      = mean of s over the cluster's tokens                          (`ops.cluster_mean`)
    ```

    All of this covers the tokens before the last w, per head. The w newest tokens are kept. Before them whole clusters
    are kept by descending score; of the cluster that straddles the budget, the tokens with the highest s are kept.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It must hold the window.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget. Sinks are in no cluster.
        head_mode: "per_head", or "shared": all heads keep the same tokens, ranked by the mean over heads of their
            clusters' scores, then of their own. Clusters are then not kept whole.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        kappa: The neighbours on either side from which an anchor differs, 1 to 1024.
        num_sats: The number of anchors; 0 for none.
        num_chunks: The number of chunks. None is one per 10 of the m tokens before the window, at most 496: min(496,
            max(1, m // 10)), for each row of a padded batch.
        projection: fp32 [bits, d] on k's device, of the hash; bits is hash_bits, or with clusters="lsh" enough for all
            clusters. None draws projection and phase from `seed` (`lsh_projection`).
        phase: fp32 [bits] on k's device, of the hash; given together with `projection`.
        seed: The seed of the hash, at least 0.
        hash_bits: The bits of the hash, 1 to 16.
        clusters: "prototypes", or an ablation with the same number of clusters. "chunks": all prototypes are chunks,
            without anchors. "lsh": no prototypes; a cluster is a bucket, with enough bits, modulo the number of
            clusters.
        score: "dot", or "softmax" or "drop" as in `SnapKV`.
        cluster_reduce: "mean" (Algorithm 1) or "sum" (Eq. 11).
        whole_clusters: Never cut a cluster (Eq. 2; one-shot calls only). Fewer tokens than the budget may be kept.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        alpha: The observation window of decode.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: ProtoKV, Sec. 4, Algorithm 1; decode: App. O.
    """

def protokv_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kappa: int = 5,
    num_sats: int = 32,
    num_chunks: int | None = None,
    projection: Tensor | None = None,
    phase: Tensor | None = None,
    seed: int = 0,
    hash_bits: int = 2,
    clusters: Literal["prototypes", "chunks", "lsh"] = "prototypes",
    score: Literal["softmax", "dot", "drop"] = "dot",
    cluster_reduce: Literal["mean", "sum"] = "mean",
    whole_clusters: bool = False,
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    alpha: int = 8,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`protokv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `protokv_compress` except `out`.
    """

def pyramidkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    **call: Unpack[QueryCall],
) -> Compressed:
    """PyramidKV: `SnapKV` with a budget of its own for each layer, larger in early layers (`pyramidkv_budgets`).

    `kvops.PyramidKV` with these settings in one call of `compress`, which ignores settings of caches.

    Layers differ in length, so one-shot calls need `layer` and `num_layers`. Each row of a padded batch has the budget
    of its own length. Rows that keep fewer slots than others end in -1 in a one-shot call, and begin with `pads` empty
    slots in a cache.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: The mean over the layers, an int or a float; see `BudgetPolicy`. It must hold the window.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head" or "shared"; see `BudgetPolicy`.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        kernel_size: The slots over which scores are pooled; odd. 1 does not pool.
        pooling: "max", or "avg" (over kernel_size slots, where slots outside count as 0).
        pool_first: Pool the scores of each query head, then reduce the group.
        score: "softmax"; "dot": the sum of the logits themselves; or "drop": how far the rows' outputs move if the
            token is dropped (`kvops.ops.drop_scores`), which needs the values too.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: PyramidKV, Cai et al., 2024.
    """

def pyramidkv_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    **call: Unpack[QueryCall],
) -> Compressed:
    """`pyramidkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `pyramidkv_compress` except `out`.
    """

def random_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    seed: int = 0,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """Random: keeps random tokens, different ones in every head and layer.

    `kvops.Random` with these settings in one call of `compress`, which ignores settings of caches.

    The score of a token is a hash of (seed, layer, head, position). It is the same on every device, in every row of a
    batch, and whether tokens come in one call, in chunks or one by one. Positions count from a row's first valid token.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        recent: Newest tokens that are always kept (int), or a fraction in [0, 1) of the budget (float); they count
            towards the budget. With head_mode="adaptive" each head protects this fraction of its own budget, in a cache
            of the mean budget; the budgets themselves are computed with this fraction of the mean budget protected in
            every head.
        seed: The seed of the hash, at least 0.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
    """

def random_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 0,
    seed: int = 0,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`random_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `random_compress` except `out`.
    """

def rkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    kernel_size: int = 7,
    mix: float = 0.1,
    threshold: float = 0.5,
    **call: Unpack[QueryCall],
) -> Compressed:
    """R-KV: keeps the tokens that the last queries attend to and that are unlike the others, per head.

    `kvops.RKV` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    a[i, j]    = softmax over j of scale * q_i . k_j         the last w queries, each over the keys up to its own
    importance = max over neighbours of max over the group's query heads of mean over i of a[i, j]       for j < n - w
    redundancy = softmax over j of the mean cosine of k_j with all other keys, where each key spares its last
                 similar one                                                                 (`ops.key_similarity`)
    score      = mix * importance - (1 - mix) * redundancy
    ```

    The w newest tokens are kept, and the highest scores before them up to the budget. In decode a cache evicts down to
    the budget whenever it holds `buffer` tokens more, by the queries of the last w tokens, which it remembers. A
    prompt, and each chunk or further turn of at least w tokens, is compressed in the same way.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It must hold the window.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum"; the
            released code takes the maximum.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        kernel_size: The slots over which the importance is pooled by its maximum; odd. 1 does not pool.
        mix: The weight of the importance, lambda in the paper, in [0, 1].
        threshold: The cosine that similar keys exceed; see `ops.key_similarity`.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: R-KV, Cai et al., 2025.
    """

def rkv_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "max",
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    kernel_size: int = 7,
    mix: float = 0.1,
    threshold: float = 0.5,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`rkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `rkv_compress` except `out`.
    """

def satkv_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    window: int = 32,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    kappa: int = 5,
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """SATKV: keeps the last `window` tokens, and before them the tokens with the highest outlier degrees.

    `kvops.SATKV` with these settings in one call of `compress`, which ignores settings of caches.

    The degrees (`ops.outlier_degree`) are computed over the tokens before the window alone. SATKV does not use queries.

    A step of at least `window` tokens brings a cache down to the budget. In decode the cache evicts once it holds
    `buffer` tokens more than the budget.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It must hold the window.
        window: Newest tokens that are always kept.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        kappa: The neighbours on either side from which an anchor differs, 1 to 1024.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: ProtoKV, Sec. 4.1, App. H.
    """

def satkv_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    window: int = 32,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    kappa: int = 5,
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`satkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `satkv_compress` except `out`.
    """

def snapkv_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    **call: Unpack[QueryCall],
) -> Compressed:
    """SnapKV: keeps the tokens to which the prompt's last queries attend, per head.

    `kvops.SnapKV` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    a[i, j] = softmax over j of scale * q_i . k_j      the last w queries, each over the keys up to its own
    s[j]    = mean over the group's query heads of sum over i of a[i, j]        for j < n - w
    score   = the highest s among the kernel_size slots centred on j
    ```

    DropKV (score="drop", pooling="avg", or the method "dropkv") scores tokens by how far the outputs move without them:

    ```text
    o[i]    = sum over j of a[i, j] * v[j]
    s[j]    = mean over the group's query heads of sum over i of (a / (1 - a))^2 * ||v[j] - o[i]||^2    a = a[i, j]
    score   = mean of s over the kernel_size slots centred on j
    ```

    The w newest tokens are kept, and the highest scores before them up to the budget. A cache compresses the prompt by
    its last `window` queries. Each chunk of a chunked prefill and each further turn is compressed in the same way,
    together with the tokens kept before. Decode keeps every new token.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It must hold the window.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        kernel_size: The slots over which scores are pooled; odd. 1 does not pool.
        pooling: "max", or "avg" (over kernel_size slots, where slots outside count as 0).
        pool_first: Pool the scores of each query head, then reduce the group.
        score: "softmax"; "dot": the sum of the logits themselves; or "drop": how far the rows' outputs move if the
            token is dropped (`kvops.ops.drop_scores`), which needs the values too.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: SnapKV, Li et al., 2024; DropKV, 2026.
    """

def snapkv_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    kernel_size: int = 7,
    pooling: Literal["max", "avg"] = "max",
    pool_first: bool = False,
    score: Literal["softmax", "dot", "drop"] = "softmax",
    **call: Unpack[QueryCall],
) -> Compressed:
    """`snapkv_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `snapkv_compress` except `out`.
    """

def streamingllm_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    positions: Literal["slots", "original"] = "slots",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """StreamingLLM: keeps the first `sinks` tokens and the newest tokens, `budget` in all.

    `kvops.StreamingLLM` with these settings in one call of `compress`, which ignores settings of caches.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1; the
            same for all heads. In a cache a fraction is never less than sinks + 1 tokens.
        sinks: First tokens that are always kept.
        head_mode: Without effect, since all heads keep the same tokens; "adaptive" is refused.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        positions: "slots": tokens take the positions of their slots, 0, 1, ..., without gaps for evicted tokens; or
            "original": keys keep the positions at which they were rotated. For "slots" a cache needs the model's rotary
            embedding (`kvops.Cache(policy, rope=...)`). Without it the cache moves the keys as they are, and the caller
            rotates them (`kvops.ops.rope_at_slots`). One-shot calls move the keys as they are.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2023.
    """

def streamingllm_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    positions: Literal["slots", "original"] = "slots",
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`streamingllm_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `streamingllm_compress` except `out`.
    """

def tova_compress(
    k: Tensor,
    v: Tensor,
    q_last: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "shared",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    **call: Unpack[QueryCall],
) -> Compressed:
    """TOVA: keeps the tokens to which the last query attends most, and its own token; one set for all heads.

    `kvops.TOVA` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    score[j] = mean over all query heads of softmax(q_last k)_j
    ```

    A one-shot call takes the query of each row's last (valid) token. A cache uses the last query of the step that
    evicts.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_last: [b, Hq, 1, d], the query of each row's last (valid) token. Query head h belongs to KV head h // (Hq /
            Hk).
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. A budget per head needs head_mode="per_head".
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention. The paper's is "shared".
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once. The paper's buffer is 1.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        **call: See `QueryCall`; lse is fp32 [b, Hq, 1].

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: TOVA, Oren et al., 2024.
    """

def tova_compress_(
    k: Tensor,
    v: Tensor,
    q_last: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "shared",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    buffer: int | float | None = 0.0625,
    protect: Literal["prompt"] | None = None,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`tova_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `tova_compress` except `out`.
    """

def triattention_compress(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 128,
    statistics: QueryStatistics | str | None = None,
    max_offset: int = 65536,
    normalize: bool = True,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """TriAttention: keeps the keys with the highest trigonometric scores, and the newest.

    `kvops.TriAttention` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    S[h, i]  = mean over D of sum over f of |E q_f| |k_if| cos(omega_f (t + D - p_i) + phi_f)
             + sum over f of (E|q_f| - |E q_f|) |k_if|
    score[i] = max over the group of (S[h, i] - mean_i S[h, i]) / std_i S[h, i]
    ```

    The mean and the std are those of the tokens after the sinks; with protect="prompt", of those after the prompt.
    f: a frequency of RoPE, q_f and k_f: the channels that it rotates, before RoPE, phi_f: the angle between E q_f and
    k_f, t: the next position, p_i: the key's, D: 1, 2, 4, .. up to `max_offset`.

    The statistics of the queries are of the model, gathered before (`QueryStatistics`), so no query is needed.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1.
        sinks: First tokens that are always kept; they count towards the budget. They are always kept, so their scores
            do not count in the mean and the std.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once. The authors evict every
            128 tokens.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        recent: Newest tokens that are always kept (int), or a fraction in [0, 1) of the budget (float); they count
            towards the budget. With head_mode="adaptive" each head protects this fraction of its own budget, in a cache
            of the mean budget; the budgets themselves are computed with this fraction of the mean budget protected in
            every head. The authors' engine plugin keeps the newest 128 tokens of a budget of 2048.
        statistics: A `QueryStatistics` of the model, or the path of its file. It is required: calls without it raise
            ValueError. If it covers several layers, single calls need `layer` and `num_layers`.
        max_offset: The largest future offset D, at most 2^40.
        normalize: If False, the scores of a group's query heads are compared as they are.
        **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
            `LayerSpans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: TriAttention, Mao et al., 2026; code: `methods/pruning_utils.py`, `methods/triattention.py`.
    """

def triattention_compress_(
    k: Tensor,
    v: Tensor,
    budget: int | float | Tensor,
    *,
    sinks: int = 0,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    buffer: int | float | None = 128,
    protect: Literal["prompt"] | None = None,
    recent: int | float = 128,
    statistics: QueryStatistics | str | None = None,
    max_offset: int = 65536,
    normalize: bool = True,
    **call: Unpack[LayerSpans],
) -> Compressed:
    """`triattention_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `triattention_compress` except `out`.
    """

def vase_compress(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    buffer: int | float | None = 64,
    protect: Literal["prompt"] | None = None,
    kernel_size: int = 5,
    pooling: Literal["max", "avg"] = "avg",
    largest_values: int | float = 0.25,
    seed: int = 0,
    **call: Unpack[QueryCall],
) -> Compressed:
    """VaSE (its variant AttnV): keeps the largest values, and draws the other tokens by their attention, per head.

    `kvops.VaSE` with these settings in one call of `compress`, which ignores settings of caches.

    ```text
    a[i, j]  = softmax over j of scale * q_i . k_j         the last w queries, each over the keys up to its own
    p[j]     = mean over the kernel_size slots around j of the mean over the group's query heads and i of a[i, j]
    range[j] = max over the channels of v_j - min over the channels of v_j                   (`ops.value_range`)
    ```

    The w newest tokens, the sinks and the tokens of the largest ranges are kept. The rest of the budget is drawn
    without replacement, with probabilities proportional to p, anew at each eviction: the highest log p[j] + g[j], with
    independent numbers g of the Gumbel distribution, are such a draw. The numbers are hashes of (seed, layer, head,
    the token's position, the newest token's position), so a draw does not depend on the rest of the batch. With
    head_mode="shared" the heads' p and ranges are averaged, and one draw is that of all heads.

    Args:
        k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
        v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
        q_window: [b, Hq, w, d], the observing queries: those of the last w (valid) tokens of each row. Query head h
            belongs to KV head h // (Hq / Hk). Rows with fewer than w tokens ignore the first queries.
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end in
            -1. It must hold the sinks, the window and the largest values.
        window: How many of the last queries observe; their tokens are kept. None: the rows of q_window.
        sinks: First tokens that are always kept; they count towards the budget.
        head_mode: "per_head": each head keeps its own tokens. "shared": all heads keep the same tokens, chosen by their
            mean score. "adaptive": the heads share the budget of the layer by their scores (`kvops.head_budgets`).
            Heads of a cache then differ in length, which needs the library's attention.
        shares: With head_mode="adaptive" fixed shares in place of those by scores: floating point [layers that evict,
            Hk], finite and at least 0, or the path of a file that `kvops.save_shares` wrote (`kvops.hf.head_shares`
            measures them). Each head keeps the tokens that are always kept, and its share, over the mean of all shares,
            of the rest of the budget, rounded. It keeps at least 1 token and at most all; what it cannot use goes to
            the other heads of the model, in proportion to their shares; a head without a share gets none of it. A
            fractional budget counts padding too. Single calls need `layer` and `num_layers`.
        group_reduce: How the scores of the query heads of a KV head are reduced to one: "mean", "max" or "sum".
        buffer: In decode the cache evicts down to the budget once it holds this many tokens more: an int, or a fraction
            in (0, 1) of the budget (float), rounded down and at least 1. With 1 it evicts after every token. None keeps
            every new token. A step of several tokens is part of a prompt and evicts at once.
        protect: "prompt": a cache keeps the whole prompt, and the budget, with `sinks` and the newest tokens, is for
            the tokens after it. The prompt is what the steps before the first step of a single token append; later
            turns count as generated. The budget must be in tokens. One-shot calls refuse it. None protects nothing.
        kernel_size: The slots over which the attention is pooled; odd. 1 does not pool.
        pooling: "avg" or "max"; see `WindowPolicy`.
        largest_values: Tokens of the largest ranges that are kept, besides sinks and window: an int, or a fraction in
            [0, 1) of the budget (float).
        seed: The seed of the hash, at least 0.
        **call: lse, scale, softcap, sink_logits, starts, lengths, fill_invalid, out, block_table, layout, layer,
            num_layers; see `QueryCall`, `LayerSpans` and `Spans`.

    Returns:
        (k, v, indices) of the kept slots; see `Compressed`.

    Raises:
        TypeError: An argument has the wrong type. Nothing has been written.
        ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.

    Source: VaSE, Chang et al., 2026.
    """

def vase_compress_(
    k: Tensor,
    v: Tensor,
    q_window: Tensor,
    budget: int | float | Tensor,
    window: int | None = None,
    *,
    sinks: int = 4,
    head_mode: Literal["per_head", "shared", "adaptive"] = "per_head",
    shares: Tensor | str | Path | None = None,
    group_reduce: Literal["mean", "max", "sum"] = "mean",
    buffer: int | float | None = 64,
    protect: Literal["prompt"] | None = None,
    kernel_size: int = 5,
    pooling: Literal["max", "avg"] = "avg",
    largest_values: int | float = 0.25,
    seed: int = 0,
    **call: Unpack[QueryCall],
) -> Compressed:
    """`vase_compress` in place: moves the kept slots to the front of k and v, and returns views of them.

    Takes the arguments of `vase_compress` except `out`.
    """
