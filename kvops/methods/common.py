"""What all methods share: budgets, choices, head modes, selection by a budget, and the last step that moves K and V."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import check_int as check_int  # every method's
from ..checks import check_vector
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

#: Tokens, or a fraction in (0, 1] of a row's valid ones; the one-shot calls also take each head's own tokens, int32
#: [b, Hk] (`kvops.head_budgets`).
Budget = int | float | Tensor


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


def most_tokens(op: str, budget: Budget, n: int) -> int:
    """`budget_tokens`; of a budget per head the most of any."""
    if not isinstance(budget, Tensor):
        return budget_tokens(op, budget, n)
    if budget.dtype != torch.int32 or budget.dim() != 2:
        raise ValueError(f"{op}: budget as a tensor must be int32 [b, Hk], got {budget.dtype} {list(budget.shape)}")
    return int(budget.max()) if budget.numel() else 0


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


def row_budgets(
    op: str, budget: Budget, shape: tuple[int, int], n: int, starts: Tensor | None, lengths: Tensor | None
) -> tuple[int, Tensor | None]:
    """The most tokens that any head keeps of n slots, and, where rows or heads differ, how many each: int32 [b, 1 or
    Hk]. shape: (b, heads), those that have scores of their own.
    """
    keep = most_tokens(op, budget, n)
    if isinstance(budget, Tensor):
        if budget.shape != shape:
            raise ValueError(
                f"{op}: budget must be of one head each, expected {list(shape)}, got {list(budget.shape)} (heads that "
                "share one kept set have one budget)"
            )
        return keep, budget
    if isinstance(budget, float) and not (starts is None and lengths is None):
        valid = n - starts if lengths is None else lengths
        return keep, (valid.double() * budget).int().clamp(min=1).unsqueeze(1)  # truncated fp64, as int() does
    return keep, None


def check_rows_hold(op: str, budgets: Tensor, sinks: int, newest: Tensor) -> None:
    """Each row's and head's budget holds what is protected; what lies on a GPU is not read back. int32 [b, any]."""
    if not budgets.is_cpu or torch.compiler.is_compiling():
        return
    for row, pairs in enumerate(zip(budgets.tolist(), newest.tolist())):
        for head, (keep, recent) in enumerate(zip(*pairs)):
            where = f"row {row}" if budgets.shape[1] == 1 else f"row {row}, head {head}"
            check_holds(f"{op}, {where}", keep, sinks, recent)


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


def places(*keys: Tensor) -> Tensor:
    """Each entry's place along the last dim, best first: by the first key, then by the next, then in order. int64."""
    slots = order = torch.arange(keys[0].shape[-1], device=keys[0].device).expand_as(keys[0])
    for key in reversed(keys):
        order = order.gather(-1, key.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)
    return torch.empty_like(order).scatter_(-1, order, slots)


def select_budget(
    op: str,
    scores: Tensor,
    heads: int,
    budget: Budget,
    sinks: int = 0,
    recent: int | float = 0,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    fill_invalid: bool = False,
    share: Callable[[int | Tensor, int | Tensor], int | Tensor] | None = None,
) -> Tensor:
    """Kept slots by score within a budget, the first `sinks` and the newest `recent` always among them.

    scores: fp32 [b, Hk, n], or [b, 1, n] for all heads alike. Fractions are of a row's valid slots. share(budget,
    valid): what this layer makes of a row's budget. Returns int64 [b, heads, m], m = min(tokens of the budget, n), of
    a budget per head the most; heads that keep fewer end in -1.
    """
    n = scores.shape[2]
    check_vector(op, "starts", starts, len(scores), scores)
    check_vector(op, "lengths", lengths, len(scores), scores)
    keep, budgets = row_budgets(op, budget, scores.shape[:2], n, starts, lengths)
    window = recent_tokens(op, recent, keep)
    check_int(op, "sinks", sinks, 0)
    check_holds(op, keep, sinks, window)
    padded = not (starts is None and lengths is None)
    valid = (n - starts if lengths is None else lengths).unsqueeze(1) if padded else n  # int32 [b, 1], or an int
    if share is not None:
        if isinstance(budget, Tensor):
            raise ValueError(f"{op}: budget must be one that layers can share, tokens or a fraction, got a tensor")
        keep = max(share(keep, n), keep if padded else 0)  # no row keeps more, whatever its length
        if padded and budgets is None:
            budgets = torch.full_like(valid, budget)
    if budgets is not None:
        newest = (budgets.double() * recent).int() if isinstance(recent, float) else torch.full_like(budgets, window)
        check_rows_hold(op, budgets, sinks, newest)
        if isinstance(recent, float):
            # The operator has one window for all rows: the newest slots of each get the highest score instead.
            window = 0
            end = valid if starts is None else starts.unsqueeze(1) + valid
            slots = torch.arange(n, device=scores.device)
            scores = scores.masked_fill(slots >= (end - newest).unsqueeze(-1), torch.inf)
        if share is not None:
            budgets = share(budgets, valid).int()
        budgets = budgets.expand(scores.shape[:2]).contiguous()
    indices = select_topk(scores, keep, sinks, window, None, starts, lengths, budgets, fill_invalid)
    return indices if indices.shape[1] == heads else indices.expand(-1, heads, -1)


def all_slots(k: Tensor, starts: Tensor | None, lengths: Tensor | None, fill_invalid: bool) -> Tensor:
    """The indices that keep every valid slot: int64 [b, Hk, n]."""
    b, heads, n, _ = k.shape
    scores = torch.zeros(b, 1, n, dtype=torch.float32, device=k.device)
    return select_topk(scores, max(n, 1), 0, 0, None, starts, lengths, None, fill_invalid).expand(-1, heads, -1)


# Random numbers that are the same on every device.


def _mix(x: int | Tensor) -> int | Tensor:
    """MurmurHash3's 32-bit finalizer of int32 values: each bit changes about half of the result's bits.

    x: an int, or a tensor. One of int32 counts on products that wrap around, which compilers may break where they see
    the values' range; one of int64 does not.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = x ^ ((x >> shift) & (2 ** (32 - shift) - 1))  # a shift that brings in zeros, whatever the sign
        wraps = isinstance(x, Tensor) and x.dtype == torch.int32
        x = x * _signed(factor) if wraps else _signed(x * factor)
    return x


def _signed(x: int | Tensor) -> int | Tensor:
    """The value that the low 32 bits of x have as an int32."""
    return ((x + 2**31) & 0xFFFFFFFF) - 2**31


def random_integers(position: Tensor, seed: int, layer: int) -> Tensor:
    """Pseudo-random fp32 integers in [0, 2^24) of (seed, layer, head, position). position: int32 [b, Hk, n]."""
    key = 0
    for word in (seed, seed >> 32, layer):
        key = _mix(_signed(key + word + 0x9E3779B9))
    heads = torch.arange(position.shape[1], device=position.device)[:, None]
    keys = _mix(_signed(heads + (key + 0x9E3779B9))).int()
    return (_mix(_mix(position) ^ keys) & 0xFFFFFF).float()


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
