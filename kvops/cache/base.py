"""The KV cache of one layer. It holds state only; its policy decides what to evict."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..methods.attention_matching import KEY_BIAS
from ..methods.base import IN_PLACE, BudgetPolicy, Out, Policy
from ..methods.budgets import budget_tokens
from ..methods.queries import QueryPolicy
from ..methods.registry import as_policy
from ..methods.view import LayerInputs, View
from ..ops.checks import check_choice, check_hidden, check_int, check_vector, inference_only
from ..ops.flash_attention import attention
from ..ops.int8 import ROUNDED
from ..ops.rope import Rope
from .memory import Memory, size, span, storage_bytes
from .ragged import Ragged
from .rounded import STORED, RoundedView, channels, is_packed, numbers, operands, packed, query, view_of

Storage = Literal["pre_rope", "post_rope", "int8", "fp8"]
STORAGES: tuple[Storage, ...] = get_args(Storage)


class Eviction(NamedTuple):
    """A selection whose kept slots have not been moved to the front yet."""

    indices: Tensor  # int64 [b, Hk, m], the kept slots
    view: View  # as the policy saw it
    pads: Tensor | None  # int32 [b]: padding slots left in each row


class Cache:
    """The compressed KV cache of one layer, for prefill chunks and decode steps under any policy.

    ```python
    cache = kvops.Cache(kvops.SnapKV(1024))
    out = cache.attend(q, k, v)  # q: [b, Hq, t, d], k, v: [b, Hk, t, d] -> [b, Hq, t, d]
    ```

    `attend` stores the new tokens, computes their causal attention over the cached tokens and each other, and then
    evicts by the policy.

    With an attention of your own, call `append` instead. It returns the K and V that this step's attention reads,
    [b, Hk, len + t, d]. Most policies have evicted by then. Policies that use queries evict in `attention`, which must
    follow `append`. So must it in a cache with a `rope`.

    Decode copies nothing. The memory has spare slots, `append` returns views of it, and the slots that an eviction
    keeps move to the front at the next `append`. So use what `append` returned before the next call that changes the
    cache. Reading `k` or `v` in between is safe, because it moves the kept slots to fresh memory.

    Logical positions are independent of the stored slots: the next token has position `seen`, not `len`.

    With head_mode="adaptive" the heads of a cache differ in length from its first eviction on. Each head then has pages
    of its own (`lengths`), `append` returns the new tokens alone, and `attention` must follow it. Budget and buffer
    count the mean over the heads. While a row of the batch is all padding, nothing is evicted.

    Args:
        policy: The eviction policy and its settings, such as `kvops.KeyDiff(1024)`, or a string for `kvops.policy`:
            "keydiff:budget=1024".
        layer: Index of this layer among the layers that evict.
        num_layers: Number of layers that evict.
        rope: The model's rotary embedding, for policies with `positions="slots"`. `attention` then rotates all keys at
            their slots and the queries at theirs, attends, stores and evicts. New tokens take the slots after the
            stored ones. Without a rope, keys are cached as they come. Policies with `statistics="prompt"` require it:
            `attention` undoes the rotation of the queries at their positions, and evicts by their statistics.
        storage: How keys are stored with a rope. "pre_rope" stores them unrotated and rotates them at every read.
            "post_rope" stores them rotated at their slots and rotates them again when they move, which rounds them each
            time.
            Without a rope, "int8" rounds K, as it comes, and V to int8 with a scale for each token and head
            (`quantize_rows`), d + 16 bytes per row instead of 2 d, and "fp8" to torch.float8_e4m3fn without scales, d
            bytes, in which numbers beyond 448 are 448. The first step attends to its tokens, and is decided on, before
            they are rounded; a later one reads also its own tokens rounded. `append` then returns rows that only
            `attention` can read. A policy that scores keys or values themselves gets a copy of the layer in the dtype
            of the tokens. Policies must keep K and V as they are: merge=False, and not LaCache or Attention Matching.
        attend_before_compress: If False, a step's attention reads only the kept tokens. For policies that use K and V
            alone.

    Attributes:
        k: [b, Hk, len, d], the stored keys; None while the cache is empty. Of heads that differ in length it is a copy,
            which is 0 after a head's slots.
        v: [b, Hk, len, dv], the stored values, in the same way.
        lengths: int64 [b, Hk], the slots that each head holds; None while the cache is empty.
        pads: int32 [b], how many of a row's first stored slots are padding; None without padding.
        seen: Logical tokens seen, padding included.
        frozen: Whether eviction is switched off (`freeze`).
        state: What the policy remembers about the layer.

    Raises:
        TypeError: `policy` is not a kvops policy or a string that names one, or `rope` is not a `kvops.Rope`.
        ValueError: The arguments do not fit each other or the policy.
    """

    #: Attributes, besides `state`, that hold tensors whose first dim is the batch.
    _tensors: ClassVar[tuple[str, ...]] = ("pads", "queries", "_padding", "_kept")
    #: The subclass for each kind of policy: what it observes with, its stage, or with a rope "slots" or "statistics".
    _kinds: ClassVar[dict[str, type[Cache]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            Cache._kinds[kind] = cls

    def __new__(cls, policy: Policy | str | None = None, *, rope: Rope | None = None, **options: Any) -> Cache:
        if cls is not Cache or policy is None:  # None: `copy` and `pickle`
            return object.__new__(cls)
        policy = as_policy("Cache", policy)
        queries = "queries" if isinstance(policy, QueryPolicy) else None
        with_rope = "statistics" if policy.needs.statistics else "slots"
        kind = policy.needs.stage or queries or (with_rope if isinstance(rope, Rope) else "")
        return object.__new__(Cache._kinds[kind] if kind else cls)

    def __init__(
        self,
        policy: Policy | str,
        *,
        layer: int = 0,
        num_layers: int = 1,
        rope: Rope | None = None,
        storage: Storage = "pre_rope",
        attend_before_compress: bool = True,
    ):
        policy = as_policy("Cache", policy)
        check_int("Cache", "layer", layer, 0)
        check_int("Cache", "num_layers", num_layers, 1)
        if layer >= num_layers:
            raise ValueError(f"Cache: expected layer < num_layers ({num_layers}), got {layer}")
        check_choice("Cache", "storage", storage, STORAGES)
        if not (rope is None or isinstance(rope, Rope)):
            raise TypeError(f"Cache: rope must be a kvops.Rope, got {type(rope).__name__}")
        statistics = policy.needs.statistics
        slots = policy.positions == "slots" and not isinstance(policy, QueryPolicy)
        if rope is not None and not ((slots or statistics) and attend_before_compress):
            raise ValueError(
                "Cache: rope= needs a policy with positions='slots' or statistics='prompt', and "
                f"attend_before_compress=True, got {policy!r}"
            )
        if rope is None and statistics:
            raise ValueError(
                f"Cache: {policy!r} takes statistics of the prompt's queries before RoPE, expected rope= as a "
                "kvops.Rope, got None"
            )
        if isinstance(policy, QueryPolicy) and not attend_before_compress:
            raise ValueError(
                f"Cache: {policy.name} evicts by a step's queries, which needs attend_before_compress=True, got False"
            )
        if policy.ragged and not attend_before_compress:
            raise ValueError(
                f"Cache: head_mode='adaptive' needs attend_before_compress=True, because the kept slots of heads that "
                f"differ in length are no rectangle, got False with {policy!r}"
            )
        if storage in STORED:
            check_rounding("Cache", storage, policy, rope)
            if not attend_before_compress:
                raise ValueError(f"Cache: storage={storage!r} needs attend_before_compress=True, got False")
        policy.check_cache(layer, num_layers)
        self.policy, self.layer, self.num_layers = policy, layer, num_layers
        self.rope, self.storage, self.attend_before_compress = rope, storage, attend_before_compress
        self.drafts = False  # whether to remember the queries of its steps
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and the padding."""
        self.pads: Tensor | None = None
        self.seen = 0
        self.frozen = False
        self.state: dict[str, Any] = {}
        self._memory: Memory | None = None
        self._dtype: torch.dtype | None = None  # of the tokens, if they are rounded
        self._ragged: Ragged | None = None  # in place of the memory, once heads differ in length
        self._reading: Ragged | None = None  # what the attention of the last step reads, in place of K and V
        self._unread = self._released = False  # whether it has yet to do so, and whether it has been freed
        self._length = 0  # slots in use
        self._eviction: Eviction | None = None  # set while the kept slots have yet to move
        #: The queries of a draft's steps, [b, Hq, steps, d].
        self.queries: Tensor | None = None
        self._padding: Tensor | None = None  # int32 [b]: padding columns of the whole sequence
        self._most_padding = 0  # the largest of these
        # int64 [b, Hk, <= len]: positions of the slots kept by the last eviction; later slots count on from there
        self._kept: Tensor | None = None
        self._evicted_at = 0  # tokens seen at the last eviction
        self._prompt = 0  # tokens of the prompt so far
        self._protecting: Policy | None = None  # the policy with the prompt's length, if it protects the prompt
        self._read_since = 0  # tokens stored between the eviction before the last step and the end of that step
        self._inputs: LayerInputs | None = None  # of the last step, until its attention is done
        self._step_pads: Tensor | None = None  # int32 [b]: padding slots in what the last append returned

    @property
    def name(self) -> str:
        """The name that error messages use: the policy's."""
        return self.policy.name

    def __repr__(self) -> str:
        kept = f"{len(self)}" if self._ragged is None else span(self._ragged.host_lengths(self._since))
        return (
            f"Cache({self.policy!r}, layer={self.layer}, num_layers={self.num_layers}: {self.seen} tokens seen, "
            f"{kept} kept, {size(self.nbytes)})"
        )

    def __len__(self) -> int:
        """Number of stored slots per head; of the longest head if they differ."""
        return self._length

    @property
    def _any_memory(self) -> Memory | Ragged | None:
        """Where the tokens are; None while the cache is empty."""
        return self._ragged or self._memory

    @property
    def rows(self) -> int:
        """The number of rows of the batch; 0 while the cache is empty."""
        return 0 if self._any_memory is None else self._any_memory.shape[0]

    @property
    def ragged(self) -> bool:
        """Whether the heads may differ in length, which they do from the first eviction on."""
        return self._ragged is not None

    @property
    def mean_length(self) -> int:
        """The largest mean of a row of `lengths`, rounded down."""
        return self._length if self._ragged is None else self._ragged.mean + self._since

    @property
    def lengths(self) -> Tensor | None:
        """The slots that each head holds, padding included: int64 [b, Hk]; None while empty."""
        if self._ragged is not None:
            return self._ragged.counts + self._since
        memory = self._memory
        return None if memory is None else torch.full(memory.shape, self._length, device=memory.k.device)

    @property
    def k(self) -> Tensor | None:
        """The stored keys, [b, Hk, len, d]; None while empty."""
        return None if self._any_memory is None else self._numbers(self._k_and_v()[0])

    @property
    def v(self) -> Tensor | None:
        """The stored values, [b, Hk, len, dv]; None while empty."""
        return None if self._any_memory is None else self._numbers(self._k_and_v()[1])

    def _numbers(self, x: Tensor) -> Tensor:
        return x if self._dtype is None else numbers(x, self._dtype)

    def _held(self, x: Tensor) -> Tensor:
        """Return rows as this cache stores them."""
        return x if self._dtype is None else packed(x, self.storage)

    @property
    def storage_tensors(self) -> tuple[Tensor, ...]:
        """The tensors in which the keys and values lie."""
        memories = [x for x in (self._any_memory, self._reading) if x is not None]
        return tuple(x for memory in memories for x in (memory.k, memory.v))

    def settled_tensors(self) -> tuple[Tensor, ...]:
        """Return `storage_tensors` once the slots that the last eviction kept have moved."""
        self._settle(in_place=False)
        return self.storage_tensors

    @property
    def nbytes(self) -> int:
        """Bytes of memory allocated for K and V, spare slots included."""
        return self.nbytes_with()

    def nbytes_with(self, *step: Tensor) -> int:
        """Return `nbytes` while the tensors that `append` returned are alive; they may lie in other memory."""
        return storage_bytes(*self.storage_tensors, *step)

    @property
    def positions(self) -> Tensor | None:
        """The logical position of each stored slot, int64 [b, Hk, len], as columns of the padded batch.

        -1 after the slots of a head that holds fewer than others.
        """
        if self._ragged is not None:
            return self._positions(self._ragged, self._ragged.columns(self._since))
        if self._memory is None:
            return None
        return self._stored().positions() if self._eviction is None else self._kept

    @property
    def padding(self) -> Tensor | None:
        """How many columns of padding each row of the sequence begins with, int32 [b]; None without padding."""
        return self._padding

    @property
    def _rule(self) -> Policy:
        """The policy by which the steps evict."""
        return self._protecting or self.policy

    @property
    def _remembers(self) -> bool:
        """Whether the policy remembers what a step shows. A frozen cache may get no inputs."""
        policy = self.policy
        return type(policy).remember is not Policy.remember and not (self.frozen and policy.needs.inputs)

    def _set_prompt(self, tokens: int) -> None:
        self._prompt = tokens
        if self.policy.protect is not None:
            self._protecting = self.policy.protecting(tokens)

    def freeze(self) -> None:
        """Stop evicting until `reset`: the compressed prompt stays as it is, and all later tokens are kept."""
        self.frozen = True

    def keep(self, slots: Tensor) -> None:
        """Evict all stored slots except `slots`.

        Args:
            slots: int64 [m] or [b, Hk, m], ascending slot indices.

        Raises:
            RuntimeError: The cache is empty.
            TypeError: `slots` is not a tensor.
            ValueError: `slots` has another shape, dtype or device, or on the CPU values that are out of range or do not
                ascend. Or the policy protects the prompt, the heads already differ in length, or the policy has not
                remembered all tokens, because the cache was frozen.
        """
        if self._ragged is not None:
            raise ValueError(f"{self.name}: keep() expected heads that hold the same slots, got {self!r}")
        if self.policy.protect is not None:
            raise ValueError(f"{self.name}: keep() expected a policy with protect=None, got {self.policy!r}")
        for name in self.policy.needs.per_slot:
            if (known := self.state[name].shape[2] if name in self.state else 0) != len(self):
                raise ValueError(
                    f"{self.name}: keep() expected {name!r} of all {len(self)} tokens, got those of {known}; a frozen "
                    "cache does not remember them"
                )
        k = self._not_empty().k
        if not isinstance(slots, Tensor):
            raise TypeError(f"{self.name}: keep() expected slots as a torch.Tensor, got {type(slots).__name__}")
        fits = slots.dim() in (1, 3) and all(x in (1, y) for x, y in zip(slots.shape[:-1], k.shape))
        if not fits or slots.dtype != torch.int64 or slots.device != k.device:
            raise ValueError(
                f"{self.name}: keep() expected slots as torch.int64 [m] or [{k.shape[0]}, {k.shape[1]}, m] on "
                f"{k.device}, got {slots.dtype} {list(slots.shape)} on {slots.device}"
            )
        check_kept(f"{self.name}: slots", slots, len(self), self.policy.ragged, self.pads is not None)
        with self.undone_on_error():
            view = self._stored()
            self._keep(slots.expand(view.rows, view.heads, -1), view)

    def set_pads(self, pads: Tensor) -> None:
        """Declare the left padding of the batch. Call it before the first `append`.

        Args:
            pads: int32 or int64 [b]. Row b of the sequence begins with pads[b] columns of padding.

        Raises:
            TypeError: `pads` is not a tensor.
            ValueError: `pads` has another shape or dtype or a negative entry, or the cache already holds tokens.
        """
        if self._any_memory is not None:
            raise ValueError(
                f"{self.name}: set_pads must be called before the first append, got a cache with {self.seen} tokens; "
                "call reset() first, or use a new cache"
            )
        if not isinstance(pads, Tensor):
            raise TypeError(f"{self.name}: pads must be a torch.Tensor, got {type(pads).__name__}")
        if pads.dim() != 1 or pads.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self.name}: pads must be int32 [b], got {pads.dtype} {list(pads.shape)}")
        if (pads < 0).any():
            raise ValueError(f"{self.name}: pads must be at least 0, got {pads.min()}")
        if not self.policy.fixed_budget and not pads.any():
            return
        self._padding, self._most_padding = pads.to(torch.int32), max(pads.tolist(), default=0)
        self.pads = torch.zeros_like(self._padding)

    def append(self, k: Tensor, v: Tensor, *, inputs: LayerInputs | None = None) -> tuple[Tensor, Tensor]:
        """Store t new tokens and return the K and V that this step's attention reads. Then evict.

        A failed call leaves the cache unchanged.

        Args:
            k: [b, Hk, t, d], the new keys.
            v: [b, Hk, t, dv], the new values.
            inputs: What the layer was called with, for policies with `needs.inputs`. The cache holds on to it until
                `release` or the next `append`.

        Returns:
            K [b, Hk, len + t, d] and V [b, Hk, len + t, dv], the stored slots and the new ones. With
            `attend_before_compress=False`, only the kept slots. The tensors are valid until the next call that changes
            the cache. Once heads differ in length, k and v alone.

        Raises:
            ValueError: k and v do not fit each other or the stored tensors in shape, dtype or device, or need a
                gradient.
            RuntimeError: The previous `append` still needs its `attention`.
        """
        self._check(k, v)
        check_inputs(self.name, inputs, k)
        with self.undone_on_error():
            self._inputs = inputs if self.policy.needs.inputs else None
            return self._append(k, v)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
        inputs: LayerInputs | None = None,
    ) -> Tensor:
        """Store t new tokens, compute their causal attention, and evict: `append` and `attention` in one call.

        A failed call leaves the cache unchanged.

        ```text
        logits = scale * q.k                          scale = 1 / sqrt(d) by default
        logits = softcap * tanh(logits / softcap)     if softcap is not 0
        ```

        Args:
            q: [b, Hq, t, d], the new queries.
            k: [b, Hk, t, d], the new keys.
            v: [b, Hk, t, dv], the new values.
            scale: Factor of q.k; None: 1 / sqrt(d).
            softcap: Limit of the logits; 0 disables it.
            sink_logits: fp32 [Hq], one more logit for each head's softmax (attention sinks); None: no sinks.
            inputs: What the layer was called with, for policies with `needs.inputs`.

        Returns:
            [b, Hq, t, dv]. Rows that are padding are 0.

        Raises:
            ValueError: q, k and v do not fit each other or the stored tensors, or need a gradient.
        """
        self._check(k, v)
        check_tokens(self.name, k)
        check_inputs(self.name, inputs, k)
        with self.undone_on_error():
            self._inputs = inputs if self.policy.needs.inputs else None
            k_step, v_step = self._append(k, v)
            self._check_step(q, k, k.shape[2])
            out = self.attention(q, k_step, v_step, scale=scale, softcap=softcap, sink_logits=sink_logits)
            self.release()
            return out

    def attention(
        self,
        q: Tensor,
        k_step: Tensor,
        v_step: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the tokens just appended: the second half of `attend`.

        If heads differ in length, and the step has evicted, the slots from before stay in memory until `release` or the
        next `append`.

        Args:
            q: [b, Hq, t, d], the queries of the appended tokens.
            k_step: As `append` returned it.
            v_step: As `append` returned it.
            scale: As in `attend`.
            softcap: As in `attend`.
            sink_logits: As in `attend`.

        Returns:
            [b, Hq, t, dv].

        Raises:
            ValueError: q does not fit the appended tokens.
            RuntimeError: There was no `append`, or its attention has been computed already, or `release` came first.
            NotImplementedError: Several tokens at once with `attend_before_compress=False`.
        """
        if q.shape[2] > 1 and not self.attend_before_compress and k_step.shape[2] != self.seen:
            raise NotImplementedError(
                f"{self.name}: with attend_before_compress=False, attention over a compressed cache expects one token "
                f"at a time (which kept slots precede a row differs by head), got {q.shape[2]}"
            )
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, sink_logits=sink_logits)
        return self._record(q, self._attention(q, k_step, v_step, options)[0])

    def _attention(self, q: Tensor, k_step: Tensor, v_step: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute the causal attention of the step's last rows, and its log-sum-exp without the sink, [b, Hq, r].

        options: scale, softcap and sink_logits.
        """
        self._check_numbers(k_step)
        if self._reading is not None:
            self._check_step(q, k_step, min(q.shape[2], k_step.shape[2]))
            check_vector(self.name, "sink_logits", options.get("sink_logits"), q.shape[1], q, torch.float32)
            self._unread = False
            return self._reading.attention(q, self._read_since, **options)
        if self._released:
            raise RuntimeError(f"{self.name}: expected attention() or read() before release(), got one after it")
        if self._kept is not None and KEY_BIAS in self.policy.needs.per_slot:  # biases are 0 before an eviction
            options = {**options, "key_bias": self.state[KEY_BIAS]}
        rows = operands(k_step, v_step)
        out, lse, _ = attention(query(q, k_step), **rows, starts=self._step_pads, **options)
        return out.to(q.dtype), lse

    def release(self) -> None:
        """Free what only the attention of the last step reads, once all layers that share these keys have attended."""
        self._released, self._reading, self._inputs = self._reading is not None, None, None

    def _check_step(self, q: Tensor, k: Tensor, due: int) -> None:
        """Check that `attention` follows an `append`, and that q fits k and the t = `due` new tokens."""
        inference_only(self.name, q=q)
        if not due:
            raise RuntimeError(
                f"{self.name}: expected one attention() after each append(), got one without an append()"
            )
        self._check_numbers(k)
        (b, heads, _, _), d = k.shape, channels(k)
        if q.dim() != 4 or q.shape[0] != b or q.shape[1] % heads or q.shape[2] != due or q.shape[3] != d:
            raise ValueError(
                f"{self.name}: q must be [b, Hq, t, d] for the tokens just appended, expected [{b}, a multiple of "
                f"{heads}, {due}, {d}], got {list(q.shape)}"
            )

    def _check_numbers(self, k: Tensor) -> None:
        if is_packed(k) and self._dtype is None:
            raise ValueError(
                f"{self.name}: attention needs keys and values in a floating-point dtype, got {k.dtype}; with "
                "storage='int8' or 'fp8' a cache rounds them itself"
            )

    def _record(self, q: Tensor, out: Tensor) -> Tensor:
        """Remember the queries if this is the cache of a draft."""
        if self.drafts:
            self.queries = q.clone() if self.queries is None else torch.cat((self.queries, q), 2)
        return out

    def read(self, q: Tensor, k_step: Tensor, v_step: Tensor, **options: Any) -> Tensor:
        """Compute another layer's attention over the same step, for layers that share these keys.

        Args:
            q: [b, Hq, r, d], the other layer's queries for the last r <= t tokens appended.
            k_step: As in `attention`.
            v_step: As in `attention`.
            options: scale, softcap and sink_logits, as in `attend`.

        Returns:
            [b, Hq, r, dv].
        """
        return self._attention(q, k_step, v_step, options)[0]

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._reading, self._released = None, False
        if self._ragged is not None:
            self._append_ragged(self._ragged, self._held(k), self._held(v))
            return k, v
        if not self._length:
            self._memory = None  # of a step without tokens, or before a crop of all
        t, first = k.shape[2], self._memory is None
        self._step_pads = pads = self._pads_with(t)
        self._dtype = k.dtype if self.storage in STORED else None
        k_step, v_step = (k, v) if first else self._extend(self._held(k), self._held(v))
        evicted = self._store(k_step, v_step, pads, self.seen + t)
        if evicted and not self.attend_before_compress:
            self._step_pads = self.pads
            return self._k_and_v()
        if not evicted and first:  # do not hold on to the caller's memory
            if self._dtype is not None:
                self._memory = Memory(self._held(k), self._held(v))
                return k, v
            self._memory = Memory.of(k, v)
            return self._k_and_v()
        return k_step, v_step

    def _append_ragged(self, ragged: Ragged, k: Tensor, v: Tensor) -> None:
        """Append tokens to heads that differ in length, and let the policy evict."""
        if self._unread:
            raise RuntimeError(
                f"{self.name}: expected attention() after each append(), because heads that differ in length have no "
                "K and V for another attention, got none for the last tokens; call attend(), or attention() after "
                "append() (with transformers: kvops.hf.use_attention(model))"
            )
        t = k.shape[2]
        self._ragged = self._reading = ragged.extended(self._since, k, v)
        self._unread, self._read_since = True, self._since + t
        self._length, self.seen = self._length + t, self.seen + t
        if self._remembers:
            assert self._kept is not None  # heads differ because of an eviction
            columns = k.new_empty(*ragged.shape, self._kept.shape[2] + self._since, 0)
            view = self._view(columns, columns, None, self.seen, new=t)
            self._rule.remember(view)
            self.state = view.state
        self._evict_step(t)

    def _evict_step(self, new: int) -> None:
        """Let the policy evict after a step of `new` tokens that the cache holds already."""
        if self._stays(self.seen) or not self._may_evict(new):
            return
        view = self._stored(new=new)
        self._done(self._evict(view), view)

    def _done(self, indices: Tensor | None, view: View) -> None:
        """Apply what the policy decided on the stored slots. indices: the slots to keep; None: all."""
        if indices is not None:
            self._keep(indices, view)
        elif self._ragged is None:
            self.state = view.state
        else:  # the view has the values per slot in the order of its columns
            per_slot = {name: x for name, x in self.state.items() if name in self.policy.needs.per_slot}
            self.state = {**view.state, **per_slot}

    def _stays(self, seen: int) -> bool:
        """Whether nothing may be evicted after `seen` tokens, although the policy would.

        Heads that differ in length hold no padding, so each row must have a token first.
        """
        return self.frozen or (self.policy.ragged and 0 < self._most_padding >= seen)

    def _may_evict(self, new: int) -> bool:
        """Whether `_evict` needs to see the slots after a step, which copies them if heads differ in length."""
        if self._ragged is None:
            return True
        assert isinstance(self._rule, BudgetPolicy)  # as `Policy.ragged` declares
        view = self._counting_view(new)
        return self._rule.full(view, self._rule.room(view))

    def _counting_view(self, new: int) -> View:
        """Return a view of as many slots as the heads hold on average, without channels: enough to decide on."""
        assert self._ragged is not None
        none = self._ragged.k.new_empty(*self._ragged.shape, self._ragged.mean + self._since, 0)
        return self._view(none, none, None, self.seen, new=new)

    @property
    def _since(self) -> int:
        """The tokens stored since the last eviction."""
        return self.seen - self._evicted_at

    def _extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write tokens after the stored slots and return views of all slots."""
        if self._memory is None:
            self._memory = Memory.of(k, v)
        else:
            self._memory = self._memory.extended(self._length, k, v)
        return self._memory.first(self._length + k.shape[2])

    def _store(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int) -> bool:
        """Let the policy evict from k and v, the stored and the new slots. Return whether it evicted any."""
        if self._prompt == self.seen and not self.frozen and (seen > self.seen + 1 or not self.seen):
            self._set_prompt(seen)
        view = self._view(k, v, pads, seen)
        if self._remembers:
            self._rule.remember(view)
        indices = None if self._stays(seen) else self._evict(view)
        if indices is None:
            self._length, self.pads, self.seen, self.state = k.shape[2], pads, seen, view.state
        else:
            self._keep(indices, view)
        return indices is not None

    def _stored(self, new: int | None = None) -> View:
        """Return the policy's view of the stored slots. new: how many of the tokens belong to this step.

        Of heads that differ in length it is a copy. The newest tokens that the policy protects are the last slots of
        all heads; with `needs.inputs` all tokens since the last eviction. Before them a head that holds fewer slots
        than the longest has K and V of NaN, which every rule leaves out.
        """
        if self._ragged is not None:
            columns = self._columns(self._ragged)
            view = self._view(*self._ragged.rectangle(columns, torch.nan), None, self.seen, new=new)
            view.kept = self._positions(self._ragged, columns)
            for name in self.policy.needs.per_slot:
                if name in view.state:
                    view.state[name] = self._in_columns(self._ragged, columns, view.state[name])
            return view
        self._settle()
        return self._view(*self._not_empty().first(self._length), self.pads, self.seen, new=new)

    def _not_empty(self) -> Memory:
        """Return the memory of a cache that holds tokens."""
        if self._memory is None:
            raise RuntimeError(f"{self.name}: expected a cache with tokens, got an empty one; call append() first")
        return self._memory

    def _k_and_v(self) -> tuple[Tensor, Tensor]:
        """Return K and V of the stored slots. The tensors that `append` returned stay valid."""
        if self._ragged is not None:
            return self._ragged.rectangle(self._ragged.columns(self._since), 0.0)
        self._settle(in_place=False)
        assert self._memory is not None  # callers check
        return self._memory.first(self._length)

    def _settle(self, in_place: bool = True) -> None:
        """Move the slots that the last eviction kept to the front of the memory, or to fresh memory."""
        if self._eviction is None:
            return
        assert self._memory is not None  # there was something to evict
        if in_place and self._memory.writable:
            self._moved(self._eviction, IN_PLACE)
        else:
            self._memory = Memory(*self._moved(self._eviction))
        self._eviction = None

    def _columns(self, ragged: Ragged) -> Tensor:
        """Return the slots of each head as the columns of a view; see `_stored`."""
        assert isinstance(self._rule, BudgetPolicy)  # as `Policy.ragged` declares
        newest = self._rule.newest(budget_tokens(self._rule.budget, self.seen))
        needs = self._rule.needs
        if needs.inputs and not needs.per_slot:  # the rule reads the inputs of tokens that are the last slots
            newest = max(newest, self._since)
        return ragged.columns(self._since, newest)

    def _positions(self, ragged: Ragged, columns: Tensor) -> Tensor:
        """Return the position of each column of heads that differ in length, int64 [b, Hk, width]; -1 in the gaps."""
        assert self._kept is not None  # heads differ because of an eviction
        new = torch.arange(self._evicted_at, self.seen, device=columns.device).expand(*ragged.shape, -1)
        positions = self._in_columns(ragged, columns, torch.cat((self._kept, new), 2))
        return positions.where(columns.view(positions.shape) >= 0, -1)

    def _in_columns(self, ragged: Ragged, columns: Tensor, values: Tensor) -> Tensor:
        """Return the values of the slots in `columns`, [b, Hk, width]; arbitrary in the gaps.

        values: [b, Hk, any], first those of the slots that the last eviction kept, as in `_kept`, then those of the
        tokens since.
        """
        assert self._kept is not None  # heads differ because of an eviction
        columns, counts = columns.view(*ragged.shape, -1), ragged.counts.unsqueeze(-1)
        at = torch.where(columns < counts, columns, self._kept.shape[2] + columns - counts)
        return values.gather(2, at.clamp(min=0))

    def _evict(self, view: View) -> Tensor | None:
        """Return the slots to keep after a step has been stored; None to keep all."""
        return self._rule.evict(view)

    def _view(self, k: Tensor, v: Tensor, pads: Tensor | None, seen: int, new: int | None = None) -> View:
        """Return the policy's view. k, v: stored and new slots; pads: how many of a row's first slots are padding."""
        return self._view_of(
            k,
            v,
            starts=pads,
            fill_invalid=pads is not None and not self.policy.ragged,
            layer=self.layer,
            num_layers=self.num_layers,
            seen=seen,
            new=seen - self.seen if new is None else new,
            kept=self._kept,
            padding=self._padding,
            state=dict(self.state),
            whole_prompt=self.policy.protect is not None,
            inputs=self._inputs,
        )

    def _view_of(self, k: Tensor, v: Tensor, **options: Any) -> View:
        return view_of(k, v, self._dtype, **options)

    def _pads_with(self, t: int) -> Tensor | None:
        """Return `pads` after t more columns of the batch have been stored."""
        if self.pads is None or self._padding is None:
            return None
        return self.pads + (self._padding - self.seen).clamp(0, t)

    def _keep(self, indices: Tensor, view: View) -> None:
        """Evict all slots except `indices`, int64 [b, Hk, m]: ascending, -1 first in rows that keep fewer.

        If heads may differ in length, -1 is last in those that keep fewer.
        """
        if not type(self.policy).__module__.startswith("kvops."):  # those ascend, and a check takes a third of a step
            who = f"{self.name}: the slots that evict() keeps"
            check_kept(who, indices, view.n, self.policy.ragged, view.starts is not None)
        view.inputs = view.reference = None  # the rule has run, and an eviction in place keeps the view
        if isinstance(view, RoundedView):
            view.decide_by(None, None)
        if self.policy.ragged:
            return self._keep_ragged(indices, view)
        pads = view.starts
        slots = indices.clamp(min=0) if pads is not None else indices
        self._kept = view.positions().gather(2, slots)
        for name in self.policy.needs.per_slot:
            view.state[name] = view.state[name].gather(2, slots)
        left = pads
        if pads is not None:  # the kept padding of a row comes first, and all heads keep the same amount of it
            left = (indices[:, 0] < pads[:, None]).sum(-1, dtype=torch.int32)
        self._length, self.pads, self.seen, self._evicted_at = indices.shape[2], left, view.seen, view.seen
        self.state = view.state
        self._eviction = Eviction(indices, view, left)
        if not self._moves_in_place(view):
            self._memory = Memory(*self._moved(self._eviction))
            self._eviction = None

    def _keep_ragged(self, indices: Tensor, view: View) -> None:
        """Evict all slots except `indices`, int64 [b, Hk, m], in which -1 and the gaps of the view count as none."""
        valid = indices >= (0 if view.starts is None else view.starts[:, None, None])  # padding is not kept
        positions = view.positions().gather(2, indices.clamp(min=0)).where(valid, -1)
        order = torch.where(positions >= 0, positions, self.seen + view.n).sort(dim=-1, stable=True).indices
        self._kept = positions.gather(2, order)
        kept = indices.gather(2, order).where(self._kept >= 0, -1)
        for name in self.policy.needs.per_slot:
            view.state[name] = view.state[name].gather(2, kept.clamp(min=0))
        k, v = self._rows_of(view)
        if view.values is not None:  # of the slots in `indices`
            at = indices.where(valid, view.n).unsqueeze(-1).expand_as(view.values)
            v = pad(v, (0, 0, 0, 1)).scatter_(2, at, view.values.to(v.dtype))[:, :, : view.n]
        bias = view.state[KEY_BIAS] if KEY_BIAS in self.policy.needs.per_slot else None
        # A compressed prompt takes memory of its own size, as in `Memory`, until the next token comes.
        self._ragged = Ragged.of(self._held(k), self._held(v), kept, spare=view.new == 1, bias=bias)
        self._memory = self.pads = None
        self._length, self.seen, self._evicted_at = self._ragged.longest, view.seen, view.seen
        self.state = view.state

    def _moves_in_place(self, view: View) -> bool:
        """Return whether the kept slots may stay where they are until the next step, and then move in place."""
        memory = self._memory
        return (
            memory is not None  # else the view holds the caller's tensors
            and self.attend_before_compress  # this step's attention reads the evicted slots too
            and (view.starts is None or self.policy.fixed_budget)  # compaction cannot move rows that begin with -1
            and not memory.wasteful(self._length)
            and memory.writable
        )

    def _moved(self, eviction: Eviction, out: Out = None) -> tuple[Tensor, Tensor]:
        """Move the kept slots to fresh memory, or within their own (`IN_PLACE`)."""
        if self._dtype is None:
            return self.policy.move(eviction.view, eviction.indices, out)
        k, v = Policy.move(self.policy, View(*self._rows_of(eviction.view)), eviction.indices, out)
        return packed(k, self.storage), packed(v, self.storage)

    def _rows_of(self, view: View) -> tuple[Tensor, Tensor]:
        """Return K and V of a view as they are stored."""
        return view.packed if isinstance(view, RoundedView) else (view.k, view.v)

    def undone_on_error(self) -> _Undone:
        """Return a context manager that restores the cache if its block raises."""
        self._settle()
        return _Undone(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the kept slots must have moved, because a copied view would not share the memory."""
        self._settle(in_place=False)
        return vars(self)

    def __copy__(self) -> Cache:
        """Return an independent copy. Both share memory until one is written to, which then copies it."""
        twin: Cache = object.__new__(type(self))
        vars(twin).update(vars(self))
        if self._any_memory is not None:
            self._any_memory.shared = True
        return twin

    def catch_up(self) -> None:
        """Evict what a frozen cache has kept, as after a decode step: for example once drafted tokens are accepted.

        Caches of a `QueryPolicy` evict in `attention` only.
        """
        if self.policy.needs.inputs and not self.policy.needs.stage:
            raise RuntimeError(
                f"{self.name}: catch_up() has no inputs of the tokens that a frozen cache has kept, expected a policy "
                f"without needs.inputs, got {self.policy!r}"
            )
        with self.undone_on_error():
            self._evict_step(1)

    def crop(self, seen: int) -> None:
        """Forget all tokens from logical position `seen` on, such as the rejected tokens of a draft.

        Args:
            seen: How many tokens the cache has seen afterwards. Larger values than the current one change nothing.

        Raises:
            TypeError: `seen` is not an int.
            ValueError: `seen` is negative or precedes the last eviction, or the policy's scores depend on the later
                tokens (`policy.croppable` is False). The cache stays unchanged.
        """
        if isinstance(seen, bool) or not isinstance(seen, int):
            raise TypeError(f"{self.name}: crop expected an int, got {type(seen).__name__} {seen!r}")
        if seen < 0:
            raise ValueError(f"{self.name}: crop expected seen >= 0, got {seen}")
        if seen >= self.seen:
            return
        if not self.policy.croppable:
            raise ValueError(
                f"{self.name}: cannot crop to {seen} of {self.seen} tokens, because the scores include the attention "
                "of the later ones; copy the cache before the tokens that you may take back"
            )
        if seen < self._evicted_at:
            raise ValueError(
                f"{self.name}: cannot crop to {seen} tokens, because the last eviction came after {self._evicted_at}; "
                f"expected at least {self._evicted_at}, or call freeze() before the tokens that you may take back"
            )
        self._settle()
        self._reading, self._unread, self._released = None, False, self._ragged is not None
        since = seen - self._evicted_at
        if self._ragged is not None and self._ragged.wasteful(since):
            self._ragged = self._ragged.rows(None, since, since)
        memory, length = self._memory, self._length - (self.seen - seen)
        if memory is not None and memory.wasteful(length):
            self._memory = Memory(*(x.clone() for x in memory.first(length)))
        self._length = length
        self.seen = seen
        held = since + (0 if self._kept is None else self._kept.shape[2])
        per_slot = {name: self.state[name][:, :, :held] for name in self.policy.needs.per_slot if name in self.state}
        self.state = {**self.state, **per_slot}
        self._set_prompt(min(self._prompt, seen))
        if self.pads is not None:
            self.pads = self.pads.clamp(max=length)

    def reorder(self, idx: Tensor) -> None:
        """Replace row i by row idx[i], as beam search does. idx: int32 or int64 [b]."""
        self._map(lambda x: x.index_select(0, idx.to(x.device)))

    def select_rows(self, idx: Tensor) -> None:
        """Keep only the rows `idx`, in that order. idx: int32 or int64 [rows]."""
        self.reorder(idx)

    def repeat_interleave(self, r: int) -> None:
        """Repeat each row r times; the copies are adjacent."""
        self._map(lambda x: x.repeat_interleave(r, 0))

    def _map(self, f: Callable[[Tensor], Tensor]) -> None:
        self._settle()
        if self._memory is not None:
            self._memory = Memory(f(self._memory.k), f(self._memory.v))
        if self._ragged is not None:
            rows = f(torch.arange(self.rows, device=self._ragged.k.device))
            self._ragged, self._reading = self._ragged.rows(rows, self._since, self._ragged.room), None
            self._length = self._ragged.longest + self._since
        for name in self._tensors:
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, f(x))
        if self._padding is not None and self._most_padding >= self.seen:  # a row that was all padding may have left
            self._most_padding = max(self._padding.tolist(), default=0)
        self.state = {name: f(x) if isinstance(x, Tensor) else x for name, x in self.state.items()}

    def _check(self, k: Tensor, v: Tensor) -> None:
        """Check that new tokens have four dims, fit each other and the stored ones, and need no gradient."""
        who = self.name
        memory = self._any_memory
        k_stored, v_stored = (None, None) if memory is None else (memory.k, memory.v)
        for name, x, stored in (("k", k, k_stored), ("v", v, v_stored)):
            inference_only(who, **{name: x})
            if x.dim() != 4:
                raise ValueError(f"{who}: {name} must be [b, Hk, t, d], got shape {list(x.shape)}")
            if x.shape[:3] != k.shape[:3] or x.dtype != k.dtype or x.device != k.device:
                raise ValueError(
                    f"{who}: v must match k in [b, Hk, t], dtype and device, expected {list(k.shape[:3])} {k.dtype} "
                    f"{k.device}, got {list(x.shape[:3])} {x.dtype} {x.device}"
                )
            if self.storage in STORED and (x.shape[3] % 16 or not x.shape[3] or x.dtype not in ROUNDED):
                raise ValueError(
                    f"{who}: with storage={self.storage!r} {name} must be {', '.join(map(str, ROUNDED))} with a "
                    f"head_dim that is a multiple of 16, got {x.dtype} {list(x.shape)}"
                )
            if memory is None or stored is None:
                continue
            dtype, d = (stored.dtype, stored.shape[3]) if self._dtype is None else (self._dtype, channels(stored))
            want, got = (*memory.shape, d), (*x.shape[:2], x.shape[3])
            if want != got or dtype != x.dtype or stored.device != x.device:
                raise ValueError(
                    f"{who}: {name} must match the cached tokens in (b, Hk, d), dtype and device, expected {want} "
                    f"{dtype} {stored.device}, got {got} {x.dtype} {x.device}"
                )
        if self._padding is not None and len(self._padding) != k.shape[0]:
            raise ValueError(
                f"{who}: k must have as many rows as set_pads had entries, expected {len(self._padding)}, got "
                f"{k.shape[0]}"
            )


