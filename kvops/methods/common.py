"""What all methods share: budgets, choices, head modes, selection by a budget, and the last step that moves K and V."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..ops import compact_kv_, gather_kv, select_topk


class Compressed(NamedTuple):
    """What a compression kept; unpacks as (k, v, indices)."""

    k: Tensor  # [b, Hk, m, d]
    v: Tensor  # [b, Hk, m, dv]
    indices: Tensor  # int64 [b, Hk, m], ascending; -1, last, where a row keeps fewer than m

    @property
    def lengths(self) -> Tensor:
        """int32 [b]: entries kept per row; m where none is missing."""
        return (self.indices >= 0).any(1).sum(-1, dtype=torch.int32)


# Checks. All of them name the method, the argument, what was expected and what came.


def check_int(op: str, name: str, value: int, low: int) -> None:
    """`value` is an int (a bool is not) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__} {value!r}")
    if value < low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")


def check_choice(op: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_head_mode(op: str, head_mode: str) -> None:
    """The two head modes that every scoring method has."""
    check_choice(op, "head_mode", head_mode, ("per_head", "shared"))


def check_rank(op: str, k: Tensor) -> None:
    """k is a tensor of four dims; its other properties are the operators' to check."""
    if not isinstance(k, Tensor):
        raise TypeError(f"{op}: k must be a torch.Tensor, got {type(k).__name__}")
    if k.dim() != 4:
        raise ValueError(f"{op}: k must be [b, Hk, n, d], got shape {list(k.shape)}")


# Budgets.


def budget_tokens(op: str, budget: int | float, n: int) -> int:
    """Tokens to keep of n: a count as it is, a fraction in (0, 1] as max(1, int(fraction * n))."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            f"{op}: budget must be an int (tokens) or a float (fraction), got {type(budget).__name__} {budget!r}"
        )
    if isinstance(budget, int):
        if budget < 1:
            raise ValueError(f"{op}: budget must be at least 1 token, got {budget}")
        return budget
    if not 0.0 < budget <= 1.0:
        raise ValueError(f"{op}: budget as a fraction must be in (0, 1], got {budget}")
    return max(1, int(budget * n))


def recent_tokens(op: str, recent: int | float, keep: int) -> int:
    """Newest tokens to protect among the `keep`: a count as it is, a share in [0, 1) as int(share * keep)."""
    if isinstance(recent, bool) or not isinstance(recent, (int, float)):
        raise TypeError(
            f"{op}: recent must be an int (tokens) or a float (share), got {type(recent).__name__} {recent!r}"
        )
    if isinstance(recent, int):
        if recent < 0:
            raise ValueError(f"{op}: recent must be at least 0 tokens, got {recent}")
        return recent
    if not 0.0 <= recent < 1.0:
        raise ValueError(f"{op}: recent as a share of the budget must be in [0, 1), got {recent}")
    return int(recent * keep)


def check_holds(op: str, keep: int, sinks: int, recent: int) -> None:
    """The budget holds what is protected."""
    if sinks + recent > keep:
        raise ValueError(
            f"{op}: budget must hold sinks + recent, expected at least {sinks} + {recent} tokens, got {keep}"
        )


# Scores to indices.


def negative_norms(k: Tensor) -> Tensor:
    """Minus each key's L2 norm, fp32 [b, Hk, n]."""
    return torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).neg_()


def shared_scores(scores: Tensor) -> Tensor:
    """Mean over the heads that are finite; NaN where none is. [b, Hk, ...] -> [b, 1, ...].

    Head by head: the order of the sum is fixed whatever n is (so chunks score as the whole does), and no temporary is
    larger than one head.
    """
    if scores.shape[1] == 0:
        return scores.new_full((scores.shape[0], 1, *scores.shape[2:]), torch.nan)
    first, *others = scores.unbind(1)
    count = first.isfinite()
    total = torch.where(count, first, 0.0)
    count = count.to(total.dtype)
    for head in others:
        finite = head.isfinite()
        total += torch.where(finite, head, 0.0)
        count += finite
    return (total / count).unsqueeze(1)


