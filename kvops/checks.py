"""Checks of arguments. All of them name the function, the argument, what was expected and what came.

`op` is the name of the function or class that was called. This module imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Numbers and names.


def check_at_least(op: str, name: str, value: int, low: int) -> None:
    """An integer (a traced one too) of at least `low`."""
    if value < low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")


def check_int(op: str, name: str, value: int, low: int) -> None:
    """`value` is an int (a bool is not) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__} {value!r}")
    check_at_least(op, name, value, low)


def check_bool(op: str, name: str, value: bool) -> None:
    """`value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__} {value!r}")


def check_finite(op: str, name: str, value: float) -> None:
    """`value` is a number (a bool is not) that fp32 holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a float, got {type(value).__name__} {value!r}")
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{op}: {name} must be finite in fp32, got {value}")


def check_choice(op: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_head_mode(op: str, head_mode: str) -> None:
    """The two head modes that every scoring method has."""
    check_choice(op, "head_mode", head_mode, ("per_head", "shared"))


def check_code(op: str, name: str, value: str, codes: dict[str, int], last: str) -> int:
    """The integer of a name, one of `codes` up to `last`."""
    code = codes.get(value) if isinstance(value, str) else None
    if code is None or code > codes[last]:
        *names, final = list(codes)[: codes[last] + 1]
        raise ValueError(f"{op}: {name} must be {', '.join(map(repr, names))} or {final!r}, got {value!r}")
    return code


# Tensors.


def tracked(x: Tensor) -> str | None:
    """In which way autograd tracks x, if it does, and what to do."""
    if torch.is_grad_enabled() and x.requires_grad:
        return "requires grad, but kvops is inference-only; call it under torch.no_grad()"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return "has a tangent, but kvops is inference-only and has no derivatives"
    return None


def inference_only(op: str, **tensors: Tensor) -> None:
    """Every argument is a tensor that autograd does not track."""
    tracking = torch.is_grad_enabled() or forward_ad._current_level >= 0
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if tracking and (how := tracked(x)):
            raise ValueError(f"{op}: {name} {how}")


def check_rank(op: str, k: Tensor) -> None:
    """k is a tensor of four dims; its other properties are the operators' to check."""
    if not isinstance(k, Tensor):
        raise TypeError(f"{op}: k must be a torch.Tensor, got {type(k).__name__}")
    if k.dim() != 4:
        raise ValueError(f"{op}: k must be [b, Hk, n, d], got shape {list(k.shape)}")


def check_dims(op: str, layout: str, **tensors: Tensor) -> None:
    """Each tensor has as many dims as the layout, which is "[batch, heads, ...]"."""
    for name, x in tensors.items():
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{op}: {name} must be {layout}, got {list(x.shape)}")


def check_one_device(op: str, first: Tensor, **others: Tensor | None) -> None:
    """All tensors are on the first one's device."""
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise ValueError(f"{op}: {name} must be on the first tensor's device {first.device}, got {x.device}")


def check_vector(
    op: str, name: str, x: Tensor | None, size: int, like: Tensor, dtype: torch.dtype = torch.int32
) -> None:
    """`x` is None, or a tensor [size] of this dtype on like's device."""
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype != dtype or x.shape != (size,) or x.device != like.device or x.layout != torch.strided:
        raise ValueError(
            f"{op}: {name} must be {dtype} [{size}] on {like.device}, got {x.dtype} {list(x.shape)} on {x.device}"
            + ("" if x.layout == torch.strided else f" ({x.layout})")
        )


def check_starts(op: str, starts: list[int], n: int) -> None:
    """Each row's first valid slot is one of n, or n where it has none."""
    for row, start in enumerate(starts):
        if not 0 <= start <= n:
            raise ValueError(f"{op}: starts must lie in [0, {n}], got {start} for row {row}")


# What the operators take besides tensors.


def check_pair(op: str, out: tuple[Any, Any]) -> tuple[Any, Any]:
    """`out` is a pair; returns it."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"{op}: out must be a pair (k_out, v_out), got {type(out).__name__}")
    return out


def check_layers(op: str, **groups: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], ...]:
    """Each group has a layer or more; returns them as lists. A tensor is one layer."""
    for name, x in groups.items():
        if not isinstance(x, (Tensor, Iterable)):
            raise TypeError(f"{op}: {name} must be a torch.Tensor or a list of them, got {type(x).__name__}")
    lists = tuple([x] if isinstance(x, Tensor) else list(x) for x in groups.values())
    for name, tensors in zip(groups, lists):
        if not tensors:
            raise ValueError(f"{op}: {name} must hold at least one layer, got none")
    return lists


def check_scores(op: str, scores: Tensor, seq_len: int | None) -> None:
    """Scores of tokens, or with seq_len those of segments."""
    if scores.dim() not in (3, 4):
        raise ValueError(
            f"{op}: scores must be [batch, heads, tokens] or [batch, heads, segments, lag], got {list(scores.shape)}"
        )
    if (scores.dim() == 4) != (seq_len is not None):
        raise ValueError(f"{op}: seq_len must be given with scores of 4 dims and only then, got {list(scores.shape)}")


def check_plan(op: str, plan: Sequence[int]) -> None:
    """An encoded plan describes a ladder."""
    if len(plan) < 5 or len(plan) % 2 == 0 or not 0 <= plan[3] < plan[2] <= plan[1] or plan[4] not in (0, 1):
        raise ValueError(
            f"{op}: plan must be a kvops.LadderPlan, or its `encoded`: (n, num_layers, span, overlap, pattern) with "
            f"0 <= overlap < span <= num_layers and 2 integers for each pass, got {list(plan)}"
        )


# Budgets.


def check_budget(op: str, budget: object) -> None:
    """Tokens (an int of at least 1), or a fraction in (0, 1]."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            f"{op}: budget must be an int (tokens) or a float (fraction), got {type(budget).__name__} {budget!r}"
        )
    if isinstance(budget, int):
        if budget < 1:
            raise ValueError(f"{op}: budget must be at least 1 token, got {budget}")
    elif not 0.0 < budget <= 1.0:
        raise ValueError(f"{op}: budget as a fraction must be in (0, 1], got {budget}")


