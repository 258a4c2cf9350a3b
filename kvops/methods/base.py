"""Policies: frozen dataclasses of settings with one rule, which maps a layer's cached entries to the slots to keep.

A policy has no state, so one object serves one-shot calls (`compress`, `compress_`), caches (`kvops.Cache`) and every
layer. To write one, choose a base class and implement its rule:

```python
@dataclass(frozen=True, eq=False)
class ValueNorm(kvops.KeyPolicy):                        # inherits budget, sinks, recent and head_mode
    def scores(self, view):                              # fp32 [b, Hk, n]; the highest scores are kept
        return view.v.float().norm(dim=-1)
```

- `KeyPolicy` scores tokens by K and V.
- `QueryPolicy` and `WindowPolicy` (queries.py) score tokens by the attention of queries.
- `Policy` leaves everything to the rule: `select` for one-shot calls, `evict` for caches.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypedDict, TypeVar, cast, get_args

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from .. import ops
from ..ops import compact_kv_, gather_kv
from ..ops.checks import (
    PLAIN,
    check_bool,
    check_budget,
    check_buffer,
    check_choice,
    check_head_budgets,
    check_holds,
    check_holds_window,
    check_int,
    check_protect,
    check_rank,
    check_recent,
    plain,
)
from .budgets import Budget, budget_tokens, check_shared, fraction_of, head_budgets, recent_tokens
from .merging import merged_values
from .projection import Projection, check_layers, check_projection
from .select import all_slots, readable_keys, select_budget, shared_scores
from .shares import Shares, check_layers_of_shares, check_no_shares, check_shares, fixed_budgets
from .view import View

Layout = Literal["bhnd", "bnhd"]
HeadMode = Literal["per_head", "shared", "adaptive"]
Positions = Literal["slots", "original"]
Protect = Literal["prompt"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
HEAD_MODES: tuple[HeadMode, ...] = get_args(HeadMode)
POSITIONS: tuple[Positions, ...] = get_args(Positions)
#: The default buffer: tokens over the budget in decode, as a fraction of the budget. An eviction then costs little
#: compared to the attention of the tokens in between (docs/decode.md).
BUFFER = 1 / 16
Out = tuple[Tensor, Tensor] | None
IN_PLACE: Any = object()  # the value of `out` in the in-place forms


class Compressed(NamedTuple):
    """The kept entries of a compression; unpacks as (k, v, indices).

    Attributes:
        k: [b, Hk, m, d], or [b, m, Hk, d] with layout="bnhd".
        v: [b, Hk, m, dv], or [b, m, Hk, dv] with layout="bnhd".
        indices: int64 [b, Hk, m], the kept slots, ascending. A row that keeps fewer than m slots ends in -1.
    """

    k: Tensor
    v: Tensor
    indices: Tensor

    @property
    def lengths(self) -> Tensor:
        """The entries kept in each row: int32 [b], m if none is missing."""
        return (self.indices >= 0).any(1).sum(-1, dtype=torch.int32)

    def transposed(self) -> Compressed:
        """The same with dims 1 and 2 of k and v swapped."""
        return Compressed(self.k.transpose(1, 2), self.v.transpose(1, 2), self.indices)

    def pages(self, page_size: int) -> Tensor:
        """The pages that the kept entries of each row fill: int32 [b]. This does not wait for a GPU."""
        return (self.lengths + (page_size - 1)) // page_size


class Spans(TypedDict, total=False):
    """Options of every `compress`.

    Attributes:
        starts: int32 [b], the first valid slot of each row; 0 if None.
        lengths: int32 [b], the number of valid slots of each row; n - starts if None.
        fill_invalid: Rows that keep fewer slots than the widest row keep their lowest invalid slots too. Otherwise they
            end in -1 (zeros in k and v).
        out: (k_out, v_out) of the result's shapes to write to.
        block_table: int32 [b, max_pages]: k and v are pages, [num_pages, Hk, page_size, d], and slot i of request b is
            slot i % page_size of page block_table[b, i // page_size]. `lengths` must be given. In place, the kept
            entries of a request move to the front of its own pages, and k and v are returned.
        layout: The order of dims of k, v, the queries, `out` and the results: "bhnd" (the default) is [b, Hk, n, d],
            and "bnhd" is [b, n, Hk, d] (pages: [num_pages, page_size, Hk, d]). Transposing is a view, never a copy.
            Without `layout`, k with more heads than tokens gives a UserWarning, since it may be "bnhd". K and V
            that have been swapped cannot be detected.
    """

    starts: Tensor | None
    lengths: Tensor | None
    fill_invalid: bool
    out: tuple[Tensor, Tensor] | None
    block_table: Tensor | None
    layout: Layout


class LayerSpans(Spans, total=False):
    """`Spans`, and for the policies that treat layers differently the place of the layer.

    Attributes:
        layer: The index of the layer in the model, from 0.
        num_layers: The number of layers of the model.
    """

    layer: int | None
    num_layers: int | None


class Needs(NamedTuple):
    """What a rule needs of a cache or an engine. A class' declaration replaces that of its base as a whole.

    Attributes:
        dense: K and V as tensors. False: the rule reads them by `View.block_table` too, so `compress` takes pages.
        positions: The positions of tokens (`View.positions`). Engines then store the position of each kept token.
        per_slot: Entries of the state with one value per slot, [b, Hk, len]. A cache moves them along with the slots.
            `remember` makes them. If heads differ in length, their values in the gaps (`View.gaps`) are arbitrary, and
            `evict` cannot change them.
        model: The settings that `kvops.hf.for_model` takes from a model, or its tokenizer, if they are None: "w_o",
            "statistics", or the words of a `RepeatPolicy`.
        stage: A stage between prompt and decode, which `kvops.hf` runs: "draft" in `LAQ`, "repeat" in a `RepeatPolicy`.
            Until then a cache keeps the whole prompt.
        statistics: The statistics of the prompt's own queries (`View.statistics`), without those of the first `sinks`
            tokens. A cache gathers them for policies that score by K and V, if it is given the model's `rope`.
        inputs: What each attention module is called with: `View.hidden`, `View.token_ids` and `View.module`, of the
            tokens of the step. `kvops.hf` passes them, and `Cache.attend` takes them. These tokens are the last slots
            of the view, except in policies with `per_slot` whose heads differ in length.
    """

    dense: bool = True
    positions: bool = True
    per_slot: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    stage: Literal["draft", "repeat"] | None = None
    statistics: bool = False
    inputs: bool = False


#: The arguments that have a head and a token dim; `out` is a pair of such tensors.
TRANSPOSED = frozenset(
    ("k", "v", "q", "q_window", "q_last", "q_lookahead", "q_repeat", "k_repeat", "q_reference", "out")
)
#: What policies call by their own names, and the arguments that they pass on to them by the same name.
INNER = frozenset((*ops.__all__, "head_budgets", "lacache_plan"))
SHARED = frozenset(("k", "v", "starts", "lengths", "block_table", "out", "lse", "scale", "softcap", "sink_logits"))

F = TypeVar("F", bound=Callable[..., Any])


def one_shot(compress: F) -> F:
    """Decorates a policy's `compress`: adds `layout`, and says errors of operators in the words of the call."""

    @functools.wraps(compress)
    def call(self: Any, *args: Any, layout: str | None = None, **options: Any) -> Any:
        if layout is not None:
            check_choice(self.name, "layout", layout, LAYOUTS)
        if layout == "bnhd":
            options = {key: _transposed(x) if key in TRANSPOSED else x for key, x in options.items()}
            return call(self, *map(_transposed, args), layout="bhnd", **options).transposed()
        if torch.compiler.is_compiling():
            return compress(self, *args, **options)
        if layout is None and isinstance(k := args[0] if args else options.get("k"), Tensor) and k.dim() == 4:
            _, heads, n, _ = k.shape
            if heads > n > 0 and options.get("block_table") is None:
                self._warn_of_heads(k, options.get("out") is IN_PLACE)
        try:
            return compress(self, *args, **options)
        except (TypeError, ValueError, NotImplementedError) as error:
            op, _, rest = str(error).partition(": ")
            if op in INNER:
                error.args = (f"{self.name}: {self._in_its_words(op, rest)}",)
            raise

    return cast(F, call)


def _transposed(x: Any) -> Any:
    """A view with dims 1 and 2 swapped; of a pair, of each."""
    if isinstance(x, Tensor):
        return x.transpose(1, 2) if x.dim() == 4 else x
    return tuple(map(_transposed, x)) if isinstance(x, (tuple, list)) else x


class Policy:
    """The base of all policies: settings and one rule.

    Subclasses are frozen dataclasses. `check` raises for settings that are invalid. Integers and floats of other types,
    such as numpy's, become ints and floats.
    """

    #: The policy's name in errors.
    name: ClassVar[str] = "Policy"
    #: A function such as `kvops.keydiff_compress` made the policy for one call; `name` is then the function's.
    of_function: ClassVar[bool] = False
    #: The settings that have other names in the policy's function.
    function_names: ClassVar[Mapping[str, str]] = {}
    #: The name of the queries in `compress` and in errors; empty if there are none.
    argument: ClassVar[str] = ""
    #: The settings that decide how many tokens are kept. If all of them are given, `at_budget` has nothing to choose.
    budget_settings: ClassVar[tuple[str, ...]] = ("budget",)
    #: Every row of a padded batch keeps the same number of slots (padding is evicted first).
    fixed_budget: ClassVar[bool] = True
    #: Each head has its own scores, so the heads of a `PagedCache` may differ in length.
    by_head: ClassVar[bool] = False
    #: The last tokens can be removed again (`Cache.crop`).
    croppable: ClassVar[bool] = True

    # Settings that only some policies have, and what their absence means. A class has one by declaring its name.
    #: The newest tokens that observe and are kept.
    window: int = 0
    #: The newest tokens that are kept, see `KeyPolicy`.
    recent: int | float = 0
    #: How often caches evict in decode, see `KeyPolicy`. None: never.
    buffer: int | float | None = None
    #: "prompt": a cache keeps the whole prompt, and the budget is for the tokens after it, see `KeyPolicy`.
    protect: Protect | None = None
    #: "slots": tokens take the positions of their slots, without gaps for evicted tokens, see `LaCache`.
    positions: Positions = "original"
    #: `move` averages evicted values into kept ones, see `KeyDiff`. Engines that move tokens themselves refuse that.
    merge: bool = False
    #: The weights of the output projection, see `CriticalKV`.
    w_o: Projection | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__dict__.get("name", cls.__name__)
        if "needs" not in cls.__dict__:  # the subclass' own rule may read positions
            cls.needs = _with_positions(cls.needs)  # type: ignore[assignment, method-assign, arg-type]

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]  # only the __init__ of a dataclass calls this
            value = getattr(self, setting.name, None)
            if not isinstance(value, PLAIN):
                object.__setattr__(self, setting.name, plain(value))
        if isinstance(self.w_o, list):
            object.__setattr__(self, "w_o", tuple(self.w_o))
        self.check()

    def __deepcopy__(self, memo: object) -> Policy:
        """Settings never change, and some are a model's weights: copies of a cache share them."""
        return self

    @property
    def needs(self) -> Needs:
        """What the rule needs. Classes declare it as an attribute, or as a property if it depends on settings."""
        return Needs()

    @property
    def uniform_layers(self) -> bool:
        """Whether every layer keeps the same number of slots."""
        return True

    @property
    def ragged(self) -> bool:
        """Whether the heads of a cache may hold different numbers of slots."""
        return False

    @property
    def heads_alone(self) -> bool:
        """Whether the kept slots of a KV head depend on no other head.

        Ranks that hold some of the heads each (tensor parallelism) then keep what a single process would keep.
        """
        return False

    def check(self) -> None:
        """Raise TypeError or ValueError for invalid settings."""
        check_choice(self.name, "positions", self.positions, POSITIONS)
        check_bool(self.name, "merge", self.merge)
        check_projection(self.name, self.w_o)

    def check_cache(self, layer: int, num_layers: int) -> None:
        """Raise ValueError if a cache of this layer cannot use this policy."""
        self._check_weights(num_layers)

    def _check_weights(self, num_layers: int) -> None:
        if "w_o" in self.needs.model:
            check_layers(self.name, self.w_o, num_layers)

    def check_equal_heads(self, who: str) -> None:
        """Raise ValueError if the heads of a layer may differ in length, which `who` does not support."""
        if self.ragged:
            raise ValueError(
                f"{self.name}: {who} has one block table for all heads of a layer, so they keep the same number of "
                f"tokens, expected head_mode 'per_head' or 'shared', got {self!r}"
            )

    def check_engine(self, who: str) -> None:
        """Raise ValueError if the policy needs what `who`, an engine, does not gather: `statistics` or `inputs`."""
        if self.needs.inputs:
            raise ValueError(
                f"{self.name}: {who} does not pass hidden states and token ids, expected a policy without "
                f"needs.inputs, got {self!r}; use kvops.hf.compress or kvops.hf.generate"
            )
        if self.needs.statistics:
            raise ValueError(
                f"{self.name}: {who} does not gather the statistics of a prompt's queries, expected those of the "
                f"model, a kvops.QueryStatistics or the path of its file, got {self!r}"
            )

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        """Raise ValueError if a `PagedCache` of this many layers cannot use this policy."""
        self.check_engine("a PagedCache")
        if self.needs.dense or self.merge:
            raise ValueError(f"{self.name}: a PagedCache needs a policy whose compress takes pages, got {self!r}")
        if by_head:
            if not self.by_head:
                raise ValueError(
                    f"{self.name}: all heads keep the same number of tokens, expected by_head=False, got {self!r}"
                )
            self._check_weights(num_layers)
            return
        self.check_equal_heads("a PagedCache without by_head")
        for layer in range(num_layers):
            self.check_cache(layer, num_layers)
        if not self.uniform_layers:
            raise ValueError(
                f"{self.name}: layers that differ in length need a PagedCache with by_head=True, got {self!r}"
            )

    def whole(self, view: View) -> bool:
        """Whether this layer keeps everything."""
        return False

    def select(self, view: View) -> Tensor:
        """The rule for one-shot calls.

        Returns:
            The slots to keep, int64 [b, Hk, m], ascending. Rows that keep fewer than m slots end in -1.
        """
        raise NotImplementedError

    def remember(self, view: View) -> None:
        """What a cache calls after each step, before `evict`: notes in `view.state` what the step shows of its tokens.

        Entries that `Needs.per_slot` names get a column for each of the step's `view.new` tokens, after those that they
        have. If heads differ in length, the slots of the view are these columns, and K and V have no channels. A frozen
        cache calls it only if the policy does not need `inputs`; single calls never do.
        """

    def evict(self, view: View) -> Tensor | None:
        """The rule for caches, called after each step.

        Returns:
            The slots to keep, int64 [b, Hk, m], ascending; None if all are kept. If `fixed_budget` is False, rows of a
            padded batch that keep fewer than m slots begin with -1.
        """
        raise NotImplementedError

    def held(self, n: int, prompt: int) -> int:
        """The slots per head that a request of an engine or a `PagedCache` holds after n tokens.

        It holds the whole prompt until the prompt ends. The result depends only on n, the length of the prompt and the
        settings, never on scores. A scheduler therefore knows the pages of each request without asking the workers.
        """
        raise NotImplementedError

    def protecting(self, prompt: int) -> Self:
        """The policy that a cache applies after a prompt of this many tokens, or slots: `protect`, in numbers."""
        return self

    def resumed(self, before: int, n: int, prompt: int) -> Policy:
        """The policy whose `select` performs the eviction due after n tokens.

        Its input is the slots that the last eviction, after `before` tokens, left (0: there was none) and all tokens
        since then. It keeps held(n, prompt) of them, if they are more.
        """
        raise NotImplementedError

    def move(self, view: View, indices: Tensor, out: Out = None) -> tuple[Tensor, Tensor]:
        """Move the kept rows of K and V to new memory, to `out`, or (`IN_PLACE`) to the front of K and V."""
        merge = self.merge and 0 < indices.shape[2] < view.n
        if merge:
            means, several = merged_values(self.name, view, indices)  # before an eviction in place overwrites v
        if out is IN_PLACE:
            k, v = compact_kv_(view.k, view.v, indices, block_table=view.block_table)
        else:
            k, v = gather_kv(view.k, view.v, indices, block_table=view.block_table, out=out)
        if merge:
            kept = readable_keys(self.name, v)
            v.copy_(torch.where(several & kept.isfinite(), means, kept.float()))
        return k, v

    @one_shot
    def compress(self, k: Tensor, v: Tensor, **call: Unpack[LayerSpans]) -> Compressed:
        """Apply the rule once to a whole cache.

        Args:
            k: [b, Hk, n, d], torch.float32, float16, bfloat16 or fp8; [b, n, Hk, d] with layout="bnhd".
            v: [b, Hk, n, dv], of the dtype of k. Swapped K and V cannot be detected.
            **call: starts, lengths, fill_invalid, out, block_table, layout, layer, num_layers; see `Spans` and
                `LayerSpans`.

        Returns:
            (k, v, indices) of the kept slots; see `Compressed`.

        Raises:
            TypeError: An argument has the wrong type. Nothing has been written.
            ValueError: An argument has the wrong shape, dtype, device, layout or value. Nothing has been written.
        """
        return self._compress(*self._view(k, v, **call))

    def compress_(self, *args: Any, **options: Any) -> Compressed:
        """Apply the rule in place: `compress`, but the kept slots move to the front of k and v.

        Returns:
            (k, v, indices), with k and v views of the first m slots.
        """
        if "out" in options:
            self._refuse("compress_", "out")
        return self.compress(*args, **options, out=IN_PLACE)

    def _view(
        self,
        k: Tensor,
        v: Tensor,
        *,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        fill_invalid: bool = False,
        layer: int | None = None,
        num_layers: int | None = None,
        out: Out = None,
        block_table: Tensor | None = None,
        **unknown: object,
    ) -> tuple[View, Out]:
        """The arguments of one call as a `View`. Checks only what the operators do not check."""
        for argument in unknown:
            self._refuse("compress", argument)
        if self.protect is not None:
            raise ValueError(
                f"{self.name}: a one-shot call cannot tell the prompt from the tokens after it, expected protect=None, "
                f"got {self.protect!r}; use a cache, or sinks= and a budget that holds them"
            )
        needs: object = type(self).needs  # a property would cost a call
        if isinstance(needs, Needs) and needs.inputs:
            raise ValueError(
                f"{self.name}: a single call has no model that passes hidden states and token ids, expected a policy "
                f"without needs.inputs, got {self!r}; use kvops.hf, or kvops.Cache.attend with inputs="
            )
        check_rank(self.name, k)
        if not (out is None or out is IN_PLACE or (isinstance(out, (tuple, list)) and len(out) == 2)):
            raise TypeError(f"{self.name}: out must be a pair of tensors (k_out, v_out), got {type(out).__name__}")
        if block_table is not None:
            self._check_pages(block_table, lengths, fill_invalid)
        return View(k, v, starts, lengths, fill_invalid, layer, num_layers, block_table=block_table), out

    def _check_pages(self, block_table: Tensor, lengths: Tensor | None, fill_invalid: bool) -> None:
        if not isinstance(block_table, Tensor):
            raise TypeError(f"{self.name}: block_table must be a torch.Tensor, got {type(block_table).__name__}")
        if block_table.dim() != 2:
            raise ValueError(f"{self.name}: block_table must be [batch, max_pages], got {list(block_table.shape)}")
        if self.needs.dense or self.merge:
            raise ValueError(f"{self.name}: {self!r} takes no pages, expected dense K and V, got a block_table")
        if lengths is None:
            raise ValueError(f"{self.name}: with a block_table, lengths must be torch.int32 [b], got None")
        if fill_invalid:
            raise ValueError(f"{self.name}: with a block_table, fill_invalid must be False, got True")

    def _refuse(self, method: str, argument: str) -> NoReturn:
        called = self.name if self.of_function else f"{self.name}.{method}"
        raise TypeError(f"{called}() got an unexpected keyword argument {argument!r}")

    def _in_its_words(self, op: str, rest: str) -> str:
        """The message `op: rest` of an operator to the caller of `compress`, who may not know the operator."""
        argument = rest.partition(" ")[0].partition("[")[0]
        if argument == "q" and self.argument:
            return self.argument + rest[1:]
        return rest if argument in SHARED else f"{op}: {rest}"

    def _warn_of_heads(self, k: Tensor, in_place: bool) -> None:
        """Warns the caller of the public function that k appears to be [b, n, Hk, d]. `layout` silences this."""
        warnings.warn(
            f"{self.name}: k is read as [b, Hk, n, d] and has more KV heads ({k.shape[1]}) than tokens ({k.shape[2]}); "
            "if it is [b, n, Hk, d], pass layout='bnhd', and if it is right, pass layout='bhnd' to silence this "
            "warning",
            UserWarning,
            stacklevel=3 + self.of_function + in_place,
        )

    def _compress(self, view: View, out: Out) -> Compressed:
        indices = all_slots(view) if self.whole(view) else self.select(view)
        return Compressed(*self.move(view, indices, out), indices)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Settings that keep `budget` tokens per KV head of a prompt of n tokens, for evaluation.

        Args:
            budget: Tokens to keep.
            n: Tokens of the prompt.
            num_layers: The number of layers of the model.
            streaming: The text comes in windows and has no end.
            options: Settings that the user has chosen.

        Raises:
            ValueError: There are no such settings.
        """
        return {"budget": budget}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, x.name), getattr(other, x.name)) for x in _fields(type(self)))
        return all(x is y or _equal(x, y) for x, y in pairs)

    def __hash__(self) -> int:
        values = (getattr(self, x.name) for x in _fields(type(self)))
        return hash((type(self), *(None if isinstance(x, (Tensor, tuple)) else x for x in values)))


def _check_ragged(policy: Policy) -> None:
    """Raise ValueError if the heads of a cache with this policy cannot differ in length."""
    if not (policy.by_head or policy.needs.stage):
        why = "it keeps one set of tokens for all heads"
    elif policy.needs.per_slot and type(policy).remember is Policy.remember:
        why = f"its rule makes {policy.needs.per_slot} in `evict`, not in `remember`"
    elif policy.merge:
        why = "merge=True averages values over a rectangle of slots"
    elif policy.protect is not None:
        why = f"protect={policy.protect!r} needs a prompt of the same length in all heads"
    else:
        return
    raise ValueError(f"{policy.name}: a cache does not support head_mode='adaptive', because {why}, got {policy!r}")


def _with_positions(needs: Needs | property) -> Needs | property:
    """A class' declaration of `needs`, with positions."""
    if isinstance(needs, Needs):
        return needs._replace(positions=True)
    assert needs.fget is not None
    get = needs.fget  # torch.compile follows a function, not a property
    return property(lambda self: get(self)._replace(positions=True))