def check_rounding(who: str, storage: str, policy: Policy, rope: Rope | None) -> None:
    """Check that a policy can run on rounded rows, which no move may change."""
    moves = type(policy).move is not Policy.move
    if moves or policy.merge or KEY_BIAS in policy.needs.per_slot:
        raise ValueError(
            f"{who}: storage={storage!r} expected a policy that keeps K and V as they are, got {policy!r}, which "
            f"{'averages values' if policy.merge else 'changes the rows that it keeps'}"
        )
    if rope is not None:
        raise ValueError(f"{who}: storage={storage!r} is for caches without rope=, expected None, got a kvops.Rope")


def check_kept(who: str, slots: Tensor, n: int, ragged: bool, padded: bool) -> None:
    """Check that slots to keep, int64 [.., m], lie in [0, n) and ascend. Values on the GPU are not read back.

    ragged: They may be -1 anywhere, for none. padded: They may be -1 before the others.
    """
    if not slots.numel() or not slots.is_cpu or torch.compiler.is_compiling():
        return
    before, after, least = slots[..., :-1], slots[..., 1:], -1 if ragged or padded else 0
    if ragged:
        before = before.cummax(-1).values
    ascends = after > before
    if least < 0:
        ascends |= after < 0 if ragged else before < 0
    if not ascends.all():
        at = tuple((~ascends).nonzero()[0].tolist())
        raise ValueError(f"{who} must ascend without repeats, got {int(after[at])} after {int(before[at])}")
    low, high = (int(x) for x in slots.aminmax())
    if low < least or high >= n:
        raise ValueError(f"{who} must lie in [{least}, {n}), got {low if low < least else high}")


