"""Checks of arguments. Every error names the function, the argument, what was expected and what was given.

`op` is the name of the function or class that the user called. This module imports nothing from the package.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Numbers and names.

PLAIN = (int, float, str, type(None), tuple, list, Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def plain(x: Any) -> Any:
    """x as an int or a float if it is a number of another type, such as numpy's; anything else as it is."""
    if isinstance(x, PLAIN):
        return x
    try:
        return operator.index(x)
    except TypeError:
        return float(x) if isinstance(x, numbers.Real) else x


def shown(value: object) -> str:
    """Returns a number of usual length or a name as it is written, and anything else as its type."""
    if isinstance(value, int) and abs(value) >> 128:
        return f"an int of {value.bit_length()} bits"
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def typed(value: object) -> str:
    """Returns the value's type, and the value if it is a number or a name."""
    name, text = type(value).__name__, shown(value)
    return name if text == name else f"{name} {text}"


MAX_INT = 2**63 - 1  # of an int64


def check_fits(op: str, name: str, value: int) -> None:
    """Checks that an integer fits int64."""
    if not -MAX_INT - 1 <= value <= MAX_INT:
        raise ValueError(f"{op}: {name} must fit int64, got {shown(value)}")


def check_at_least(op: str, name: str, value: int, low: int) -> None:
    """Checks that an integer, traced or not, is at least `low`."""
    if value < low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")


def check_int(op: str, name: str, value: int, low: int, high: int = MAX_INT) -> None:
    """Checks that `value` is an int (not a bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(plain(value), int):
        raise TypeError(f"{op}: {name} must be an int, got {typed(value)}")
    if not low <= value <= high:
        check_fits(op, name, value)
        check_at_least(op, name, value, low)
        raise ValueError(f"{op}: {name} must be at most {high}, got {value}")


#: No model has more layers. Plans and budgets of all layers then take bounded time and memory.
MAX_LAYERS = 1 << 12


def check_num_layers(op: str, num_layers: int) -> None:
    """Checks the number of layers of a model."""
    check_int(op, "num_layers", num_layers, 1, MAX_LAYERS)


def check_token_ids(op: str, name: str, value: tuple[int, ...]) -> None:
    """Checks that `value` is a tuple of token ids."""
    if not isinstance(value, tuple):
        raise TypeError(f"{op}: {name} must be a tuple of token ids, got {type(value).__name__}")
    for token in value:
        check_int(op, name, token, 0)


def check_bool(op: str, name: str, value: bool) -> None:
    """Checks that `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {typed(value)}")


def check_finite(op: str, name: str, value: float, low: float = -math.inf, high: float = math.inf) -> None:
    """Checks that `value` is a number (not a bool) that is finite in fp32 and lies in [low, high]."""
    if isinstance(value, bool) or not isinstance(plain(value), (int, float)):
        raise TypeError(f"{op}: {name} must be a float, got {typed(value)}")
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{op}: {name} must be finite in fp32, got {shown(value)}")
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{op}: {name} must be {limits}, got {value}")


def check_choice(op: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Checks that `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")


def check_code(op: str, name: str, value: str, codes: dict[str, int], last: str) -> int:
    """Returns the integer of a name; the name must be one of `codes` up to `last`."""
    code = codes.get(value) if isinstance(value, str) else None
    if code is None or code > codes[last]:
        *names, final = list(codes)[: codes[last] + 1]
        raise ValueError(f"{op}: {name} must be {', '.join(map(repr, names))} or {final!r}, got {shown(value)}")
    return code


# Tensors.


def tracked(x: Tensor) -> str | None:
    """Says how autograd tracks x and what to do about it; None if it does not track x."""
    if torch.is_grad_enabled() and x.requires_grad:
        return "requires grad, but kvops is inference-only; call it under torch.no_grad()"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        return "has a tangent, but kvops is inference-only and has no derivatives"
    return None


def inference_only(op: str, **tensors: Tensor) -> None:
    """Checks that every argument is a tensor that autograd does not track."""
    tracking = torch.is_grad_enabled() or forward_ad._current_level >= 0
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if tracking and (how := tracked(x)):
            raise ValueError(f"{op}: {name} {how}")


def check_hidden(op: str, name: str, hidden: Tensor, b: int, t: int) -> None:
    """Checks for the hidden states of t tokens: floating point [b, t, hidden], without a gradient."""
    inference_only(op, **{name: hidden})
    if hidden.dim() != 3 or hidden.shape[:2] != (b, t) or not hidden.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be floating point [{b}, {t}, hidden], got {hidden.dtype} {list(hidden.shape)}"
        )


