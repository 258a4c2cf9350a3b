"""The FlashAttention front end: `attention` runs the best FlashAttention on this machine and returns its log-sum-exp.

The log-sum-exp (lse) makes observation windows cheap: given it, `ops.window_scores` reads K once. The backends, best
first (`attention_backends` says which are available, and why the others are not):

```text
flash_attn_3    the package `flash_attn_interface` (FlashAttention-3), on Hopper
cudnn           aten::_scaled_dot_product_cudnn_attention, on Hopper and later, for 256 rows and more
flash_attn_2    the package `flash_attn`, 2.7 or later
torch_flash     aten::_scaled_dot_product_flash_attention, on the CPU ..._flash_attention_for_cpu
kvops           ops.window_attention in blocks of 256 rows: whatever the others do not support, or run more slowly
```

On the CPU `kvops` runs calls with few query rows, where it is faster (see KVOPS_ROWS), and `torch_flash` runs the other
calls that it supports.

This module adds two features that torch's operators lack. Their causal mask is aligned to the top left, so a call with
t < n queries becomes two calls: the old keys without a mask, and the square of new keys with one. The results are
merged by their lse, which is exact and builds no mask. Rows of a left-padded batch run one by one. K and V are never
expanded to the query heads.

The module is not called `attention.py` because `kvops.attention` is the function. It would hide a module of that name
from `from kvops import attention` and `import kvops.attention as x`, which both use the package's attribute.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .api import MAX_WINDOW, window_attention
from .checks import check_attention, check_starts, plain

#: Whether this CPU has AMX, with which torch multiplies bf16 matrices.
AMX: bool = torch.cpu._is_amx_tile_supported()
#: On the CPU, the largest number of query rows for which `kvops` is preferred to `torch_flash`, without and with AMX.
#: The pair is (each query head has its own KV head, several query heads share one). Measured with
#: python -m kvops.bench.attention: bench/results/cpu-attention*.json.
KVOPS_ROWS: dict[bool, dict[torch.dtype, tuple[float, float]]] = {
    False: {
        torch.float32: (0, 128),
        torch.float16: (math.inf, math.inf),
        torch.bfloat16: (math.inf, math.inf),
    },
    True: {
        torch.float32: (1024, 256),
        torch.float16: (1024, math.inf),
        torch.bfloat16: (128, 16),
    },
}


class Attention(NamedTuple):
    """The result of `attention`; unpacks as (out, lse, backend).

    Attributes:
        out: [b, Hq, t, dv] of q's dtype.
        lse: fp32 [b, Hq, t], natural logarithm, without the sink.
        backend: The name of the backend that ran.
    """

    out: Tensor
    lse: Tensor
    backend: str


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    starts: Tensor | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    key_bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
) -> Attention:
    """Compute softmax(scale * q k^T) v and its log-sum-exp with the best FlashAttention that supports the call.

    Args:
        q: [b, Hq, t, d], torch.float32, float16 or bfloat16. Query head h belongs to KV head h // (Hq / Hk).
        k: [b, Hk, n, d] of q's dtype. Or, if q is torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, or torch.int8
            with `k_scale` and `v_scale`, which only the backend "kvops" supports.
        v: [b, Hk, n, dv] of k's dtype.
        causal: If True, the t queries belong to the last t of the n keys, and query i sees keys up to n - t + i. If
            False, each query sees all keys.
        scale: The factor of the logits; 1 / sqrt(d) if None.
        starts: int32 [b] in [0, n], for left padding: no query of row b sees the keys [0, starts[b]). A query that sees
            no key, such as one of the padding, gives out 0 and lse -inf.
        softcap: If not 0, logits become softcap * tanh(logit / softcap).
        sink_logits: fp32 [Hq], one more logit in each row's softmax that belongs to no key. The lse is without it.
        key_bias: fp32 [b, Hk, n], added to the logits of each key, as in `ops.window_attention`; only the backend
            "kvops" supports it.
        k_scale: fp32 [b, Hk, n], what int8 keys are multiplied by (`quantize_rows`).
        v_scale: The same for the values.
        backend: A name from `attention_backends()`, which must support this call; None selects the best that does.

    Returns:
        out [b, Hq, t, dv] of q's dtype, lse fp32 [b, Hq, t] (natural logarithm), and the name of the backend.

    Raises:
        TypeError: q, k or v is not a tensor.
        ValueError: An argument is wrong, or `backend` does not support this call. The message then gives the reason and
            the backends that do.
    """
    scale, softcap = plain(scale), plain(softcap)
    check_attention("attention", q, k, v, causal, scale, starts, sink_logits, softcap, key_bias, k_scale, v_scale)
    given = dict(key_bias=key_bias, k_scale=k_scale, v_scale=v_scale)
    by_key = {name: x for name, x in given.items() if x is not None}
    q = q if q.stride(3) == 1 else q.contiguous()  # unlike K and V, the queries may have any strides
    call = _Call(q, k, v, causal, q.shape[3] ** -0.5 if scale is None else scale, starts, softcap, by_key)
    name = _choice(call, backend)
    out, lse = BACKENDS[name].run(call)
    if sink_logits is not None:  # its weight in the softmax goes to no key; a row that sees nothing stays 0
        out = (out * torch.sigmoid(lse - sink_logits[:, None]).unsqueeze(-1)).to(q.dtype)
    return Attention(out, lse, name)


def attention_backends(device: torch.device | str = "cpu") -> dict[str, str]:
    """List the backends of `attention`, best first.

    Args:
        device: The device to ask about.

    Returns:
        For each backend "available", or the reason why it cannot run on that device.
    """
    device = torch.device(device)
    return {name: backend.missing(device) or "available" for name, backend in BACKENDS.items()}


class _Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float
    starts: Tensor | None
    softcap: float
    by_key: dict[str, Any]  # those of key_bias, k_scale and v_scale that are given


def _choice(call: _Call, forced: str | None) -> str:
    """The name of the backend that runs the call."""
    if forced is not None:
        if forced not in BACKENDS:
            raise ValueError(
                f"attention: backend must be one of {', '.join(map(repr, BACKENDS))}, or None, got {forced!r}"
            )
        why = BACKENDS[forced].why_not(call)
        if why:
            others = [name for name, backend in BACKENDS.items() if not backend.why_not(call)]
            raise ValueError(f"attention: backend={forced!r} cannot run this call: {why}; expected one of {others}")
        return forced
    return next(name for name, backend in BACKENDS.items() if not backend.why_not(call) and backend.suits(call))


# Backends. `missing` says why a backend cannot run at all, `why_not` why it cannot run this call; None if it can.


class _Backend:
    def missing(self, device: torch.device) -> str | None:
        return None

    def why_not(self, call: _Call) -> str | None:
        return self.missing(call.q.device)

    def suits(self, call: _Call) -> bool:
        """Whether this backend is a good choice for the call, given its place in the order."""
        return True

    def run(self, call: _Call) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class _Kvops(_Backend):
    def run(self, call: _Call) -> tuple[Tensor, Tensor]:
        q, k, v, causal, scale, starts, softcap, by_key = call
        t, n = q.shape[2], k.shape[2]
        visible = torch.arange(n - t + 1, n + 1, dtype=torch.int32, device=q.device)
        if not causal:
            visible = torch.full_like(visible, n)
        if 0 < t <= MAX_WINDOW:
            options: dict[str, Any] = dict(scale=scale, softcap=softcap, starts=starts, **by_key)
            return window_attention(q, k, v, visible, scores=False, **options)[:2]
        out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)
        for first in range(0, t, MAX_WINDOW):
            rows = slice(first, min(t, first + MAX_WINDOW))
            end = n - t + rows.stop if causal else n  # the keys that the block's last row sees
            part, part_lse, _ = window_attention(
                q[:, :, rows],
                k[:, :, :end],
                v[:, :, :end],
                visible[rows],
                scale=scale,
                softcap=softcap,
                starts=None if starts is None else starts.clamp(max=end),
                scores=False,
                **{name: x[:, :, :end] for name, x in by_key.items()},
            )
            out[:, :, rows], lse[:, :, rows] = part, part_lse
        return out, lse


class _Flash(_Backend):
    """What all FlashAttentions have in common."""

    softcap = False  # supports softcap
    packed = False  # runs rows of different lengths in one call
    own_dv = False  # supports a head dim of V that differs from K's

    def why_not(self, call: _Call) -> str | None:
        q, k, v = call.q, call.k, call.v
        if why := super().why_not(call):
            return why
        d, dv = q.shape[3], v.shape[3]
        if 0 in (*q.shape, *k.shape, *v.shape):
            return "a dim is 0"
        if call.softcap and not self.softcap:
            return "it does not support softcap"
        if call.by_key:
            return f"it does not support {' and '.join(call.by_key)}"
        if k.dtype != q.dtype:
            return f"it does not support {k.dtype} keys"
        if q.is_cuda and q.dtype == torch.float32:
            return "it does not support torch.float32"
        if d != dv and not self.own_dv:
            return f"V's head dim must be K's, {d}, got {dv}"
        if q.is_cuda and (d % 8 or dv % 8 or d > 256 or dv > 256):
            return f"head dims must be multiples of 8 up to 256, got {d} and {dv}"
        if call.starts is not None and not self.packed and _is_traced():
            return "it reads starts on the host, which torch.compile and CUDA graphs do not support"
        return None

    def suits(self, call: _Call) -> bool:
        # `kvops` runs a decode step of a padded batch as one window: it does not wait for starts, nor call per row.
        return call.starts is None or call.q.shape[2] > MAX_WINDOW


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class _Torch(_Flash):
    def square(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Returns out and lse. If causal, there are as many queries as keys."""
        raise NotImplementedError

    def run(self, call: _Call) -> tuple[Tensor, Tensor]:
        q, k, v, causal, scale, starts, _, _ = call
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        if starts is None:
            return self.rectangle(q, k, v, causal, scale)
        t, n = q.shape[2], k.shape[2]
        out, lse = q.new_zeros((*q.shape[:3], v.shape[3])), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        rows = starts.tolist()
        check_starts("attention", rows, n)
        for row, start in enumerate(rows):
            hidden = max(0, start - (n - t)) if causal else 0  # queries of the padding
            if hidden < t and start < n:
                at = (slice(row, row + 1), slice(None), slice(hidden, None))
                keys = (at[0], slice(None), slice(start, None))
                out[at], lse[at] = self.rectangle(q[at], k[keys], v[keys], causal, scale)
        return out, lse

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Returns out and lse of the last t queries."""
        old = k.shape[2] - q.shape[2]
        if not causal or q.shape[2] == 1 or old == 0:
            return self.square(q, k, v, causal and old == 0, scale)
        out_old, lse_old = self.square(q, k[:, :, :old], v[:, :, :old], False, scale)
        out_new, lse_new = self.square(q, k[:, :, old:], v[:, :, old:], True, scale)
        share = torch.sigmoid(lse_new - lse_old).unsqueeze(-1)
        return out_old.float().lerp_(out_new.float(), share).to(q.dtype), torch.logaddexp(lse_old, lse_new)


class _TorchFlash(_Torch):
    def missing(self, device: torch.device) -> str | None:
        if device.type == "cpu":
            return None
        why = _not_cuda(device, 8)
        if why is None and not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without it"
        return why

    def why_not(self, call: _Call) -> str | None:
        if why := super().why_not(call):
            return why
        if call.q.is_cuda and not torch.backends.cuda.can_use_flash_attention(_params(call)):
            return "torch.backends.cuda.can_use_flash_attention refuses it"
        return None

    def suits(self, call: _Call) -> bool:
        grouped = call.q.shape[1] > call.k.shape[1]
        slower = not call.q.is_cuda and call.q.shape[2] <= KVOPS_ROWS[AMX][call.q.dtype][grouped]
        return not slower and super().suits(call)

    def square(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if q.is_cuda:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
            return out, lse
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


class _Cudnn(_Torch):
    own_dv = True

    def missing(self, device: torch.device) -> str | None:
        why = _not_cuda(device, 8)
        if why is None and not torch.backends.cudnn.is_available():
            return "this torch was built without cuDNN"
        return why

    def why_not(self, call: _Call) -> str | None:
        if why := super().why_not(call):
            return why
        if not torch.backends.cuda.can_use_cudnn_attention(_params(call)):
            return "torch.backends.cuda.can_use_cudnn_attention refuses it"
        return None

    def suits(self, call: _Call) -> bool:
        # cuDNN makes a plan for every new shape, which pays only in a prefill.
        wide = call.q.shape[2] >= MAX_WINDOW and torch.cuda.get_device_capability(call.q.device)[0] >= 9
        return wide and super().suits(call)

    def square(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        return out, lse.reshape(q.shape[:3])  # [b, Hq, t, 1] in some versions


class _Package(_Flash):
    """The flash-attn packages: their causal mask is aligned to the bottom right, and sequences may differ in length.

    Tensors are [b, tokens, heads, d]. A left-padded batch is passed as 2 b consecutive sequences: the padding of each
    row, then its tokens. So nothing has to be packed and the host reads nothing. The results of the padding's queries
    are overwritten.
    """

    softcap = packed = True

    def __init__(self, module: str, *capabilities: int):
        self.module, self.capabilities = module, capabilities

    @functools.cached_property
    def functions(self) -> Any:
        """The module's (flash_attn_func, flash_attn_varlen_func), or the reason why they are missing."""
        try:
            module = importlib.import_module(self.module)
        except Exception as error:  # whatever a broken binary raises
            return f"{self.module} cannot be imported: {error}"
        version = getattr(module, "__version__", None)
        if version is not None and tuple(map(int, version.split(".")[:2])) < (2, 7):
            return f"{self.module} must be 2.7 or later, found {version}"
        return module.flash_attn_func, module.flash_attn_varlen_func

    def missing(self, device: torch.device) -> str | None:
        why = _not_cuda(device, *self.capabilities)
        return why or (self.functions if isinstance(self.functions, str) else None)

    def run(self, call: _Call) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in call[:3])
        b, t, n = *q.shape[:2], k.shape[1]
        options = dict(softmax_scale=call.scale, causal=call.causal, softcap=call.softcap)
        function = self.functions[call.starts is not None]
        if "return_attn_probs" in inspect.signature(function).parameters:
            options["return_attn_probs"] = True  # early versions of FlashAttention-3 always return the lse
        if call.starts is None:
            out, lse, *_ = function(q, k, v, **options)
            return out.transpose(1, 2), lse
        starts = call.starts.clamp(0, n)
        hidden = (starts - (n - t)).clamp(min=0) if call.causal else torch.where(starts == n, t, 0).to(starts.dtype)
        out, lse, *_ = function(
            *(x.flatten(0, 1) for x in (q, k, v)),
            cu_seqlens_q=_boundaries(hidden, t),
            cu_seqlens_k=_boundaries(starts, n),
            max_seqlen_q=t,
            max_seqlen_k=n,
            **options,
        )
        out, lse = out.unflatten(0, (b, t)).transpose(1, 2), lse.unflatten(1, (b, t)).transpose(0, 1)
        padding = (torch.arange(t, device=q.device) < hidden[:, None])[:, None]
        return out.masked_fill(padding.unsqueeze(-1), 0.0), lse.masked_fill(padding, -torch.inf)


