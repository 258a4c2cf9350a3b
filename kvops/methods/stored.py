"""Settings that a policy takes as the path of a safetensors file."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

T = TypeVar("T")


def to_file(who: str, path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors on the CPU to a safetensors file. An existing file is replaced when the new one is complete.

    Raises:
        TypeError: The path is not a str or a Path.
        FileNotFoundError: There is no such folder.
    """
    from safetensors.torch import save_file

    if not isinstance(path, (str, Path)):
        raise TypeError(f"{who}: path must be a str or a Path, got {type(path).__name__}")
    if not (folder := Path(path).parent).is_dir():
        raise FileNotFoundError(f"{who}: there is no folder {folder}")
    new = Path(f"{path}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        save_file(tensors, new, metadata)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def from_file(who: str, setting: str, path: str | Path, load: Callable[[str], T]) -> T:
    """What `load` reads from a file. Those read last are remembered, and read again once they have changed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The path is invalid, or `load` raises it.
    """
    try:
        real = os.path.realpath(path)
        x = os.stat(real)
    except (OSError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{who}: {setting} must be the path of a file, got {str(path)!r}: {error}") from error
    try:
        return cast(T, _loaded(load, real, (x.st_mtime_ns, x.st_size, x.st_ino)))
    except ValueError as error:
        raise ValueError(f"{who}: {setting}={str(path)!r}: {error}") from error


@functools.lru_cache(4)
def _loaded(load: Callable[[str], Any], path: str, version: tuple[int, ...]) -> Any:
    """version: of the file."""
    return load(path)