def check_rank(op: str, k: Tensor) -> None:
    """Checks that k is a tensor of four dims; the operators check the rest."""
    if not isinstance(k, Tensor):
        raise TypeError(f"{op}: k must be a torch.Tensor, got {type(k).__name__}")
    if k.dim() != 4:
        raise ValueError(f"{op}: k must be [b, Hk, n, d], got shape {list(k.shape)}")


def check_dims(op: str, layout: str, **tensors: Tensor) -> None:
    """Checks that each tensor has as many dims as the layout, such as "[batch, heads, tokens]"."""
    for name, x in tensors.items():
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{op}: {name} must be {layout}, got {list(x.shape)}")


def check_one_device(op: str, first: Tensor, **others: Tensor | None) -> None:
    """Checks that all tensors are on the first one's device."""
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise ValueError(f"{op}: {name} must be on the first tensor's device {first.device}, got {x.device}")


def check_vector(
    op: str, name: str, x: Tensor | None, size: int, like: Tensor, dtype: torch.dtype = torch.int32
) -> None:
    """Checks that `x` is None or a tensor [size] of this dtype on like's device."""
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
    """Checks that each row's first valid slot is in [0, n]; n means that the row has no valid slot."""
    for row, start in enumerate(starts):
        if not 0 <= start <= n:
            raise ValueError(f"{op}: starts must lie in [0, {n}], got {start} for row {row}")


# Arguments of operators other than tensors.


