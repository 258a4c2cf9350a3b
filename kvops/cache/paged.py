"""A paged KV cache for requests that join and leave: the reference for using kvops in a serving engine.

It is small and plain on purpose. An engine has its own pool, block tables and scheduler. What it can copy from here is
the order of operations, and the use of `Policy.held`, which tells a scheduler how many slots a request will hold
without knowing any scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..methods.base import Policy
from ..methods.queries import QueryPolicy
from ..methods.registry import as_policy
from ..ops.api import MAX_WINDOW, compact_kv_, window_attention
from ..ops.checks import check_bool, check_choice, check_int, inference_only
from ..ops.int8 import ROUNDED
from .base import check_rounding
from .by_slot import widened
from .memory import size, span, storage_bytes
from .rounded import STORED, channels, extra, is_packed, operands, packed, query, view_of
from .schedule import Schedule


class OutOfPages(RuntimeError):
    """A step needs more pages than are free. The cache is unchanged."""


@dataclass(frozen=True)
class Chain:
    """The slots of one block table, which serves all heads of all layers, or one head of one layer."""

    held: int = 0  # slots in use
    pages: list[int] = field(default_factory=list)  # in order


@dataclass(frozen=True)
class Request:
    """The state of one request in a PagedCache. A step replaces it when it ends, and never changes it."""

    prompt: int  # tokens of its prompt
    chains: list[Chain]  # one, or with by_head one per head, layer by layer
    kept: Tensor  # int32 [layers, Hk, m], positions of the slots that the last eviction kept; -1 last where fewer
    scores: Tensor  # fp32 [layers, Hk, slots with a score], for policies that add up the scores of all queries
    seen: int = 0  # tokens computed, which is the next token's position
    queries: dict[int, Tensor] = field(default_factory=dict)  # by layer: [Hq, tokens, d], its last tokens' queries


class PagedCache:
    """K and V of all layers in pages, for a batch of requests that join, grow, are evicted and leave.

    ```python
    cache = kvops.PagedCache(kvops.KeyDiff(1024), 4096, num_layers=32, kv_heads=8, head_dim=128)
    a, b = cache.join(prompt=300), cache.join(prompt=70)
    with cache.step([a, b], [300, 70]) as step:  # step.positions: [2, 300], to rotate q and k
        for layer in range(32):
            out = step.attend(layer, q, k, v)    # q: [2, Hq, 300, d], k, v: [2, Hk, 300, d], right-padded
    with cache.step([a, b]) as step: ...         # one token of each
    cache.leave(a)                               # frees its pages
    ```

    A step takes the new tokens of some requests through all layers. When it ends, it evicts from each request that
    holds more slots than `schedule.held` allows. The kept slots move to the front of the request's pages, in all layers
    with one call, and the pages after them are freed. If the step ends with an exception, the cache is unchanged, and
    the step can be repeated.

    All layers and heads hold equally many slots, so one block table serves them all. How many slots a request holds
    depends on how many tokens it has seen, never on scores. A prompt is evicted when it ends, as in a `Cache` that gets
    it in one step, and with `evict="blocks:N"` also after every N of its tokens. The other requests in a batch and the
    division of a prompt into steps do not change a request's results (but both change how the attention rounds).

    With `by_head`, each head of each layer has its own pages from one pool. Heads and layers may then hold different
    numbers of slots (head_mode="adaptive", PyramidKV), and all pages that they do not need are free. The attention
    treats each head as a request. Such a request is evicted once, when its prompt ends. How many slots its heads hold
    then depends on the scores, so the host waits for the device.

    Args:
        policy: The eviction policy, with a budget in tokens, or a string for `kvops.policy`: "keydiff:budget=1024".
            Policies whose `compress` takes no pages, and LAQ, are not supported.
        num_pages: Pages per layer; with `by_head`, pages of the shared pool.
        num_layers: Number of layers of the model.
        kv_heads: Number of KV heads per layer.
        head_dim: Channels of a key.
        v_head_dim: Channels of a value; None: head_dim.
        page_size: Slots per page.
        evict: When a prompt is evicted: "prompt", once, at its end, or "blocks:N", after every N of its tokens and at
            its end (KeyDiff's block-wise prompts). With blocks a long prompt never takes more than the budget and N
            slots.
        by_head: Whether heads may hold different numbers of slots. Needs a policy that scores each head on its own and
            keeps all tokens of decode.
        storage: "int8" rounds K and V to int8 with a scale for each token and head (`quantize_rows`): pages then have
            d + 16 bytes per row. "fp8" rounds them to torch.float8_e4m3fn, held as torch.uint8, in which numbers beyond
            448 are 448. All attention reads the rounded rows. Policies as for `Cache`.
        dtype: dtype of K and V; None: torch's default.
        device: Device of K and V; None: torch's default.

    Attributes:
        k: List of each layer's key pages, [num_pages, Hk, page_size, d]; with storage="int8" d + 16 bytes per row. With
            `by_head` all layers share the same pages, [num_pages, 1, page_size, d].
        v: The same for values, with v_head_dim channels.
        storage: As given.
        schedule: The policy and when it evicts; `schedule.held(n, prompt)` is the slots of a request after n tokens.
        free: Number of pages that no request holds. A step takes its pages when it ends.

    Raises:
        TypeError: `policy` is not a kvops policy or a string that names one, or a size is not an int.
        ValueError: A size is below 1, `evict` is invalid, or the policy is not supported.
    """

    def __init__(
        self,
        policy: Policy | str,
        num_pages: int,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        page_size: int = 16,
        evict: str = "prompt",
        by_head: bool = False,
        storage: Literal["int8", "fp8"] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        policy = as_policy("PagedCache", policy)
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_layers": num_layers, "kv_heads": kv_heads}
        dims = {"head_dim": head_dim, "v_head_dim": head_dim if v_head_dim is None else v_head_dim}
        for name, value in (sizes | dims).items():
            check_int("PagedCache", name, value, 1)
        check_bool("PagedCache", "by_head", by_head)
        policy.check_paged_cache(num_layers, by_head)
        self.schedule = Schedule.of("PagedCache", policy, evict)
        if by_head and evict != "prompt":
            raise ValueError(
                f"PagedCache: with by_head a request is evicted once, when its prompt ends, expected evict='prompt', "
                f"got {evict!r}"
            )
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"PagedCache: dtype must be a floating-point torch.dtype, got {self.dtype!r}")
        if storage is not None:
            check_choice("PagedCache", "storage", str(storage), tuple(STORED))
            check_rounding("PagedCache", storage, policy, None)
            if any(d % 16 for d in dims.values()) or self.dtype not in ROUNDED:
                raise ValueError(
                    f"PagedCache: storage={storage!r} rounds torch.float32, float16 or bfloat16 with head dims that "
                    f"are multiples of 16, got {self.dtype} and {[*dims.values()]}"
                )
        self.policy, self.page_size, self.num_layers, self.heads = policy, page_size, num_layers, kv_heads
        self.num_pages, self.by_head, self.storage = num_pages, by_head, storage
        self._rows = kv_heads if by_head else 1  # rows per request in a kernel call

        def pages(d: int) -> Tensor:
            shape = num_pages, 1 if by_head else kv_heads, page_size, d + extra(storage)
            kind = dtype if storage is None else STORED[storage]
            return torch.empty(1 if by_head else num_layers, *shape, dtype=kind, device=device)

        self._set_pages(*map(pages, dims.values()))
        self._free = list(range(num_pages - 1, -1, -1))
        self._requests: dict[int, Request] = {}
        self._joined = 0
        self._step: Step | None = None

    def _set_pages(self, k: Tensor, v: Tensor) -> None:
        """Take the pages of all layers, [1 or num_layers, num_pages, ...]."""
        self._pages = k, v
        self.k, self.v = (list(x.expand(self.num_layers, *x.shape[1:]).unbind()) for x in (k, v))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: without the layers' views of the pages, which pickle would give memory of their
        own."""
        return {name: x for name, x in vars(self).items() if name not in ("k", "v")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_pages(*self._pages)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "PagedCache: copy.copy would share the pages, but not which of them are free; use copy.deepcopy"
        )

    def __repr__(self) -> str:
        requests = self._requests.values()
        kept = [chain.held for x in requests for chain in x.chains]
        return (
            f"PagedCache({self.policy!r}, {self.free} of {self.num_pages} pages free, {len(self)} requests: "
            f"{span([x.seen for x in requests])} tokens seen, {span(kept)} kept, "
            f"{size(storage_bytes(*self.k, *self.v))} of pages)"
        )

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._requests)

    @property
    def free(self) -> int:
        """Number of pages that no request holds. A step takes its pages when it ends."""
        return len(self._free)

    def join(self, prompt: int) -> int:
        """Add a request with a prompt of `prompt` tokens, and return its number. It takes pages as tokens arrive."""
        check_int("PagedCache", "prompt", prompt, 1)
        nothing = torch.empty(self.num_layers, self.heads, 0, device=self.k[0].device)
        chains = [Chain()] * (self.num_layers * self.heads if self.by_head else 1)
        self._joined += 1
        self._requests[self._joined] = Request(prompt, chains, nothing.int(), nothing.float())
        return self._joined

    def leave(self, request: int) -> None:
        """Remove a request and free its pages."""
        found = self._request(request)
        if self._step is not None:
            raise RuntimeError("PagedCache: expected leave() outside of a step, got one during a step; end it first")
        for chain in found.chains:
            self._free += reversed(chain.pages)
        del self._requests[request]

    def seen(self, request: int) -> int:
        """Return how many tokens of a request have been computed, which is the next token's position."""
        return self._request(request).seen

    def held(self, request: int, layer: int = 0, head: int = 0) -> int:
        """Return how many slots a head of a layer holds. Without `by_head`, all hold equally many."""
        return self._chain(request, layer, head).held

    def positions(self, request: int, layer: int = 0, head: int = 0) -> Tensor:
        """Return the logical position of each slot, int32 [held]."""
        held, x = self._chain(request, layer, head).held, self._request(request)
        kept = x.kept[layer, head]
        kept = kept[kept >= 0]
        first = x.seen - held + len(kept)
        return torch.cat((kept, torch.arange(first, x.seen, dtype=torch.int32, device=kept.device)))

    def pages_for(self, requests: Sequence[int], tokens: int | Sequence[int] = 1) -> int:
        """Return how many of the `free` pages a step with these arguments would take."""
        planned = self._planned(requests, tokens)
        return sum(self._missing(chain, t) for x, t in planned.values() for chain in x.chains)

    def step(self, requests: Sequence[int], tokens: int | Sequence[int] = 1) -> Step:
        """Begin a step that takes new tokens of some requests through all layers.

        Args:
            requests: Numbers that `join` returned.
            tokens: How many new tokens each request has: one number for all, or one per request. A prompt may come in
                several steps, but no step may go beyond its end, or with `evict="blocks:N"` beyond a multiple of N.

        Returns:
            A context manager, see `Step`.

        Raises:
            OutOfPages: The step needs more pages than are free.
            ValueError: A request is unknown or given twice, or its tokens go beyond the end of its prompt.
            RuntimeError: Another step has not ended yet.
        """
        if self._step is not None:
            raise RuntimeError("PagedCache: expected the previous step to have ended, got one that is still open")
        planned = self._planned(requests, tokens)
        needed = sum(self._missing(chain, t) for x, t in planned.values() for chain in x.chains)
        if needed > self.free:
            raise OutOfPages(
                f"PagedCache: the step needs {needed} more pages, got {self.free} free of {self.num_pages}; let a "
                "request leave, or step fewer requests or tokens"
            )
        self._step = step = Step(self, planned)
        return step

    def _request(self, request: int) -> Request:
        if request not in self._requests:
            raise ValueError(f"PagedCache: expected a request that has joined and not left, got {request!r}")
        return self._requests[request]

    def _chain(self, request: int, layer: int, head: int) -> Chain:
        for name, value, most in (("layer", layer, self.num_layers), ("head", head, self.heads)):
            check_int("PagedCache", name, value, 0)
            if value >= most:
                raise ValueError(f"PagedCache: expected {name} < {most}, got {value}")
        return self._request(request).chains[layer * self.heads + head if self.by_head else 0]

    def _missing(self, chain: Chain, tokens: int) -> int:
        return _pages(chain.held + tokens, self.page_size) - len(chain.pages)

    def _planned(self, requests: Sequence[int], tokens: int | Sequence[int]) -> dict[int, tuple[Request, int]]:
        counts = [tokens] * len(requests) if isinstance(tokens, int) else list(tokens)
        if not requests or len(set(requests)) != len(requests):
            raise ValueError(f"PagedCache: expected at least one request, each once, got {list(requests)}")
        if len(counts) != len(requests):
            raise ValueError(
                f"PagedCache: expected one entry of tokens per request, {len(requests)}, got {len(counts)}"
            )
        for number, count in zip(requests, counts):
            check_int("PagedCache", "tokens", count, 1)
            request = self._request(number)
            most = self.schedule.cut(request.seen, count, request.prompt)
            if request.seen < request.prompt and most < count:
                where = (
                    "the prompt's end" if most == request.prompt - request.seen else "the end of a block of the prompt"
                )
                raise ValueError(
                    f"PagedCache: a step must not go beyond {where}, where the request is evicted, expected at most "
                    f"{most} tokens of request {number}, got {count}; use one step per part"
                )
        return {number: (self._request(number), count) for number, count in zip(requests, counts)}


