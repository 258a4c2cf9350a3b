"""Policies: a method is a frozen dataclass of settings and one rule, from what a layer holds to the slots that stay.

A policy has no state, so one object serves one-shot calls (`compress`, `compress_`), caches (`kvops.Cache`) and every
layer. To write one, take the base that fits and state the rule::

    @dataclass(frozen=True, eq=False)
    class ValueNorm(kvops.KeyPolicy):                        # budget, sinks, recent and head_mode come with it
        def scores(self, view):                              # fp32 [b, Hk, n]; the budget's highest stay
            return view.v.float().norm(dim=-1)

- `KeyPolicy` scores tokens by K and V.
- `QueryPolicy` and `WindowPolicy` (queries.py) score them by the attention of queries.
- `Policy` leaves everything to the rule: `select` for one call, `evict` for a cache.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..checks import check_buffer, check_choice, check_head_budgets, check_holds, check_int, check_rank, check_recent
from ..ops import compact_kv_, gather_kv
from ..rope import Rope
from .budgets import Budget, budget_tokens, head_budgets, recent_tokens, valid_slots
from .select import all_slots, select_budget, shared_scores

HEAD_MODES = ("per_head", "shared", "adaptive")
#: Tokens over the budget in decode, as a share of it: an eviction then costs little next to the attention of so many
#: tokens (docs/decode.md).
BUFFER = 1 / 16
Out = tuple[Tensor, Tensor] | None
IN_PLACE: Any = object()  # stands for `out` in the forms in place


class Compressed(NamedTuple):
    """What a compression kept; unpacks as (k, v, indices)."""

    k: Tensor  # [b, Hk, m, d]
    v: Tensor  # [b, Hk, m, dv]
    indices: Tensor  # int64 [b, Hk, m], ascending; -1, last, where a row keeps fewer than m

    @property
    def lengths(self) -> Tensor:
        """int32 [b]: entries kept per row; m where none is missing."""
        return (self.indices >= 0).any(1).sum(-1, dtype=torch.int32)

    def pages(self, page_size: int) -> Tensor:
        """int32 [b]: how many pages they fill; nothing waits for a GPU."""
        return (self.lengths + (page_size - 1)) // page_size


class Spans(TypedDict, total=False):
    """Arguments of every `compress`.

    starts, lengths: int32 [b], the valid slots of each row. Rows that keep fewer than the widest end in -1 (zeros in k
        and v), or with `fill_invalid` keep their lowest invalid slots instead.
    out: (k_out, v_out) of the result's shapes to write to.
    block_table: int32 [b, max_pages]: k and v are pages, [num_pages, Hk, page_size, d], and slot i of request b is slot
        i % page_size of page block_table[b, i // page_size]. `lengths` must be given. In place, what a request keeps
        moves to the front of its own pages, and k and v are returned as they are.
    """

    starts: Tensor | None
    lengths: Tensor | None
    fill_invalid: bool
    out: tuple[Tensor, Tensor] | None
    block_table: Tensor | None


class LayerSpans(Spans, total=False):
    """`Spans`, and which layer of how many this is, for the policies that treat layers differently."""

    layer: int | None
    num_layers: int | None


@dataclass
class View:
    """What a layer holds when a policy is asked which slots stay: of one call, or of a cache with the step's tokens.

    Attributes:
        k: [b, Hk, n, d]. v: [b, Hk, n, dv]. With a block table pages; a rule that takes them reads them by operators.
        starts: int32 [b] or None, the first valid slot of each row.
        lengths: int32 [b] or None, how many slots from there on are valid; None: all.
        fill_invalid: rows of fewer valid slots than the budget keep invalid ones, instead of -1.
        layer, num_layers: which layer of how many that evict; None if the caller did not say.
        seen: tokens seen, padding included; n in one call.
        new: how many of the slots, the last ones, are the step's own; n in one call.
        kept: int64 [b, Hk, <= n] or None, the positions of the first slots of a cache; the others follow on.
        padding: int32 [b] or None, the columns of padding that a row's tokens began with.
        observed: what queries observed (`QueryPolicy`): fp32 [b, Hk, n], or [b, Hq, n].
        window: how many of the newest tokens' queries observed; these tokens stay.
        rope: with it, keys are rotated at their slots, and `move` has to turn them. None once they are.
        state: what the policy remembers of the layer from one eviction to the next. Tensors in it have the batch as
            their first dim. An eviction replaces entries, it never writes to their memory.
        block_table: int32 [b, max_pages] or None; see `Spans`.
    """

    k: Tensor
    v: Tensor
    starts: Tensor | None = None
    lengths: Tensor | None = None
    fill_invalid: bool = False
    layer: int | None = None
    num_layers: int | None = None
    seen: int = -1
    new: int = -1
    kept: Tensor | None = None
    padding: Tensor | None = None
    observed: Tensor | None = None
    window: int = 0
    rope: Rope | None = None
    state: dict[str, Any] = field(default_factory=dict)
    block_table: Tensor | None = None

    def __post_init__(self) -> None:
        if self.seen < 0:
            self.seen = self.new = self.n
            self.padding = self.starts

    @property
    def n(self) -> int:
        """Slots."""
        return self.k.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def rows(self) -> int:
        """Of the batch: its requests."""
        return len(self.k if self.block_table is None else self.block_table)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.k.shape[1]

    @property
    def end(self) -> Tensor | int:
        """One past each row's last valid slot: n for all rows, or int32 [b]."""
        if self.lengths is None:
            return self.n
        return (self.lengths if self.starts is None else self.starts + self.lengths).clamp(0, self.n)

    @property
    def spans(self) -> dict[str, Any]:
        """starts, lengths and fill_invalid, as operators and `select_budget` take them."""
        return {"starts": self.starts, "lengths": self.lengths, "fill_invalid": self.fill_invalid}

    @property
    def slots(self) -> dict[str, Any]:
        """starts, lengths and block_table, as the operators that read K and V take them."""
        return {"starts": self.starts, "lengths": self.lengths, "block_table": self.block_table}

    @property
    def seen_by_queries(self) -> Tensor:
        """`observed`, which a rule that looks at queries can count on."""
        assert self.observed is not None
        return self.observed

    def place(self, op: str) -> tuple[int, int]:
        """layer and num_layers, for the policies that need them."""
        layer, num_layers = self.layer, self.num_layers
        if layer is None or num_layers is None:
            raise TypeError(f"{op}: layer and num_layers must be ints, got {layer!r} and {num_layers!r}")
        check_int(op, "layer", layer, 0)
        check_int(op, "num_layers", num_layers, 1)
        if layer >= num_layers:
            raise ValueError(f"{op}: layer must lie in [0, num_layers), expected less than {num_layers}, got {layer}")
        return layer, num_layers

    def positions(self) -> Tensor:
        """The logical position of each slot, padding included: int64 [b, Hk, n]."""
        kept = 0 if self.kept is None else self.kept.shape[2]
        new = torch.arange(self.seen - self.n + kept, self.seen, device=self.k.device).expand(self.rows, self.heads, -1)
        return new if self.kept is None else torch.cat((self.kept, new), 2)


class Policy:
    """Settings and one rule. Subclasses are frozen dataclasses; `check` raises for settings that make no sense."""

    #: Every row of a padded batch keeps the same number of slots (padding goes first).
    fixed_budget: ClassVar[bool] = True
    #: Whether the rule calls `View.positions`. Engines then store the position of each kept token. True unless a class
    #: declares otherwise; a subclass does not inherit the declaration, since its own rule may differ.
    uses_positions: ClassVar[bool] = True
    #: The rule looks at queries: a step's attention has to be the library's own.
    uses_queries: ClassVar[bool] = False
    #: "slots": tokens take the positions of their slots, without the gaps of evicted ones. Needs the model's `Rope`.
    positions: str = "original"
    #: Entries of the state with one value per slot, [b, Hk, len]: a cache moves them along with the slots.
    by_slot: ClassVar[tuple[str, ...]] = ()
    #: Each head's scores are its own, so the heads of a `PagedCache` may differ in length.
    by_head: ClassVar[bool] = False
    #: The last tokens can be taken back (`Cache.crop`).
    croppable: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.uses_positions = cls.__dict__.get("uses_positions", True)

    def __post_init__(self) -> None:
        self.check()

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    @property
    def uniform_layers(self) -> bool:
        """Every layer keeps the same number of slots."""
        return True

    @property
    def heads_alone(self) -> bool:
        """What a KV head keeps depends on that head alone, or on none: ranks that hold some of the heads each (tensor
        parallelism) keep what one process would."""
        return False

    @property
    def paged(self) -> bool:
        """`compress` takes pages: the rule reads K and V by operators alone, which it hands `View.block_table`."""
        return False

    def check(self) -> None:
        """Raises TypeError or ValueError for wrong settings."""

    def check_cache(self, layer: int, num_layers: int) -> None:
        """Raises for what a cache of `layer` of `num_layers` cannot serve."""

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        """Raises for what a `PagedCache` of so many layers cannot serve."""
        if not self.paged:
            raise ValueError(f"{self.name}: a PagedCache needs a policy whose compress takes pages, got {self!r}")
        if by_head:
            if not self.by_head:
                raise ValueError(
                    f"{self.name}: its heads keep equally many tokens, expected by_head=False, got {self!r}"
                )
            return
        for layer in range(num_layers):
            self.check_cache(layer, num_layers)
        if not self.uniform_layers:
            raise ValueError(f"{self.name}: layers that differ in length need a PagedCache by_head, got {self!r}")

    def whole(self, view: View) -> bool:
        """Whether this layer is left as it is."""
        return False

    def select(self, view: View) -> Tensor:
        """The rule for one call: the slots that stay, int64 [b, Hk, m]: ascending, -1 last in rows that keep fewer."""
        raise NotImplementedError

    def evict(self, view: View) -> Tensor | None:
        """The rule for a cache, after each step: the slots that stay, int64 [b, Hk, m]; None if all do.

        Ascending; where `fixed_budget` is False, rows of a padded batch that keep fewer begin with -1.
        """
        raise NotImplementedError

    def held(self, n: int, prompt: int) -> int:
        """How many slots per head a request of a `PagedCache` holds when n of its tokens have been seen.

        A function of n, the prompt's length and the settings alone, never of scores: who schedules requests knows the
        pages that each takes without asking whoever computes.
        """
        raise NotImplementedError

    def resumed(self, before: int, n: int, prompt: int) -> Policy:
        """The policy whose `select` leaves held(n, prompt) of what was held at `before` and of the tokens since, where
        these are more."""
        raise NotImplementedError

    def move(self, view: View, indices: Tensor, out: Out = None) -> tuple[Tensor, Tensor]:
        """The kept rows of K and V: in fresh memory, in `out`, or (`IN_PLACE`) at the front of K and V themselves."""
        if out is IN_PLACE:
            return compact_kv_(view.k, view.v, indices, block_table=view.block_table)
        return gather_kv(view.k, view.v, indices, block_table=view.block_table, out=out)

    def compress(self, k: Tensor, v: Tensor, **call: Unpack[LayerSpans]) -> Compressed:
        """The rule in one call.

        Args:
            k: [b, Hk, n, d].
            v: [b, Hk, n, dv].
            call: starts, lengths, fill_invalid, out, block_table, layer, num_layers; see `Spans` and `LayerSpans`.

        Returns:
            (k, v, indices) with the slots that stay.

        Raises:
            TypeError, ValueError: wrong arguments; nothing has been written.
        """
        return self._compress(*self._view(k, v, **call))

    def compress_(self, *args: Any, **options: Any) -> Compressed:
        """`compress` in place: the kept slots move to the front of k and v; returns views of the first m slots."""
        if "out" in options:
            raise TypeError(f"{self.name}.compress_() got an unexpected keyword argument 'out'")
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
        """The arguments of one call, checked as far as no operator does."""
        for argument in unknown:
            raise TypeError(f"{self.name}.compress() got an unexpected keyword argument {argument!r}")
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
        if not self.paged:
            raise ValueError(f"{self.name}: {self!r} takes no pages, expected dense K and V, got a block_table")
        if lengths is None:
            raise ValueError(f"{self.name}: a block_table needs the requests' lengths, int32 [b], got None")
        if fill_invalid:
            raise ValueError(f"{self.name}: invalid slots have no pages, expected fill_invalid=False, got True")

    def _compress(self, view: View, out: Out) -> Compressed:
        indices = all_slots(view) if self.whole(view) else self.select(view)
        return Compressed(*self.move(view, indices, out), indices)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The settings that keep `budget` tokens per KV head of a prompt of n, for evaluation.

        num_layers: of the model. streaming: text comes in windows, without an end. options: settings already chosen.
        ValueError where none do.
        """
        return {"budget": budget}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, x.name), getattr(other, x.name)) for x in _fields(type(self)))
        return all(x is y or _equal(x, y) for x, y in pairs)

    def __hash__(self) -> int:
        values = (getattr(self, x.name) for x in _fields(type(self)))
        return hash((type(self), *(None if isinstance(x, Tensor) else x for x in values)))


def check_policy(who: str, policy: object) -> None:
    """TypeError for what is no policy: a class of one, say, or a name."""
    if not isinstance(policy, Policy):
        got = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise TypeError(f"{who}: policy must be a kvops policy such as kvops.KeyDiff(1024), got {got}")


def _fields(policy: Any) -> tuple[Field[Any], ...]:
    return fields(policy) if is_dataclass(policy) else ()


def _equal(x: object, y: object) -> bool:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return isinstance(x, Tensor) and isinstance(y, Tensor) and torch.equal(x, y)
    return x == y


@dataclass(frozen=True, eq=False)
class BudgetPolicy(Policy):
    """A policy that keeps a budget's highest scores.

    Attributes:
        budget: tokens (int), or a fraction in (0, 1] of the valid slots (float): max(1, int(budget * n)); in a cache,
            of the tokens seen. One-shot calls also take each head's own tokens, int32 [b, Hk] (`kvops.head_budgets`);
            the result is then as wide as the most of them, and heads that keep fewer end in -1.
        sinks: first tokens that always stay; part of the budget.
        head_mode: "per_head"; "shared": one kept set for all heads, by the mean score; or "adaptive" (one-shot calls):
            the heads share a layer's budget by their scores (`kvops.head_budgets`).
    """

    budget: Budget
    _: KW_ONLY
    sinks: int = 0
    head_mode: str = "per_head"

    def check(self) -> None:
        check_choice(self.name, "head_mode", self.head_mode, HEAD_MODES)
        check_int(self.name, "sinks", self.sinks, 0)
        if isinstance(self.budget, Tensor):
            check_head_budgets(self.name, self.budget)
            if self.head_mode != "per_head":
                raise ValueError(
                    f"{self.name}: a budget per head needs head_mode='per_head', got head_mode={self.head_mode!r}"
                )
            return
        keep = budget_tokens(self.name, self.budget, 1)
        newest = self.newest(keep)
        if isinstance(self.budget, int):
            self.check_holds(keep, newest)

    def check_holds(self, keep: int, newest: int) -> None:
        """Raises if `keep` tokens do not hold what always stays."""
        check_holds(self.name, keep, self.sinks, newest)

    @property
    def heads_alone(self) -> bool:
        return self.head_mode == "per_head"

    def check_cache(self, layer: int, num_layers: int) -> None:
        if isinstance(self.budget, Tensor) or self.head_mode == "adaptive":
            raise ValueError(
                f"{self.name}: the heads of a cache keep equally many tokens, expected budget as an int or a float and "
                "head_mode 'per_head' or 'shared', got a budget per head"
            )

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        if not isinstance(self.budget, int):
            raise ValueError(f"{self.name}: a PagedCache needs a budget in tokens, an int, got {self.budget}")
        super().check_paged_cache(num_layers, by_head)

    def held(self, n: int, prompt: int) -> int:
        """The whole prompt until its last token, then the budget, and every token since."""
        assert isinstance(self.budget, int)  # as PagedCache checks
        return n if n < prompt else min(prompt, self.budget) + n - prompt

    def resumed(self, before: int, n: int, prompt: int) -> Policy:
        return replace(self, budget=self.held(n, prompt))

    def spare(self, keep: int) -> int:
        """How many tokens more are held, where prompts and decode are evicted alike, before so many stay."""
        return max(1, int(BUFFER * keep))

    def cycled(self, n: int) -> int:
        """What a buffer that empties whenever it is full leaves of n tokens."""
        assert isinstance(self.budget, int)
        more = n - self.budget
        return n if more < (spare := self.spare(self.budget)) else self.budget + more % spare

    def scores(self, view: View) -> Tensor:
        """The formula: fp32 [b, Hk, n], or [b, 1, n] for all heads alike. The highest stay; NaN goes first."""
        raise NotImplementedError

    def newest(self, keep: int) -> int:
        """How many of the newest tokens always stay among `keep`."""
        return 0

    def room(self, view: View) -> int:
        """Tokens that a cache keeps: the budget, but never less than what always stays."""
        keep = budget_tokens(self.name, self.budget, view.seen)
        return max(keep, self.sinks + self.newest(keep))

    def select(self, view: View) -> Tensor:
        return self.pick(self.scores(view), view)

    def pick(self, scores: Tensor, view: View) -> Tensor:
        """What `select` makes of the scores."""
        return self.choose(scores, view, self.budget)

    def full(self, view: View, keep: int) -> bool:
        """Whether a cache evicts after this step. keep: the slots that then stay."""
        return view.n > keep

    def evict(self, view: View) -> Tensor | None:
        keep = self.room(view)
        if not self.full(view, keep) or self.whole(view):
            return None
        return self.choose(self.scores(view), view, keep)

    def choose(self, scores: Tensor, view: View, budget: Budget, **options: Any) -> Tensor:
        """The kept slots by score, within `budget`. options: of `select_budget`, such as recent."""
        if self.head_mode == "shared":
            scores = shared_scores(scores)
        elif self.head_mode == "adaptive":
            budget = self._shares(scores, view, options.get("recent", 0))
        return select_budget(
            self.name,
            scores,
            view.heads,
            budget,
            sinks=self.sinks,
            **view.spans,
            **options,
        )

    def _shares(self, scores: Tensor, view: View, recent: int | float) -> Tensor:
        """The budget of each head, by the scores of what does not stay anyway: int32 [b, Hk]."""
        if scores.shape[1] != view.heads:
            raise ValueError(f"{self.name}: head_mode='adaptive' needs scores of each head, got one for all heads")
        if not isinstance(self.budget, int) and (self.sinks or recent):
            raise ValueError(
                f"{self.name}: head_mode='adaptive' with sinks or recent needs a budget in tokens, got {self.budget}"
            )
        newest = recent_tokens(self.name, recent, self.budget) if isinstance(self.budget, int) else 0
        starts, lengths = view.starts, view.lengths
        if self.sinks:
            none = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
            valid = valid_slots(view.n, none if starts is None else starts, lengths)
            starts = (none if starts is None else starts) + torch.clamp(valid, max=self.sinks)
            lengths = (valid - self.sinks).clamp(min=0)
        budget = self.budget
        assert not isinstance(budget, Tensor)  # which `check` refuses
        if self.sinks:
            budget -= self.sinks
        return head_budgets(scores, budget, newest, starts=starts, lengths=lengths) + self.sinks


@dataclass(frozen=True, eq=False)
class DecodePolicy(BudgetPolicy):
    """A budget policy whose cache evicts in decode too.

    Attributes:
        budget, sinks, head_mode: see `BudgetPolicy`.
        buffer: decode evicts, down to the budget, when so many tokens more are held: an int, or a share in (0, 1) of
            the budget (float), rounded down, at least 1. 1 evicts after every token. None keeps every new token. A step
            of several tokens is part of a prompt, and evicts by itself.
    """

    #: The requests of a `PagedCache` hold their whole prompt until its end.
    whole_prompt: ClassVar[bool] = False

    _: KW_ONLY
    buffer: int | float | None = BUFFER

    def check(self) -> None:
        check_buffer(self.name, self.buffer)
        super().check()

    def of_prompt(self, view: View) -> bool:
        """Whether the step is part of a prompt."""
        return view.new > 1

    def spare(self, keep: int) -> int:
        """The buffer of so many tokens."""
        assert self.buffer is not None
        return self.buffer if isinstance(self.buffer, int) else max(1, int(self.buffer * keep))

    def full(self, view: View, keep: int) -> bool:
        if view.n <= keep or self.of_prompt(view):
            return view.n > keep
        return self.buffer is not None and view.n >= keep + self.spare(keep)

    def check_paged_cache(self, num_layers: int, by_head: bool = False) -> None:
        super().check_paged_cache(num_layers, by_head)
        if by_head and self.buffer is not None:
            raise ValueError(
                f"{self.name}: heads that differ in length are evicted at the prompt's end only, expected buffer=None, "
                f"got {self.buffer}"
            )

    def held(self, n: int, prompt: int) -> int:
        """Up to the budget and its buffer all; then the budget, and what has come since the buffer was last full."""
        count = super().held(n, prompt) if self.whole_prompt or self.buffer is None else n
        return count if self.buffer is None or (self.whole_prompt and n <= prompt) else self.cycled(count)

    @classmethod
    def at_budget(
        cls, budget: int, n: int, num_layers: int, streaming: bool, options: dict[str, Any]
    ) -> dict[str, Any]:
        """No more than the budget in decode either, as in the papers."""
        return {"budget": budget, "buffer": 1}


@dataclass(frozen=True, eq=False)
class KeyPolicy(DecodePolicy):
    """A policy that scores tokens by their keys and values: state `scores`.

    Attributes:
        budget, sinks, head_mode, buffer: see `DecodePolicy`.
        recent: newest tokens that always stay (int), or a share in [0, 1) of the budget (float); part of the budget.
            With head_mode="adaptive" each head protects this share of its own budget; the budgets themselves are found
            with the share of the mean budget protected in every head.
    """

    by_head: ClassVar[bool] = True

    _: KW_ONLY
    recent: int | float = 0

    def newest(self, keep: int) -> int:
        return recent_tokens(self.name, self.recent, keep)

    def check(self) -> None:
        check_recent(self.name, self.recent)
        super().check()

    def pick(self, scores: Tensor, view: View) -> Tensor:
        return self.choose(scores, view, self.budget, recent=self.recent)

    def evict(self, view: View) -> Tensor | None:
        keep = self.room(view)
        if not self.full(view, keep) or self.whole(view):
            return None
        return self.choose(self.scores(view), view, keep, recent=self.protected(view))

    def protected(self, view: View) -> int:
        """The newest tokens that stay in a cache."""
        return self.newest(budget_tokens(self.name, self.budget, view.seen))
