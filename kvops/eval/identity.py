"""Names with fingerprints of models, files, classes and settings, so that a run is not continued with others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The file types of models and benchmark data.
KINDS = (".json", ".jsonl", ".safetensors", ".bin", ".model", ".parquet", ".arrow")
SAMPLE = 16  # values of each weight


def fingerprint(path: Path) -> str | None:
    """Hash a file's bytes, or the names and sizes of a folder's files; None if the path does not exist (a hub name)."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if not path.is_dir():
        return None
    files = sorted(x for x in path.rglob("*") if x.suffix in KINDS)
    text = "\n".join(f"{x.relative_to(path)} {x.stat().st_size}" for x in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def described(path: Path | str) -> str:
    """Return the file or folder name without its parents, plus a fingerprint of its content."""
    mark = fingerprint(Path(path))
    return f"{Path(path).resolve().name} ({mark})" if mark else str(path)


def described_model(model: PreTrainedModel) -> str:
    """Return a loaded model's name, plus a fingerprint of its weights: names, shapes, dtypes and some values of each.

    Args:
        model: without the wrappers of PEFT and `torch.compile`. Weights that PEFT has added are part of it.
    """
    weights = [*model.named_parameters(), *model.named_buffers()]
    mark = digest([(name, list(x.shape), str(x.dtype), sample(x)) for name, x in weights])
    return f"{Path(model.config._name_or_path or type(model).__name__).name} ({mark})"


@torch.no_grad()
def sample(x: Tensor) -> list[float]:
    """Return some values of a tensor; none if they are not in this process' memory, or if its type does not tell."""
    if x.is_meta or not x.numel():
        return []
    try:
        places = torch.linspace(0, x.numel() - 1, min(SAMPLE, x.numel()), dtype=torch.float64).long()
        return x[torch.unravel_index(places.to(x.device), x.shape)].double().tolist() if x.dim() else [float(x)]
    except (NotImplementedError, RuntimeError, TypeError):  # tensors of other classes, such as quantized ones
        return []


def described_class(cls: type) -> str:
    """Return a class's name, plus a fingerprint of its code and that of its bases outside kvops.

    Line numbers and comments do not count. Functions that it calls are not followed.
    """
    bases = [x for x in cls.__mro__ if x.__module__.partition(".")[0] not in ("kvops", "builtins", "abc", "typing")]
    return f"{cls.__name__} ({digest([members(x) for x in bases])})"


def members(cls: type) -> dict[str, Any]:
    """Return the methods and attributes that a class defines, without what Python or `dataclass` notes about it."""
    noted = {
        "__module__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__firstlineno__",
        "__static_attributes__",
        "_abc_impl",
    }
    return {x: y for x, y in vars(cls).items() if x not in noted and not x.startswith(("__dataclass_", "_abc_"))}


def digest(value: object) -> str:
    """Hash a value: numbers, texts, tensors, containers, dataclasses, functions. Of other objects, the type counts."""
    sha = hashlib.sha256()
    for part in parts(value):
        sha.update(part + b"\0")
    return sha.hexdigest()[:12]


def parts(x: object) -> Iterable[bytes]:
    yield type(x).__qualname__.encode()
    inside: Iterable[object] = ()
    if x is None or isinstance(x, (bool, int, float, str, bytes)):
        yield repr(x).encode()
    elif isinstance(x, Tensor):
        inside = str(x.dtype), list(x.shape), x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    elif isinstance(x, np.ndarray):
        yield x.tobytes()
    elif isinstance(x, Mapping):
        inside = sorted(x.items(), key=lambda item: repr(item))
    elif isinstance(x, (tuple, list)):
        inside = x
    elif isinstance(x, (set, frozenset)):
        inside = sorted(x, key=repr)
    elif isinstance(x, CodeType):
        inside = x.co_code, x.co_names, x.co_varnames, x.co_consts
    elif isinstance(x, FunctionType):
        inside = x.__code__, x.__defaults__, x.__kwdefaults__
    elif isinstance(x, property):
        inside = x.fget, x.fset
    elif isinstance(x, (classmethod, staticmethod)):
        inside = (x.__func__,)
    elif isinstance(x, cached_property):
        inside = (x.func,)
    elif isinstance(x, type):
        yield x.__qualname__.encode()
    elif is_dataclass(x):
        inside = [(y.name, getattr(x, y.name)) for y in fields(x)]
    for y in inside:
        yield from parts(y)
