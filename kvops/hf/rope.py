"""The rotary embedding of a model of transformers: what its rotary module says and a tiny model of its config confirms.

The tiny model has the layers and the head dim of the real one, and random weights. It reads one token in several rows,
each at a position of its own. A token that is alone attends to itself only, so nothing but the rotation of its queries
and keys differs from row to row; and in the first row they are not rotated: the rotary module's cosines and sines are
replaced by 1 and 0. Then the other rows' queries and keys must be those of the first, rotated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from ..rope import Rope


def model_rope(config: PreTrainedConfig) -> Rope:
    """The rotary embedding of a model's full-attention layers, from the code that transformers has for it.

    The model's rotary module has the frequencies. A tiny model of the config shows in one forward pass that every
    full-attention layer turns its queries and keys by them, from their first channel on, which channels are a pair, and
    that nothing is done to them afterwards. This runs once for each config.

    Args:
        config: of the model (`model.config`).

    Returns:
        For the `rope` of `kvops.Cache`.

    Raises:
        ValueError: what the tiny model does not confirm: layers without rotation, MLA, norms after the rotation,
            positions of several dims, code from elsewhere; and frequencies that change with the length (dynamic,
            longrope).
    """
    config = config.get_text_config(decoder=True)
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _known:
        _known[key] = _ask(config)
    return _known[key]


_known: dict[tuple[type, str], Rope] = {}


def _ask(config: PreTrainedConfig) -> Rope:
    unclear = (
        f"KVCache: cannot tell how the model of {type(config).__name__} rotates its keys; give the cache "
        "rope=kvops.Rope(inv_freq, interleaved=...) if all layers rotate them alike, or positions='original'"
    )
    kind = MODEL_MAPPING.get(type(config), None)
    if not isinstance(kind, type) or hasattr(config, "qk_rope_head_dim"):  # code from elsewhere, MLA
        raise ValueError(unclear)
    changing, rope = [], None
    try:
        # the caller's device, autocast and gradients have no part in it
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            with _Sandbox() as sandbox:
                model = _tiny_model(kind, config, sandbox.generator)
                named = _named(model, config)
                changing = [x.kind for x in named if x.kind in ("dynamic", "longrope")]
                rows = _rows(model) if named and not changing else None
            if rows is not None:
                rope = _confirmed(named, rows)
    except Exception as error:  # of the model's code, at sizes that it was not written for
        raise ValueError(unclear) from error
    if changing:
        raise ValueError(
            f"KVCache: rotary frequencies of type {changing[0]!r} change with the length, so slots have no fixed "
            "rotation; give the cache rope=kvops.Rope(inv_freq) of one length, or positions='original'"
        )
    if rope is None:
        raise ValueError(unclear)
    return rope


# The tiny model.

# Sizes that no rotation depends on, as configs name them, and what they become.
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
_MOST_WORK = 1 << 30  # elements written; a config of 126 layers and 128 channels per head needs a sixth


def _tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """With all layers and the head dim, but two heads, and small in all that has nothing to do with attention."""
    config = copy.deepcopy(config)
    heads, width, head_dim = config.num_attention_heads, config.hidden_size, getattr(config, "head_dim", None)
    small = 2 * (head_dim or width // heads)
    if head_dim is not None and width != heads * head_dim:  # else many models rely on it
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
        # norms would commute with a rotation if their weights were all alike
        x.mul_(0.3).add_(1.0) if x.dim() < 2 else x.mul_(x[0].numel() ** -0.5)
    config._attn_implementation_internal = _ATTENTION  # the public one logs what models make of it
    return model


class _Sandbox(TorchDispatchMode):
    """Random numbers come from a generator of its own, and a model that turns out not to be tiny ends."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.work = 0

    def __torch_dispatch__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None:
            if all(x.name != "generator" for x in function._schema.arguments):
                function = function.overloadpacket.generator
            kwargs = {**kwargs, "generator": self.generator}
        out = function(*args, **kwargs)
        self.work += out.numel() if isinstance(out, Tensor) else 0
        if self.work > _MOST_WORK:
            raise MemoryError(f"the tiny model writes more than {_MOST_WORK} elements")
        return out