def check_head_budgets(op: str, budget: Tensor, shape: Sequence[int] | None = None) -> None:
    """Tokens of each head, int32 [b, Hk]; shape: the rows and heads that have scores of their own."""
    if budget.dtype != torch.int32 or budget.dim() != 2:
        raise ValueError(f"{op}: budget as a tensor must be int32 [b, Hk], got {budget.dtype} {list(budget.shape)}")
    if shape is not None and tuple(budget.shape) != tuple(shape):
        raise ValueError(
            f"{op}: budget must be of one head each, expected {list(shape)}, got {list(budget.shape)} (heads that "
            "share one kept set have one budget)"
        )


def check_recent(op: str, recent: int | float) -> None:
    """Tokens (an int of at least 0), or a share in [0, 1) of the budget."""
    if isinstance(recent, bool) or not isinstance(recent, (int, float)):
        raise TypeError(
            f"{op}: recent must be an int (tokens) or a float (share), got {type(recent).__name__} {recent!r}"
        )
    if isinstance(recent, int):
        if recent < 0:
            raise ValueError(f"{op}: recent must be at least 0 tokens, got {recent}")
    elif not 0.0 <= recent < 1.0:
        raise ValueError(f"{op}: recent as a share of the budget must be in [0, 1), got {recent}")


def check_buffer(op: str, buffer: int | float | None) -> None:
    """Tokens (an int of at least 1), a share in (0, 1) of the budget, or None for any number."""
    if buffer is None:
        return
    if isinstance(buffer, bool) or not isinstance(buffer, (int, float)):
        raise TypeError(
            f"{op}: buffer must be an int (tokens), a float (share) or None, got {type(buffer).__name__} {buffer!r}"
        )
    if isinstance(buffer, int):
        check_at_least(op, "buffer", buffer, 1)
    elif not 0.0 < buffer < 1.0:
        raise ValueError(f"{op}: buffer as a share of the budget must be in (0, 1), got {buffer}")


def check_holds(op: str, keep: int, sinks: int, recent: int) -> None:
    """A budget of `keep` tokens holds what is protected."""
    if sinks + recent > keep:
        raise ValueError(
            f"{op}: budget must hold sinks + recent, expected at least {sinks} + {recent} tokens, got {keep}"
        )


def check_rows_hold(op: str, budgets: Tensor, sinks: int, newest: Tensor) -> None:
    """Each row's and head's budget holds what is protected; what lies on a GPU is not read back. int32 [b, any]."""
    if not budgets.is_cpu or torch.compiler.is_compiling():
        return
    for row, pairs in enumerate(zip(budgets.tolist(), newest.tolist())):
        for head, (keep, recent) in enumerate(zip(*pairs)):
            where = f"row {row}" if budgets.shape[1] == 1 else f"row {row}, head {head}"
            check_holds(f"{op}, {where}", keep, sinks, recent)