def check_pair(op: str, out: tuple[Any, Any]) -> tuple[Any, Any]:
    """Checks that `out` is a pair, and returns it."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"{op}: out must be a pair (k_out, v_out), got {type(out).__name__}")
    return out


def check_layers(op: str, **groups: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], ...]:
    """Checks that each group has at least one layer, and returns the groups as lists. A tensor is one layer."""
    for name, x in groups.items():
        if not isinstance(x, (Tensor, Iterable)):
            raise TypeError(f"{op}: {name} must be a torch.Tensor or a list of them, got {type(x).__name__}")
    lists = tuple([x] if isinstance(x, Tensor) else list(x) for x in groups.values())
    for name, tensors in zip(groups, lists):
        if not tensors:
            raise ValueError(f"{op}: {name} must hold at least one layer, got none")
    return lists


def check_scores(op: str, scores: Tensor, seq_len: int | None) -> None:
    """Checks for scores of tokens, or with `seq_len` scores of segments."""
    if scores.dim() not in (3, 4):
        raise ValueError(
            f"{op}: scores must be [batch, heads, tokens] or [batch, heads, segments, lag], got {list(scores.shape)}"
        )
    if (scores.dim() == 4) != (seq_len is not None):
        raise ValueError(
            f"{op}: seq_len must be given with scores of 4 dims (segments) and only with them, got scores "
            f"{list(scores.shape)} and seq_len {seq_len}"
        )


def check_plan(op: str, plan: Sequence[int]) -> None:
    """Checks that an encoded plan describes a ladder."""
    if len(plan) < 5 or len(plan) % 2 == 0 or not 0 <= plan[3] < plan[2] <= plan[1] or plan[4] not in (0, 1, 2):
        raise ValueError(
            f"{op}: plan must be a kvops.LadderPlan or its `encoded` form, (n, num_layers, span, overlap, pattern) "
            f"with 0 <= overlap < span <= num_layers and 2 integers for each pass, got {list(plan)}"
        )


# Budgets.


def check_budget(op: str, budget: object) -> None:
    """Checks for a number of tokens (an int of at least 1) or a fraction in (0, 1]."""
    budget = plain(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"{op}: budget must be an int (tokens) or a float (fraction), got {typed(budget)}")
    if isinstance(budget, int):
        check_fits(op, "budget", budget)
        if budget < 1:
            raise ValueError(f"{op}: budget must be at least 1 token, got {budget}")
    elif not 0.0 < budget <= 1.0:
        raise ValueError(f"{op}: budget as a fraction must be in (0, 1], got {budget}")


def check_head_budgets(op: str, budget: Tensor, shape: Sequence[int] | None = None) -> None:
    """Checks for the tokens of each head, int32 [b, Hk]. shape: the rows and heads that have scores of their own."""
    if budget.dtype != torch.int32 or budget.dim() != 2:
        raise ValueError(
            f"{op}: budget as a tensor must be torch.int32 [b, Hk], got {budget.dtype} {list(budget.shape)}"
        )
    if shape is not None and tuple(budget.shape) != tuple(shape):
        raise ValueError(
            f"{op}: budget must have one entry per row and head, expected {list(shape)}, got {list(budget.shape)} "
            "(heads that share one kept set have one budget)"
        )


def check_recent(op: str, recent: int | float, name: str = "recent") -> None:
    """Checks for a number of tokens (an int of at least 0) or a fraction in [0, 1) of the budget."""
    recent = plain(recent)
    if isinstance(recent, bool) or not isinstance(recent, (int, float)):
        raise TypeError(
            f"{op}: {name} must be an int (tokens) or a float (fraction of the budget), got {typed(recent)}"
        )
    if isinstance(recent, int):
        check_fits(op, name, recent)
        if recent < 0:
            raise ValueError(f"{op}: {name} must be at least 0 tokens, got {recent}")
    elif not 0.0 <= recent < 1.0:
        raise ValueError(f"{op}: {name} as a fraction of the budget must be in [0, 1), got {recent}")


def check_buffer(op: str, buffer: int | float | None) -> None:
    """Checks for a number of tokens (an int of at least 1), a fraction in (0, 1) of the budget, or None (no limit)."""
    buffer = plain(buffer)
    if buffer is None:
        return
    if isinstance(buffer, bool) or not isinstance(buffer, (int, float)):
        raise TypeError(
            f"{op}: buffer must be an int (tokens), a float (fraction of the budget) or None, got {typed(buffer)}"
        )
    if isinstance(buffer, int):
        check_fits(op, "buffer", buffer)
        check_at_least(op, "buffer", buffer, 1)
    elif not 0.0 < buffer < 1.0:
        raise ValueError(f"{op}: buffer as a fraction of the budget must be in (0, 1), got {buffer}")


def check_protect(op: str, protect: str, budget: object, buffer: object) -> None:
    """Check `protect` of a policy, which is not None, and what it needs."""
    check_choice(op, "protect", protect, ("prompt",))
    if not isinstance(budget, int):
        raise ValueError(f"{op}: protect='prompt' needs a budget in tokens, an int, got {shown(budget)}")
    if buffer is None:
        raise ValueError(
            f"{op}: protect='prompt' needs a buffer, an int or a float, because without one a cache keeps all new "
            "tokens, got None"
        )


def check_holds(op: str, keep: int, sinks: int, recent: int) -> None:
    """Checks that a budget of `keep` tokens holds the protected tokens."""
    if sinks + recent > keep:
        raise ValueError(
            f"{op}: budget must hold sinks + recent, expected at least {sinks} + {recent} tokens, got {keep}; raise "
            "budget, or lower sinks or recent"
        )


def check_rows_hold(op: str, budgets: Tensor, sinks: int, newest: Tensor) -> None:
    """Checks that each row's and head's budget holds the protected tokens. Tensors on a GPU are not read back.

    budgets, newest: int32 [b, any].
    """
    if not budgets.is_cpu or torch.compiler.is_compiling():
        return
    for row, pairs in enumerate(zip(budgets.tolist(), newest.tolist())):
        for head, (keep, recent) in enumerate(zip(*pairs)):
            where = f"row {row}" if budgets.shape[1] == 1 else f"row {row}, head {head}"
            check_holds(f"{op}, {where}", keep, sinks, recent)


def check_holds_window(op: str, keep: int, window: int) -> None:
    """Checks that a budget of `keep` tokens holds the observation window."""
    if keep < window:
        raise ValueError(
            f"{op}: budget must hold the window, expected at least {window} tokens, got {keep}; raise budget or use a "
            "shorter window"
        )


def check_holds_ladder(op: str, budget: int, sinks: int, num_layers: int, kept: int) -> None:
    """Checks that the budget holds the sinks, the newest num_layers slots, and `kept` slots of a ladder."""
    least = sinks + num_layers + kept
    if sinks < 0 or budget < least:
        raise ValueError(
            f"{op}: budget must hold sinks + num_layers + {kept} slots of a ladder, expected at least "
            f"{least} with {sinks} sinks, got {budget}; raise budget or lower sinks"
        )


# Queries.


def check_queries(op: str, name: str, q: Tensor, k: Tensor, rows: int | None = None) -> None:
    """Checks that q is [b, Hq, w, d] and has at least one row (or exactly `rows`)."""
    check_rank(op, k)
    inference_only(op, **{name: q})
    if q.dim() != 4:
        raise ValueError(f"{op}: {name} must be [b, Hq, w, d], got shape {list(q.shape)}")
    if q.shape[2] < 1 or (rows is not None and q.shape[2] != rows):
        expected = f"{rows} rows" if rows else "at least one row"
        raise ValueError(f"{op}: {name} must have {expected} (dim 2), got {q.shape[2]}")


def check_in_prompt(op: str, name: str, q: Tensor, n: int) -> None:
    """Checks that q has no more rows than the prompt has tokens, n."""
    if q.shape[2] > n:
        raise ValueError(
            f"{op}: {name} must be queries of the prompt, expected at most {n} rows (its tokens), got {q.shape[2]}"
        )


def check_lse(op: str, lse: Tensor | None, rows: Tensor) -> None:
    """Checks that lse has one entry per row of the queries."""
    if lse is None:
        return
    inference_only(op, lse=lse)
    if lse.shape != rows.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(
            f"{op}: lse must be torch.float32 {list(rows.shape[:3])}, one per row of the queries, got {lse.dtype} "
            f"{list(lse.shape)}"
        )


#: The least and the largest scale of the logits of a call with `key_bias`; kernels add key_bias / scale.
KEY_BIAS_SCALES = (1e-6, 1e6)


def check_key_values(op: str, name: str, x: Tensor, k: Tensor) -> None:
    """Checks that values of the keys are fp32 [b, Hk, n], like k."""
    inference_only(op, **{name: x})
    if x.shape != k.shape[:3] or x.dtype != torch.float32 or x.device != k.device:
        raise ValueError(
            f"{op}: {name} must be torch.float32 {list(k.shape[:3])} on {k.device}, one value per key, got "
            f"{x.dtype} {list(x.shape)} on {x.device}"
        )


BYTES = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8  # dtypes of K and V whose queries are bf16


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
    key_bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Checks the arguments of `kvops.attention`."""
    inference_only(op, q=q, k=k, v=v)
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{op}: q must be torch.float32, torch.float16 or torch.bfloat16, got {q.dtype}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} must be [b, heads, tokens, head_dim], got shape {list(x.shape)}")
        narrow = name != "q" and k.dtype in BYTES and q.dtype == torch.bfloat16
        if x.dtype != (k.dtype if narrow else q.dtype) or x.device != q.device:
            wanted = f"k's dtype and q's device, {k.dtype}" if narrow else f"q's dtype and device, {q.dtype}"
            more = " (or int8, float8_e4m3fn or float8_e5m2, as v, if q is torch.bfloat16)" * (
                name == "k" and not narrow
            )
            raise ValueError(f"{op}: {name} must have {wanted} {q.device}{more}, got {x.dtype} {x.device}")
    b, query_heads, t, d = q.shape
    heads, n = k.shape[1:3]
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(f"{op}: k must be [{b}, Hk, n, {d}] to match q, got {list(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{op}: v must be [{b}, {heads}, {n}, dv] to match k, got {list(v.shape)}")
    if query_heads % heads if heads else query_heads:
        raise ValueError(f"{op}: q must have a multiple of k's {heads} heads, got {query_heads}")
    if causal and t > n:
        raise ValueError(
            f"{op}: causal queries belong to the last keys, expected at most {n} rows of q, got {t}; pass causal=False "
            "if all queries see all keys"
        )
    if scale is not None and not _is_normal(scale):
        raise ValueError(f"{op}: scale must be positive and a normal number in fp32, got {scale}")
    if softcap != 0 and not _is_normal(softcap):
        raise ValueError(f"{op}: softcap must be 0 (none) or positive and a normal number in fp32, got {softcap}")
    if softcap != 0 and not _is_normal((d**-0.5 if scale is None else scale) / softcap):
        raise ValueError(f"{op}: scale / softcap must be a normal number in fp32, got {scale} / {softcap}")
    for name, scale_of_rows in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale_of_rows is None) == (k.dtype == torch.int8):
            wanted = "a tensor" if scale_of_rows is None else "None"
            raise ValueError(
                f"{op}: {name} must be {wanted} if k is {k.dtype}, got "
                + ("None" if scale_of_rows is None else type(scale_of_rows).__name__)
            )
        if scale_of_rows is not None:
            check_key_values(op, name, scale_of_rows, k)
    if key_bias is not None:
        check_key_values(op, "key_bias", key_bias, k)
        if softcap != 0:
            raise ValueError(f"{op}: softcap must be 0 with key_bias, got {softcap}")
        low, high = KEY_BIAS_SCALES
        if scale is not None and not low <= scale <= high:
            raise ValueError(f"{op}: scale must lie in [{low:g}, {high:g}] with key_bias, got {scale}")
    check_vector(op, "starts", starts, b, q)
    check_vector(op, "sink_logits", sink_logits, query_heads, q, torch.float32)
    if sink_logits is not None:
        inference_only(op, sink_logits=sink_logits)
    if starts is not None and starts.is_cpu and not torch.compiler.is_compiling():
        check_starts(op, starts.tolist(), n)


def _is_normal(x: float) -> bool:
    """Whether x is a positive normal number in fp32: not 0, subnormal or infinite."""
    fp32 = torch.finfo(torch.float32)
    return fp32.tiny <= x <= fp32.max