class Eviction(NamedTuple):
    """Requests of a step that are evicted by the same policy."""

    policy: Policy
    requests: list[int]  # indices into the step's requests
    tokens: Tensor  # int64 [requests], the tokens that each request has seen after the step
    pages: int  # the most pages of any request's head
    known: Tensor  # int32 [layers, requests, Hk, m], `Request.kept`; one entry more than any request has
    length: Tensor  # int64 [requests, 1, 1], how many of these entries each request has
    offset: Tensor  # int64 [requests, 1, 1], the position of each later slot minus the slot
    kept: dict[int, Tensor]  # by layer: int64 [requests, Hk, m], the kept slots

    def positions(self, layer: int, slots: Tensor) -> Tensor:
        """Return the positions of some slots of a layer, both int64 [requests, Hk, m]; -1 for slot -1."""
        known = self.known[layer].gather(2, slots.clamp(0, self.known.shape[3] - 1))
        return torch.where(slots < self.length, torch.where(slots < 0, -1, known.long()), slots + self.offset)


class Plan(NamedTuple):
    """The end of a step: all that is left to do is to move the rows and to replace the requests and the free pages."""

    moves: tuple[Any, ...] | None  # arguments of `compact_kv_`
    requests: dict[int, Request]
    free: list[int]


class Rows:
    """The rows of a layer's kernel calls: one per request, or with by_head one per request and head.

    Attributes:
        table: int32 [rows, max_pages], -1 after a row's own pages.
        lengths: int32 [rows], slots in use with the new tokens.
        visible: int32 [rows, t], how many slots each new token sees; 0 for padding.
        row: int64 [new tokens], the row that each new token comes from.
        column: int64 [new tokens], its column.
        page: int64 [new tokens], the page that it is written to.
        slot: int64 [new tokens], the slot within that page.
    """

    def __init__(self, held: list[int], tokens: list[int], pages: list[list[int]], size: int, device: torch.device):
        width = max(map(len, pages))
        with torch.device("cpu"):  # the host knows these, so nothing waits for a GPU
            table = torch.tensor([x + [-1] * (width - len(x)) for x in pages], dtype=torch.int32)
            before, counts = (torch.tensor(x, dtype=torch.int32) for x in (held, tokens))
            columns = torch.arange(max(tokens), dtype=torch.int32)
            new = columns < counts[:, None]
            slots = before[:, None] + columns
            row, column = new.nonzero().unbind(1)
            slot = slots[row, column].long()
            page = table[row, slot // size].long()
        self.table, self.lengths = table.to(device), (before + counts).to(device)
        self.visible = torch.where(new, slots + 1, 0).to(device)
        self.row, self.column, self.page, self.slot = (x.to(device) for x in (row, column, page, slot % size))


class Step:
    """A step of some requests through all layers. `PagedCache.step` returns it.

    Attributes:
        positions: int64 [b, t], the logical positions of the new tokens. In the padding after a request's own tokens
            they count on.
    """

    def __init__(self, cache: PagedCache, planned: dict[int, tuple[Request, int]]):
        self._cache = cache
        self._numbers = list(planned)
        self._requests = [x for x, _ in planned.values()]
        self._tokens = [t for _, t in planned.values()]
        device = cache.k[0].device
        seen = torch.tensor([x.seen for x in self._requests], device=device)
        self.positions = seen[:, None] + torch.arange(max(self._tokens), device=device)
        free = cache._free.copy()
        self._pages = [
            [chain.pages + [free.pop() for _ in range(cache._missing(chain, t))] for chain in x.chains]
            for x, t in planned.values()
        ]
        self._free = free  # without the step's pages
        count = cache._rows
        tokens = [t for t in self._tokens for _ in range(count)]
        self._of_layer: list[Rows] = []
        for first in range(0, len(self._requests[0].chains), count):
            own = slice(first, first + count)
            held = [chain.held for x in self._requests for chain in x.chains[own]]
            pages = [chain for x in self._pages for chain in x[own]]
            self._of_layer.append(Rows(held, tokens, pages, cache.page_size, device))
        self._evictions = list(self._due())
        #: fp32 [layers, requests, Hk, n], the scores of the slots held before the step.
        self._known = torch.stack(widened([x.scores for x in self._requests], 0.0), 1)
        self._scores: dict[int, Tensor] = {}  # by layer: fp32 [requests, Hk, n], the step's queries included
        self._queries: dict[int, list[Tensor]] = {}
        self._attended: set[int] = set()

    def rows(self, layer: int) -> Rows:
        """Return where a layer's tokens lie."""
        return self._of_layer[layer if self._cache.by_head else 0]

    def _due(self) -> Iterator[Eviction]:
        """Yield the requests that exceed `schedule.held` after this step, grouped by the policy that evicts them."""
        cache, by_rule, device = self._cache, dict[Policy, list[int]](), self.positions.device
        for row, (x, t) in enumerate(zip(self._requests, self._tokens)):
            n = x.seen + t
            # With by_head, only a prompt is evicted, when it ends. Until then all heads hold all of it.
            held = x.chains[0].held + t if not cache.by_head or n == x.prompt else 0
            if cache.schedule.held(n, x.prompt) < held:
                by_rule.setdefault(cache.schedule.rule(x.seen, n, x.prompt), []).append(row)
        for rule, rows in by_rule.items():
            requests = [self._requests[row] for row in rows]
            numbers = [
                (x.seen + self._tokens[row], x.kept.shape[2], x.seen - x.chains[0].held)
                for row, x in zip(rows, requests)
            ]
            tokens, length, offset = (torch.tensor(x, device=device) for x in zip(*numbers))
            known = pad(torch.stack(widened([x.kept for x in requests], -1), 1), (0, 1))
            pages = max(len(chain) for row in rows for chain in self._pages[row])
            yield Eviction(rule, rows, tokens, pages, known, length[:, None, None], offset[:, None, None], {})

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store a layer's new tokens and compute their causal attention over all slots of their requests.

        Args:
            layer: The layer's index. A step takes each layer once, in any order.
            q: [b, Hq, t, d], where t is the largest number of new tokens of any request. Requests with fewer are
                right-padded.
            k: [b, Hk, t, d].
            v: [b, Hk, t, dv].
            scale: As in `kvops.attention`.
            softcap: As in `kvops.attention`.
            sink_logits: As in `kvops.attention`; not supported with `by_head`.

        Returns:
            [b, Hq, t, dv], zeros in the padding after a request's own tokens.

        Raises:
            ValueError: The layer is out of range or was attended before in this step, or q, k and v have other shapes,
                dtypes or devices than the cache.
            NotImplementedError: `sink_logits` with `by_head`.
            RuntimeError: The step has ended.
        """
        cache, policy = self._cache, self._cache.policy
        self._check(layer, q, k, v)
        logits: dict[str, Any] = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
        if cache.by_head and sink_logits is not None:
            raise NotImplementedError(
                "PagedCache: by_head does not support sink_logits, which differ by head; expected sink_logits=None"
            )
        rows, (k_pages, v_pages) = self.rows(layer), (cache.k[layer], cache.v[layer])
        q_rows, k_rows, v_rows = (x.reshape(len(rows.table), -1, *x.shape[2:]) for x in (q, k, v))
        for pages, x in ((k_pages, k_rows), (v_pages, v_rows)):
            new = x[rows.row, :, rows.column]
            pages[rows.page, :, rows.slot] = new if cache.storage is None else packed(new, cache.storage)
        adds_up = bool(policy.needs.per_slot)
        observe: dict[str, Any] = {"scores": adds_up}
        if adds_up and isinstance(policy, QueryPolicy):
            observe["group_reduce"] = policy.operator_reduce
        out, scores = [], None
        for first in range(0, q.shape[2], MAX_WINDOW):
            block = slice(first, first + MAX_WINDOW)
            visible = rows.visible[:, block].contiguous()
            of_block, keys = query(q_rows[:, :, block], k_pages), operands(k_pages, v_pages)
            part, _, observed = window_attention(
                of_block, **keys, visible=visible, block_table=rows.table, **observe, **logits
            )
            out.append(part.to(q.dtype))
            if adds_up:
                scores = observed if scores is None else scores.add_(observed)
        if scores is not None:
            scores = scores.view(len(self._requests), cache.heads, -1)
            scores[..., : self._known.shape[3]] += self._known[layer]
            self._scores[layer] = scores
        if isinstance(policy, QueryPolicy) and not adds_up:
            self._queries[layer] = [
                torch.cat((x.queries[layer], own[:, :t]), 1) if layer in x.queries else own[:, :t]
                for x, own, t in zip(self._requests, q, self._tokens)
            ]
        for eviction in self._evictions:
            eviction.kept[layer] = self._select(eviction, layer, logits)
        result = torch.cat(out, 2).view(*q.shape[:3], -1)
        self._attended.add(layer)
        return result

    def _select(self, eviction: Eviction, layer: int, logits: dict[str, Any]) -> Tensor:
        """Select the slots of a layer to keep: int64 [requests, Hk, m]."""
        cache, policy, requests = self._cache, eviction.policy, eviction.requests
        rows, own = self.rows(layer), self._rows_of(requests)
        table, lengths = rows.table[own, : eviction.pages], rows.lengths[own]
        k, v, pages = cache.k[layer], cache.v[layer], dict[str, Any](block_table=table)
        if cache.by_head:  # one table serves one head, so rules, which read all heads of a layer, read a copy
            k, v = (x[table.clamp(min=0)].view(len(requests), cache.heads, -1, x.shape[3]) for x in (k, v))
            lengths, pages = lengths[:: cache.heads].contiguous(), {}
        elif is_packed(k):  # rules read numbers, of these requests alone
            k, v = (x[table.clamp(min=0)].transpose(1, 2).flatten(2, 3) for x in (k, v))
            pages = {}
        pages |= dict(lengths=lengths, layer=layer, num_layers=cache.num_layers, tokens=eviction.tokens)
        view = view_of(k, v, cache.dtype, **pages)
        slots = torch.arange(view.n, device=k.device).expand(len(requests), cache.heads, -1)
        view.kept = eviction.positions(layer, slots)
        if layer in self._scores:
            view.observed = self._scores[layer][requests, :, : view.n]
        elif isinstance(policy, QueryPolicy):
            x, t = self._requests[requests[0]], self._tokens[requests[0]]
            w = policy.rows_at(x.seen + t, x.prompt)
            policy.observe(view, torch.stack([self._queries[layer][row][:, -w:] for row in requests]), None, logits)
        return policy.select(view)

    def _rows_of(self, requests: list[int]) -> list[int]:
        count = self._cache._rows
        return [row for x in requests for row in range(count * x, count * (x + 1))]

    def _check(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        cache = self._cache
        if cache._step is not self:
            raise RuntimeError("PagedCache: expected attend() within its step, got one after the step has ended")
        check_int("PagedCache", "layer", layer, 0)
        if layer >= cache.num_layers or layer in self._attended:
            raise ValueError(f"PagedCache: expected layer < {cache.num_layers}, each once per step, got {layer}")
        inference_only("PagedCache", q=q, k=k, v=v)
        (b, t), heads = self.positions.shape, cache.heads
        for name, x, pages in (("k", k, cache.k[layer]), ("v", v, cache.v[layer])):
            want = [b, heads, t, channels(pages)]
            if list(x.shape) != want or x.dtype != cache.dtype or x.device != pages.device:
                raise ValueError(
                    f"PagedCache: {name} must be {want} {cache.dtype} {pages.device}, got {list(x.shape)} "
                    f"{x.dtype} {x.device}"
                )
        if q.dim() != 4 or q.shape[0] != b or q.shape[1] % heads or q.shape[2] != t or q.shape[3] != k.shape[3]:
            raise ValueError(
                f"PagedCache: q must be [{b}, a multiple of {heads}, {t}, {k.shape[3]}], got {list(q.shape)}"
            )

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        cache = self._cache
        if cache._step is not self:
            raise RuntimeError("PagedCache: expected a step that is open, got one that has ended")
        cache._step = None
        if kind is not None:
            return
        if missing := sorted({*range(cache.num_layers)} - self._attended):
            raise RuntimeError(f"PagedCache: expected attend() in every layer of a step, got none in {missing}")
        plan = self._plan()  # until here the step has written to slots after those in use alone
        if plan.moves is not None:
            k, v, indices, table = plan.moves
            compact_kv_(k, v, indices, block_table=table)  # checks all its arguments before it moves anything
        cache._requests, cache._free = plan.requests, plan.free

    def _plan(self) -> Plan:
        """Compute all that the end of the step needs. Nothing changes yet."""
        cache, layers = self._cache, range(self._cache.num_layers)
        held = [[chain.held + t for chain in x.chains] for x, t in zip(self._requests, self._tokens)]
        kept = [x.kept for x in self._requests]
        scores, slots_of = self._sums(held), list[Tensor]()
        for eviction in self._evictions:
            slots = torch.stack(widened([eviction.kept[layer] for layer in layers], -1))
            positions = torch.stack([eviction.positions(layer, slots[layer]) for layer in layers], 1).int()
            counts = (slots >= 0).sum(-1).transpose(0, 1).flatten(1).tolist() if cache.by_head else []
            for i, row in enumerate(eviction.requests):
                x, n = self._requests[row], self._requests[row].seen + self._tokens[row]
                held[row] = counts[i] if cache.by_head else [cache.schedule.held(n, x.prompt)]
                kept[row] = positions[i, ..., : max(held[row])].clone()
                if scores[row].shape[2]:
                    scores[row] = scores[row].gather(2, slots[:, i, :, : held[row][0]])
            slots_of.append(slots)
        requests, free = cache._requests.copy(), self._free.copy()
        for row, (number, x) in enumerate(zip(self._numbers, self._requests)):
            used = [_pages(count, cache.page_size) for count in held[row]]
            chains = [Chain(*own) for own in zip(held[row], (x[:m] for x, m in zip(self._pages[row], used)))]
            free += [page for pages, m in zip(self._pages[row], used) for page in reversed(pages[m:])]
            seen = x.seen + self._tokens[row]
            requests[number] = Request(x.prompt, chains, kept[row], scores[row], seen, self._last_queries(row))
        return Plan(self._moves(slots_of), requests, free)

    def _sums(self, held: list[list[int]]) -> list[Tensor]:
        """Return `Request.scores` of each request as of the step's last query, before the eviction."""
        cache, layers = self._cache, range(self._cache.num_layers)
        none = self._known.new_empty(cache.num_layers, cache.heads, 0)
        if not self._scores:
            return [none] * len(held)
        # With by_head, nothing is evicted once the prompt has ended, and the heads then differ in length.
        over = [cache.by_head and x.seen + t >= x.prompt for x, t in zip(self._requests, self._tokens)]
        width = max((own[0] for own, x in zip(held, over) if not x), default=0)
        sums = torch.stack([self._scores[layer][..., :width] for layer in layers], 1)
        return [none if x else own[..., :n].clone() for own, (n, *_), x in zip(sums, held, over)]

    def _last_queries(self, row: int) -> dict[int, Tensor]:
        """Return `Request.queries` after the step."""
        x, policy = self._requests[row], self._cache.policy
        if not isinstance(policy, QueryPolicy):
            return {}
        # The next eviction is at the prompt's end or in decode. Its step computes at least one query itself.
        last = max(policy.rows_at(n, x.prompt) for n in (x.seen + self._tokens[row] + 1, x.prompt + 1)) - 1
        return {layer: q[row][:, -last:].clone() for layer, q in self._queries.items() if last > 0}

    def _moves(self, slots_of: list[Tensor]) -> tuple[Any, ...] | None:
        """Return the arguments of one `compact_kv_` for all evictions; None without evictions.

        slots_of: for each eviction, the kept slots, int64 [layers, requests, Hk, m].
        """
        cache, layers = self._cache, range(self._cache.num_layers)
        if not slots_of:
            return None
        own = self._rows_of([row for eviction in self._evictions for row in eviction.requests])
        slots = torch.cat(widened(slots_of, -1), 1)
        if not cache.by_head:
            return cache.k, cache.v, list(slots.unbind()), self.rows(0).table[own]
        # All layers are rows of one call, because they share the pool.
        table = torch.cat(widened([self.rows(layer).table[own] for layer in layers], -1))
        return cache.k[0], cache.v[0], slots.view(len(table), 1, -1), table


def _pages(slots: int, size: int) -> int:
    return -(-slots // size)