def check_holds_window(op: str, keep: int, window: int) -> None:
    """A budget of `keep` tokens holds the observation window."""
    if keep < window:
        raise ValueError(f"{op}: budget must hold the window, expected at least {window} tokens, got {keep}")


def check_holds_ladder(op: str, budget: int, sinks: int, *, least: int, kept: int) -> None:
    """The budget holds `least` slots: the sinks, the newest num_layers, and the `kept` of a ladder."""
    if sinks < 0 or budget < least:
        raise ValueError(
            f"{op}: budget must hold sinks + num_layers + the {kept} kept slots of a ladder, expected at least "
            f"{least} with {sinks} sinks, got {budget}"
        )


# Queries.


def check_queries(op: str, name: str, q: Tensor, k: Tensor, rows: int | None = None) -> None:
    """q is [b, Hq, w, d] beside k, with at least one row (or exactly `rows`)."""
    check_rank(op, k)
    inference_only(op, **{name: q})
    if q.dim() != 4:
        raise ValueError(f"{op}: {name} must be [b, Hq, w, d], got shape {list(q.shape)}")
    if q.shape[2] < 1 or (rows is not None and q.shape[2] != rows):
        raise ValueError(f"{op}: {name} must have {rows or 'at least one'} row(s), got {q.shape[2]}")


def check_in_prompt(op: str, name: str, q: Tensor, n: int) -> None:
    """The rows of q are those of tokens of a prompt of n."""
    if q.shape[2] > n:
        raise ValueError(f"{op}: {name} must be rows of the prompt, expected at most its {n} tokens, got {q.shape[2]}")


def check_lse(op: str, lse: Tensor | None, rows: Tensor) -> None:
    """lse has one entry per row of the queries."""
    if lse is None:
        return
    inference_only(op, lse=lse)
    if lse.shape != rows.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(
            f"{op}: lse must be float32 {list(rows.shape[:3])}, one per row of the queries, got {lse.dtype} "
            f"{list(lse.shape)}"
        )


def check_attention(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    starts: Tensor | None,
    sink_logits: Tensor | None,
    softcap: float,
) -> None:
    """The arguments of `kvops.attention`."""
    inference_only(op, q=q, k=k, v=v)
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{op}: q must be float32, float16 or bfloat16, got {q.dtype}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} must be [b, heads, tokens, head_dim], got shape {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{op}: {name} must have q's dtype and device, {q.dtype} {q.device}, got {x.dtype} {x.device}"
            )
    b, query_heads, t, d = q.shape
    heads, n = k.shape[1:3]
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(f"{op}: k must be [{b}, Hk, n, {d}] as q is, got {list(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{op}: v must be [{b}, {heads}, {n}, dv] as k is, got {list(v.shape)}")
    if query_heads % heads if heads else query_heads:
        raise ValueError(f"{op}: the heads of q must be a multiple of k's {heads}, got {query_heads}")
    if causal and t > n:
        raise ValueError(f"{op}: causal queries are the last of the keys, expected at most {n}, got {t}")
    if scale is not None and not _is_normal(scale):
        raise ValueError(f"{op}: scale must be positive and a normal number in fp32, got {scale}")
    if softcap != 0 and not _is_normal(softcap):
        raise ValueError(f"{op}: softcap must be 0 (none) or positive and a normal number in fp32, got {softcap}")
    if softcap != 0 and not _is_normal((d**-0.5 if scale is None else scale) / softcap):
        raise ValueError(f"{op}: scale / softcap must be a normal number in fp32, got {scale} / {softcap}")
    check_vector(op, "starts", starts, b, q)
    check_vector(op, "sink_logits", sink_logits, query_heads, q, torch.float32)
    if sink_logits is not None:
        inference_only(op, sink_logits=sink_logits)
    if starts is not None and starts.is_cpu and not torch.compiler.is_compiling():
        check_starts(op, starts.tolist(), n)


def _is_normal(x: float) -> bool:
    """Whether x, which is computed with in fp32, is positive and neither 0 nor infinite nor subnormal there."""
    fp32 = torch.finfo(torch.float32)
    return fp32.tiny <= x <= fp32.max