def check_tokens(who: str, k: Tensor) -> None:
    """Check that k, [b, Hk, t, d], holds at least one token to attend with."""
    inference_only(who, k=k)
    if k.dim() == 4 and k.shape[2] == 0:
        raise ValueError(f"{who}: k must hold at least one token, got shape {list(k.shape)}")


def check_inputs(who: str, inputs: LayerInputs | None, k: Tensor) -> None:
    """Check that a step's inputs are those of the tokens of k, [b, Hk, t, d]."""
    if inputs is None:
        return
    if not isinstance(inputs, LayerInputs):
        raise TypeError(f"{who}: inputs must be a kvops.LayerInputs, got {type(inputs).__name__}")
    b, _, t, _ = k.shape
    check_hidden(who, "inputs.hidden", inputs.hidden, b, t)
    ids = inputs.token_ids
    if ids is not None and not isinstance(ids, Tensor):
        raise TypeError(f"{who}: inputs.token_ids must be a torch.Tensor or None, got {type(ids).__name__}")
    if ids is not None and (ids.shape != (b, t) or ids.is_floating_point()):
        raise ValueError(
            f"{who}: inputs.token_ids must be integers of shape [{b}, {t}], got {ids.dtype} {list(ids.shape)}"
        )


class _Undone:
    """The context manager that `Cache.undone_on_error` returns.

    Restoring the attributes is enough, because a cache replaces its tensors and never writes to them. The one exception
    is its memory. There a block writes only after the slots in use, and `Cache._settle` has moved the kept slots
    before.
    """

    __slots__ = ("cache", "before")

    def __init__(self, cache: Cache):
        self.cache, self.before = cache, vars(cache).copy()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is not None:
            vars(self.cache).clear()
            vars(self.cache).update(self.before)