def check_policy(who: str, policy: object) -> None:
    """Raises TypeError if `policy` is not a policy but, for example, a class."""
    if not isinstance(policy, Policy):
        got = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise TypeError(
            f"{who}: policy must be a kvops policy such as kvops.KeyDiff(1024), or a string such as "
            f"'keydiff:budget=1024', got {got}"
        )


def _fields(policy: Any) -> tuple[Field[Any], ...]:
    return fields(policy) if is_dataclass(policy) else ()


def _equal(x: object, y: object) -> bool:
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(map(_equal, x, y))
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return isinstance(x, Tensor) and isinstance(y, Tensor) and torch.equal(x, y)
    return x == y


@dataclass(frozen=True, eq=False)
class BudgetPolicy(Policy):
    """A policy that keeps the tokens with the highest scores, as many as its budget allows.

    A cache evicts after each step of several tokens, which is part of a prompt. In decode it evicts only if the class
    has the setting `buffer`, as `KeyPolicy` has.

    Attributes:
        budget: Tokens to keep (int), or a fraction in (0, 1] of the valid slots (float), rounded down, at least 1. In a
            cache the fraction is of the tokens seen. One-shot calls also take a budget per head, int32 [b, Hk]
            (`kvops.head_budgets`); the result is then as wide as the largest of them, and heads that keep fewer end
            in -1.
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
    """

    budget: Budget
    _: KW_ONLY
    sinks: int = 0
    head_mode: HeadMode = "per_head"
    shares: Shares | None = None

    def check(self) -> None:
        super().check()
        check_recent(self.name, self.recent)
        check_buffer(self.name, self.buffer)
        if self.protect is not None:
            check_protect(self.name, self.protect, self.budget, self.buffer)
        check_choice(self.name, "head_mode", self.head_mode, HEAD_MODES)
        check_int(self.name, "sinks", self.sinks, 0)
        if self.shares is not None:
            check_shares(self.name, self.shares, self.head_mode)
        if isinstance(self.budget, Tensor):
            check_head_budgets(self.name, self.budget)
            if self.head_mode != "per_head":
                raise ValueError(
                    f"{self.name}: a budget per head needs head_mode='per_head', got head_mode={self.head_mode!r}"
                )
            return
        check_budget(self.name, self.budget)
        keep = budget_tokens(self.budget, 1)
        newest = self.newest(keep)
        if isinstance(self.budget, int):
            self.check_holds(keep, newest)

    def check_holds(self, keep: int, newest: int) -> None:
        """Raise ValueError if `keep` tokens do not hold the tokens that are always kept."""
        if self.sinks or not self.window:
            check_holds(self.name, keep, self.sinks, newest)
        if self.window:
            check_holds_window(self.name, keep, newest)

    @property
    def heads_alone(self) -> bool:
        return self.head_mode == "per_head"

    @property
    def ragged(self) -> bool:
        return self.head_mode == "adaptive"

    def check_cache(self, layer: int, num_layers: int) -> None:
        if isinstance(self.budget, Tensor):
            raise ValueError(
                f"{self.name}: a cache expects budget as an int or a float, and shares it among its heads with "
                "head_mode='adaptive', got a budget per head"
            )
        if self.ragged:
            _check_ragged(self)
        if self.shares is not None:
            check_layers_of_shares(self.name, self.shares, num_layers)
        super().check_cache(layer, num_layers)

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        if not isinstance(self.budget, int):
            raise ValueError(f"{self.name}: a PagedCache needs a budget in tokens, an int, got {self.budget}")
        check_no_shares(self.name, self.shares, "a PagedCache")
        super().check_paged_cache(num_layers, by_head)
        if by_head and self.buffer is not None:
            raise ValueError(
                f"{self.name}: heads that differ in length are evicted only at the end of the prompt, expected "
                f"buffer=None, got {self.buffer}"
            )

    # The rule

    def scores(self, view: View) -> Tensor:
        """The score of each slot: fp32 [b, Hk, n], or [b, 1, n] for all heads alike.

        The highest scores are kept; NaN is evicted first.
        """
        raise NotImplementedError

    def newest(self, keep: int) -> int:
        """How many of the newest tokens are always among the `keep` kept ones; of a one-shot call see `protected`."""
        return self.window or recent_tokens(self.recent, keep)

    def protected(self, view: View) -> int | float:
        """`newest` for a one-shot call: tokens, or a fraction of each row's or head's budget."""
        return self.window or self.recent

    def protected_in_cache(self, view: View) -> int:
        """`newest` of the budget of a cache."""
        return self.newest(budget_tokens(self.budget, view.seen))

    def select(self, view: View) -> Tensor:
        return self.pick(self.scores(view), view)

    def pick(self, scores: Tensor, view: View) -> Tensor:
        """Select the slots to keep in a one-shot call, given the scores."""
        return self.choose(scores, view, self.budget, recent=self.protected(view))

    def choose(self, scores: Tensor, view: View, budget: Budget, **options: Any) -> Tensor:
        """Select the slots with the highest scores within `budget`. options: of `select_budget`, such as recent."""
        if self.head_mode == "shared":
            scores = shared_scores(scores)
        elif self.head_mode == "adaptive":
            scores = view.without_gaps(scores)
            budget = self._shares(scores, view, budget, options.get("recent", 0))
        return select_budget(self.name, scores, view.heads, budget, sinks=self.sinks, **view.spans, **options)

    def _shares(self, scores: Tensor, view: View, budget: Budget, recent: int | float, **options: Any) -> Tensor:
        """The budget of each head, by the scores of the tokens that are not protected: int32 [b, Hk].

        options: the floor of `head_budgets`.
        """
        if scores.shape[1] != view.heads:
            raise ValueError(f"{self.name}: head_mode='adaptive' needs scores of each head, got one for all heads")
        if self.shares is not None:
            return torch.tensor(self.fixed(view), dtype=torch.int32, device=scores.device).view(scores.shape[:2])
        check_shared(self.name, budget, self.sinks or recent)
        assert not isinstance(budget, Tensor)  # `check` refuses it
        newest = recent_tokens(recent, budget) if isinstance(budget, int) else 0
        if budget == self.sinks:
            return scores.new_full(scores.shape[:2], self.sinks, dtype=torch.int32)
        starts, lengths = view.behind(self.sinks)
        return head_budgets(scores, budget - self.sinks, newest, starts=starts, lengths=lengths, **options) + self.sinks

    # Caches

    def room(self, view: View) -> int:
        """The tokens that a cache keeps: the budget, but at least the tokens that are always kept.

        With `shares`: the mean over the heads of the layer, rounded down, of the row that keeps most.
        """
        if self.shares is not None:
            return max((sum(x) // view.heads for x in self.fixed(view)), default=view.seen)
        keep = budget_tokens(self.budget, view.seen)
        return max(keep, self.sinks + self.newest(keep))

    def fixed(self, view: View) -> list[list[int]]:
        """With `shares`: the tokens that each head of the layer keeps, of each row."""
        assert self.shares is not None
        keep = budget_tokens(self.budget, view.seen)
        return fixed_budgets(self.name, self.shares, view, keep, self.sinks + self.newest(keep))

    def of_prompt(self, view: View) -> bool:
        """Whether the step is part of a prompt."""
        return view.new > 1 and view.new >= self.window

    def full(self, view: View, keep: int) -> bool:
        """Whether a cache evicts after this step, down to `keep` slots."""
        if view.n <= keep or self.of_prompt(view):
            return view.n > keep
        return self.buffer is not None and view.n >= keep + self.buffer_tokens(keep)

    def evict(self, view: View) -> Tensor | None:
        keep = self.room(view)
        if not self.full(view, keep) or self.whole(view):
            return None
        return self.choose(self.scores(view), view, keep, recent=self.protected_in_cache(view))

    def buffer_tokens(self, keep: int) -> int:
        """The buffer of a budget of `keep` tokens."""
        assert self.buffer is not None
        return self.buffer if isinstance(self.buffer, int) else max(1, fraction_of(self.buffer, keep))

    def cached_length(self, n: int) -> int:
        """The tokens left of n with a buffer that is emptied whenever it is full."""
        assert isinstance(self.budget, int)
        more = n - self.budget
        return n if more < (buffer := self.buffer_tokens(self.budget)) else self.budget + more % buffer

    def held(self, n: int, prompt: int) -> int:
        """The whole prompt until its last token; then the budget and the tokens since the buffer was last emptied.

        With protect="prompt" also the prompt.
        """
        assert isinstance(self.budget, int)  # as PagedCache checks
        if self.protect is not None:
            return n if n <= prompt else prompt + self.cached_length(n - prompt)
        count = n if n < prompt else min(prompt, self.budget) + n - prompt
        return count if self.buffer is None or n <= prompt else self.cached_length(count)

    def protecting(self, prompt: int) -> Self:
        """With protect="prompt": the policy whose first tokens, beyond the budget's own, are the prompt."""
        if self.protect is None:
            return self
        assert isinstance(self.budget, int)  # as `check` checks
        settings: dict[str, Any] = dict(
            protect=None,
            budget=prompt + self.budget,
            sinks=prompt + self.sinks,
            buffer=self.buffer_tokens(self.budget),
            **self.in_tokens(self.budget),
        )
        return replace(self, **settings)

    def in_tokens(self, keep: int) -> dict[str, Any]:
        """The settings that are fractions of the budget, in tokens of a budget of `keep`; `buffer` aside."""
        return {"recent": recent_tokens(self.recent, keep)} if isinstance(self.recent, float) else {}

    def resumed(self, before: int, n: int, prompt: int) -> Policy:
        return replace(self.protecting(prompt), budget=self.held(n, prompt))

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Never more than the budget, in decode too, as in the papers."""
        return {"budget": budget, "buffer": 1} if any(x.name == "buffer" for x in _fields(cls)) else {"budget": budget}


@dataclass(frozen=True, eq=False)
class KeyPolicy(BudgetPolicy):
    """A policy that scores tokens by their keys and values, and evicts in decode too. Subclasses implement `scores`.

    Attributes:
        budget: See `BudgetPolicy`.
        sinks: See `BudgetPolicy`.
        head_mode: See `BudgetPolicy`.
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
    """

    by_head: ClassVar[bool] = True

    _: KW_ONLY
    buffer: int | float | None = BUFFER
    protect: Protect | None = None
    recent: int | float = 0