# What it says and does.

_ATTENTION = "kvops_rope"  # the name of the tiny models' attention function in transformers
# Of the rows, the first of which stays without rotation. None is 0, where recurrent layers may start anew.
_POSITIONS = (3, 1, 2, 17, 400, 6007)
_TOLERANCE = 2e-5  # of a head's largest element: equal rows are not rounded equally, and layers amplify that


class _Named(NamedTuple):
    """What a rotary module says of its full-attention layers."""

    kind: str
    inv_freq: Tensor
    scaling: float


def _named(model: PreTrainedModel, config: PreTrainedConfig) -> list[_Named]:
    """Of each class of rotary modules in the tiny model, made for the config itself."""
    found = []
    for rotary in {type(x): x for x in model.modules() if hasattr(x, "rope_type")}:
        module: Any = rotary(config)
        kind, prefix = module.rope_type, ""
        if isinstance(kind, dict):  # frequencies by the type of layer
            kind, prefix = kind.get("full_attention"), "full_attention_"
        if kind is not None:
            inv_freq, scaling = (getattr(module, prefix + name) for name in ("inv_freq", "attention_scaling"))
            found.append(_Named(kind, inv_freq.float(), scaling))
    return found


class _Recorder(DynamicCache):
    """Sees the keys of each layer, and the queries that `_attend` hands over after them.

    A model that computes its attention itself hands over none; it cannot have the library's, which turns queries.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.rows: dict[int, list[Tensor]] = {}  # keys and queries, [rows, heads, 1, d]
        self.layer: int | None = None  # whose attention comes next

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
    """The attention of one token to itself."""
    recorder = _recorder.get()
    if recorder.layer is not None:
        recorder.rows[recorder.layer].append(query)
        recorder.layer = None
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)


def _rows(model: PreTrainedModel) -> Tensor:
    """Keys and queries of all full-attention layers (of all layers, if none is one), [positions, heads, d]."""
    positions = torch.tensor(_POSITIONS)[:, None]

    def leave_the_first(
        module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], out: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        if not any(isinstance(x, Tensor) and torch.equal(x, positions) for x in (*args, *kwargs.values())):
            raise ValueError("a rotary module gets other positions than the model")
        cos, sin = (x.clone() for x in out)
        cos[0], sin[0] = 1, 0
        return cos, sin

    for module in model.modules():
        if hasattr(module, "rope_type"):
            module.register_forward_hook(leave_the_first, with_kwargs=True)
    recorder = _Recorder(model.config)
    token = _recorder.set(recorder)
    try:
        model(torch.ones_like(positions), position_ids=positions, past_key_values=recorder, use_cache=True)
    finally:
        _recorder.reset(token)
    full = [i for i, layer in enumerate(recorder.layers) if type(layer) is DynamicLayer]
    return torch.cat([x.squeeze(2) for i in full or recorder.rows for x in recorder.rows[i]], 1)


def _confirmed(named: list[_Named], rows: Tensor) -> Rope | None:
    """The rotation, with one kind of pairs or the other, that turns each head's first row to its other rows."""
    first, others = rows[:1].double(), rows[1:].double()
    for _, inv_freq, scaling in named:
        cut = 2 * len(inv_freq)  # the channels from here on are not rotated
        for interleaved in (False, True) if cut <= rows.shape[-1] else ():
            rope = Rope(inv_freq, interleaved, scaling)
            cos, sin = (x.unsqueeze(1).double() for x in rope.tables(torch.tensor(_POSITIONS[1:])))
            pair = -1 if interleaved else -2
            x, y = first[..., :cut].unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair)
            turned = torch.stack((x * cos - y * sin, y * cos + x * sin), pair).flatten(-2)
            expected = torch.cat((turned, first[..., cut:].expand(len(others), -1, -1)), -1)
            error = (expected - others).abs().amax((0, 2))
            if (error <= _TOLERANCE * others.abs().amax((0, 2))).all():
                return rope
    return None
