"""The rotary embedding (RoPE) of a transformers model, read from its rotary module and verified with a tiny model.

The tiny model has the layers and the head dim of the real one, and random weights. It reads one token in some hundred
rows, each row at another position: positions over the whole range of the model, and around every number in the config,
since code may treat positions differently from there on (by a temperature of the queries, for example). A single token
attends to itself only, so nothing but the rotation of queries and keys differs between rows. In the first row they are
left unrotated: the rotary module's cosines and sines are replaced by 1 and 0. The other rows' queries and keys must
then equal the first row's, rotated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from .._lib import NAMESPACE
from ..ops.rope import Rope
from .arguments import CACHE


def model_rope(config: PreTrainedConfig) -> Rope:
    """Return the rotary embedding of a model's full-attention layers, from the model's own code in transformers.

    The frequencies come from the model's rotary module. One forward pass of a tiny model of the same config verifies
    that every full-attention layer rotates its queries and keys by these frequencies, starting at the first channel,
    and that nothing changes them afterwards. It also shows which channels form a pair. This runs once per config.

    The pass has positions up to eight times the config's `max_position_embeddings` (at most 2^24), and those next to
    each number in the config. A temperature of the queries is therefore noticed wherever it starts. Longer streams are
    taken to go on in the same way.

    Args:
        config: The model's config (`model.config`).

    Returns:
        A rope for `kvops.Cache` and `KVCache`.

    Raises:
        ValueError: The tiny model does not confirm the rotation: layers without rotation, MLA, norms after the
            rotation, queries scaled by their positions, positions of several dims, model code from outside
            transformers. Or the frequencies change with the length (dynamic, longrope). Pass your own
            `rope=kvops.Rope(inv_freq, ...)` then, or use positions='original'.
    """
    config = config.get_text_config(decoder=True)
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _known:
        _known[key] = _ask(config)
    return _known[key]


_known: dict[tuple[type, str], Rope] = {}


def _ask(config: PreTrainedConfig) -> Rope:
    unclear = (
        f"KVCache: cannot determine how the model of {type(config).__name__} rotates its keys; pass the cache "
        "rope=kvops.Rope(inv_freq, interleaved=...) if all layers rotate them the same way and nothing else depends on "
        "the position, or use positions='original'"
    )
    kind = MODEL_MAPPING.get(type(config), None)
    if not isinstance(kind, type) or hasattr(config, "qk_rope_head_dim"):  # code from outside transformers, MLA
        raise ValueError(unclear)
    changing, rope = [], None
    try:
        # independent of the caller's device, autocast and gradient mode
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            with _Sandbox() as sandbox:
                model = _tiny_model(kind, config, sandbox.generator)
                sandbox.most = _MOST_WORK
                named = _named(model, config)
                changing = [x.kind for x in named if x.kind in ("dynamic", "longrope")]
                positions = _positions(config)
                rows = _rows(model, positions) if named and not changing else None
            if rows is not None:
                rope = _confirmed(named, rows, positions)
    except Exception as error:  # the model's code may fail at sizes that it was not written for
        raise ValueError(unclear) from error
    if changing:
        raise ValueError(
            f"KVCache: rotary frequencies of type {changing[0]!r} change with the length, so slots have no fixed "
            "rotation; pass the cache rope=kvops.Rope(inv_freq) for one length, or use positions='original'"
        )
    if rope is None:
        raise ValueError(unclear)
    return rope


# ---- the tiny model ----

# Sizes that do not affect the rotation, by their names in configs, and their values in the tiny model.
_SIZES = {
    **dict.fromkeys("num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts".split(), 2),
    **dict.fromkeys("linear_num_key_heads linear_num_value_heads mamba_n_heads".split(), 2),
    **dict.fromkeys("num_experts_per_tok moe_k moe_topk moe_top_k n_group topk_group mamba_n_groups".split(), 1),
    **dict.fromkeys("moe_num_shared_experts n_shared_experts".split(), 1),
    **dict.fromkeys("vocab_size intermediate_size intermediate_size_mlp shared_intermediate_size".split(), 8),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size".split(), 8),
    **dict.fromkeys("linear_key_head_dim linear_value_head_dim mamba_d_state mamba_chunk_size".split(), 8),
    "pad_token_id": 0,  # in the vocabulary
}
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
# Elements that the tiny model may have, 1 GiB in fp32, and that its forward pass may write, in seconds. The linear
# attention of older transformers pads each row to a whole chunk.
_MOST_WEIGHTS, _MOST_WORK = 1 << 28, 1 << 34


def _tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config with the same layers and head dim, but two heads and small other sizes."""
    config = copy.deepcopy(config)
    heads, width, head_dim = config.num_attention_heads, config.hidden_size, getattr(config, "head_dim", None)
    small = 2 * (head_dim or width // heads)
    if head_dim is not None and width != heads * head_dim:  # many models rely on equality where it holds
        small = 16
    inner = small * (getattr(config, "mamba_expand", None) or 1)
    sizes = {**_SIZES, "hidden_size": small, "lru_width": small, "mamba_d_ssm": inner, "mamba_d_head": inner // 2}
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, size in sizes.items():
            was = getattr(part, name, None)
            if was:  # 0 experts stay 0
                setattr(part, name, [size] * len(was) if isinstance(was, list) else size)
        for name in KV_HEADS:
            if getattr(part, name, None):
                setattr(part, name, 2 if getattr(part, name) == heads else 1)
    return config


def _tiny_model(kind: type[PreTrainedModel], config: PreTrainedConfig, generator: torch.Generator) -> PreTrainedModel:
    config = _tiny(config)
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config).eval().float()
    for x in model.parameters():
        x.normal_(generator=generator)
        # norms with equal weights would commute with a rotation, and go unnoticed
        x.mul_(0.3).add_(1.0) if x.dim() < 2 else x.mul_(x[0].numel() ** -0.5)
    config._attn_implementation_internal = _ATTENTION  # setting the public attribute logs warnings
    return model


class _Sandbox(TorchDispatchMode):
    """Draws random numbers from its own generator, and stops a model that turns out not to be tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.work, self.most = 0, _MOST_WEIGHTS

    def __torch_dispatch__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None:
            if all(x.name != "generator" for x in function._schema.arguments):
                function = function.overloadpacket.generator
            kwargs = {**kwargs, "generator": self.generator}
        out = function(*args, **kwargs)
        if isinstance(out, Tensor) and function._schema.returns[0].alias_info is None:  # not a view
            self.work += out.numel()
        if self.work > self.most:
            raise MemoryError(f"the tiny model makes tensors of more than {self.most} elements")
        return out


# ---- what the rotary module declares and what the tiny model does ----

_ATTENTION = f"{NAMESPACE}_rope"  # the name of the tiny models' attention function in transformers
_BLOCK = 64  # rows come in such numbers, since matrix products round the rows of an incomplete block differently
_BEYOND = 8  # positions up to this multiple of max_position_embeddings: a stream goes on
_LAST = 1 << 24  # the largest position; beyond it, fp32 does not have all integers
_TOLERANCE = 2e-5  # relative to a head's largest element: rounding differs between rows, and layers amplify it


def _numbers(x: object) -> Iterator[int]:
    """Return the integers in a config's dictionary, nested ones included."""
    if isinstance(x, (dict, list, tuple)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from _numbers(each)
    elif isinstance(x, (int, float)) and not isinstance(x, bool) and x == x // 1:
        yield int(x)


def _positions(config: PreTrainedConfig) -> Tensor:
    """Return the rows' positions, int64 [rows, 1]. The first row stays unrotated.

    They are spread evenly by their logarithm, at random with a fixed seed, and lie on both sides of every number in the
    config. None is 0, because recurrent layers may reset their state there.
    """
    numbers = {x for x in _numbers(config.to_dict()) if 0 < x < _LAST}
    most = getattr(config, "max_position_embeddings", None) or max(numbers, default=1)
    last = min(max(_BEYOND * most, 4096), _LAST)
    spread = torch.logspace(0, math.log2(last), 24, base=2.0, dtype=torch.float64, device="cpu").long()
    rows = {x + side for x in numbers for side in (-1, 0, 1)}.union(spread.tolist()) - {0, 3}
    generator = torch.Generator("cpu").manual_seed(0)
    least = len(rows) + 8
    while len(rows) < least or (len(rows) + 1) % _BLOCK:
        rows.add(int(torch.randint(4, last, (), generator=generator, device="cpu")))
    return torch.tensor([3, *sorted(rows)])[:, None]


class _Named(NamedTuple):
    """What a rotary module declares for full-attention layers."""

    kind: str
    inv_freq: Tensor
    scaling: float


def _named(model: PreTrainedModel, config: PreTrainedConfig) -> list[_Named]:
    """Return what each class of rotary module in the tiny model declares when it is built from the full config."""
    found = []
    for rotary in {type(x): x for x in model.modules() if hasattr(x, "rope_type")}:
        module: Any = rotary(config)
        kind, prefix = module.rope_type, ""
        if isinstance(kind, dict):  # frequencies differ by layer type
            kind, prefix = kind.get("full_attention"), "full_attention_"
        if kind is not None:
            inv_freq, scaling = (getattr(module, prefix + name) for name in ("inv_freq", "attention_scaling"))
            found.append(_Named(kind, inv_freq.float(), scaling))
    return found


class _Recorder(DynamicCache):
    """Records the keys of each layer, and then its queries, which `_attend` passes.

    A model that computes its attention itself passes none. It cannot use the library's attention either, which would
    rotate its queries.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.rows: dict[int, list[Tensor]] = {}  # keys and queries by layer, [rows, heads, 1, d]
        self.layer: int | None = None  # the layer that attends next

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.rows.setdefault(layer_idx, []).append(key_states)
        self.layer = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


_recorder: ContextVar[_Recorder] = ContextVar("kvops.hf.rope")


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **kwargs: object
) -> tuple[Tensor, None]:
    """Compute the attention of a single token to itself."""
    recorder = _recorder.get()
    if recorder.layer is not None:
        recorder.rows[recorder.layer].append(query)
        recorder.layer = None
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)


def _rows(model: PreTrainedModel, positions: Tensor) -> Tensor:
    """Return keys and queries of all full-attention layers (of all layers if there is none), [positions, heads, d]."""

    def leave_the_first(
        module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], out: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if not any(isinstance(x, Tensor) and torch.equal(x, positions) for x in (*args, *kwargs.values())):
            raise ValueError("a rotary module receives other positions than the model")
        cos, sin = (x.clone() for x in out)
        cos[0], sin[0] = 1, 0
        return cos, sin

    for module in model.modules():
        if hasattr(module, "rope_type"):
            module.register_forward_hook(leave_the_first, with_kwargs=True)
    recorder = _Recorder(model.config)
    token = _recorder.set(recorder)
    try:
        model(torch.ones_like(positions), position_ids=positions, use_cache=True, **{CACHE: recorder})
    finally:
        _recorder.reset(token)
    full = [i for i, layer in enumerate(recorder.layers) if type(layer) is DynamicLayer]
    return torch.cat([x.squeeze(2) for i in full or recorder.rows for x in recorder.rows[i]], 1)


def _confirmed(named: list[_Named], rows: Tensor, positions: Tensor) -> Rope | None:
    """Return the rotation that maps each head's first row to its other rows, with either kind of channel pairs."""
    first, others = rows[:1].double(), rows[1:].double()
    for _, inv_freq, scaling in named:
        cut = 2 * len(inv_freq)  # the channels from here on are not rotated
        for interleaved in (False, True) if cut <= rows.shape[-1] else ():
            rope = Rope(inv_freq, interleaved, scaling)
            cos, sin = (x.unsqueeze(1).double() for x in rope.tables(positions[1:, 0]))
            pair = -1 if interleaved else -2
            x, y = first[..., :cut].unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair)
            rotated = torch.stack((x * cos - y * sin, y * cos + x * sin), pair).flatten(-2)
            expected = torch.cat((rotated, first[..., cut:].expand(len(others), -1, -1)), -1)
            error = (expected - others).abs().amax((0, 2))
            if (error <= _TOLERANCE * others.abs().amax((0, 2))).all():
                return rope
    return None