def _boundaries(first: Tensor, size: int) -> Tensor:
    """The boundaries of sequences of `first` and size - first tokens, row after row: int32 [2 b + 1]."""
    rows = torch.arange(0, len(first) * size, size, dtype=torch.int32, device=first.device)
    inner = torch.stack((rows, rows + first), 1).flatten()
    return torch.nn.functional.pad(inner, (0, 1), value=len(first) * size)


def _not_cuda(device: torch.device, lowest: int, highest: int = 99) -> str | None:
    """Why a kernel for GPUs of compute capability lowest.0 to highest.9 cannot run on the device; None if it can."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if not lowest <= major <= highest:
        wanted = f"{lowest}.x" if lowest == highest else f"{lowest}.0 or higher"
        return f"it needs compute capability {wanted}, this GPU has {major}.{minor}"
    return None


def _params(call: _Call) -> torch.backends.cuda.SDPAParams:
    return torch.backends.cuda.SDPAParams(call.q, call.k, call.v, None, 0.0, False, True)


BACKENDS: dict[str, _Backend] = {
    "flash_attn_3": _Package("flash_attn_interface", 9, 9),
    "cudnn": _Cudnn(),
    "flash_attn_2": _Package("flash_attn", 8),
    "torch_flash": _TorchFlash(),
    "kvops": _Kvops(),
}