def select_budget(
    op: str,
    scores: Tensor,
    heads: int,
    budget: int | float,
    sinks: int = 0,
    recent: int | float = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    share: Callable[[int | Tensor, int | Tensor], int | Tensor] | None = None,
) -> Tensor:
    """Kept slots by score within a budget, the first `sinks` and the newest `recent` always among them.

    scores: fp32 [b, Hk, n], or [b, 1, n] for all heads alike. Fractions are of a row's valid slots. share(budget,
    valid): what this layer makes of a row's budget. Returns int64 [b, heads, m], m = min(tokens of the budget, n).
    """
    n = scores.shape[2]
    keep = budget_tokens(op, budget, n)
    window = recent_tokens(op, recent, keep)
    check_int(op, "sinks", sinks, 0)
    check_holds(op, keep, sinks, window)
    budgets = None
    padded = not (starts is None and lengths is None)
    if share is not None:
        keep = max(share(keep, n), keep if padded else 0)  # no row keeps more, whatever its length
    if padded and (share is not None or isinstance(budget, float)):
        valid = n - starts if lengths is None else lengths
        if isinstance(budget, float):
            budgets = (valid.double() * budget).int().clamp(min=1)  # [b]: the fp64 product, truncated, as int() does
        else:
            budgets = torch.full_like(valid, budget)
        newest = (budgets.double() * recent).int() if isinstance(recent, float) else torch.full_like(budgets, window)
        if budgets.is_cpu and not torch.compiler.is_compiling():  # what lies on a GPU is not read back
            for row, (row_keep, row_newest) in enumerate(zip(budgets.tolist(), newest.tolist())):
                check_holds(f"{op}, row {row}", row_keep, sinks, row_newest)
        if isinstance(recent, float):
            # The operator has one window for all rows: the newest slots of each get the highest score instead.
            window = 0
            end = valid if starts is None else starts + valid
            slots = torch.arange(n, device=scores.device)
            scores = scores.masked_fill((slots >= (end - newest)[:, None])[:, None], torch.inf)
        if share is not None:
            budgets = share(budgets, valid).int()
        budgets = budgets[:, None].expand(scores.shape[:2]).contiguous()
    indices = select_topk(scores, keep, sinks, window, None, starts, lengths, budgets, fill_invalid)
    return indices if indices.shape[1] == heads else indices.expand(-1, heads, -1)


def all_slots(k: Tensor, starts: Tensor | None, lengths: Tensor | None, fill_invalid: bool) -> Tensor:
    """The indices that keep every valid slot: int64 [b, Hk, n]."""
    b, heads, n, _ = k.shape
    scores = torch.zeros(b, 1, n, device=k.device)
    return select_topk(scores, max(n, 1), 0, 0, None, starts, lengths, None, fill_invalid).expand(-1, heads, -1)


# The last step. Everything has been checked but what the moving operators check themselves, before they write.

IN_PLACE = object()
_Compress = TypeVar("_Compress", bound=Callable[..., Compressed])


def check_out(op: str, out: object) -> None:
    """`out` is a pair, nothing, or the mark of the forms in place."""
    if not (out is None or out is IN_PLACE or (isinstance(out, (tuple, list)) and len(out) == 2)):
        raise TypeError(f"{op}: out must be a pair of tensors (k_out, v_out), got {type(out).__name__}")


def moved(op: str, k: Tensor, v: Tensor, indices: Tensor, out: tuple[Tensor, Tensor] | None) -> Compressed:
    """The kept rows: in fresh memory, in the caller's `out`, or at the front of k and v themselves."""
    check_out(op, out)
    k, v = compact_kv_(k, v, indices) if out is IN_PLACE else gather_kv(k, v, indices, out=out)
    return Compressed(k, v, indices)


def in_place(compress: _Compress) -> _Compress:
    """The form of a compress function that moves the kept slots to the front of k and v, without `out`."""
    signature = inspect.signature(compress)
    parameters = [x for x in signature.parameters.values() if x.name != "out"]
    name = compress.__name__

    def compress_(*args, **options) -> Compressed:
        if "out" in options:
            raise TypeError(f"{name}_() got an unexpected keyword argument 'out'")
        return compress(*args, **options, out=IN_PLACE)

    functools.update_wrapper(compress_, compress)
    del compress_.__wrapped__
    compress_.__name__ = compress_.__qualname__ = name + "_"
    compress_.__signature__ = signature.replace(parameters=parameters)
    compress_.__doc__ = (
        f"`{name}` in place: the kept slots move to the front of k and v; returns views of the first m slots."
    )
    return compress_
