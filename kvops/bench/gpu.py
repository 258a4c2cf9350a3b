"""GPU timing: events around the replay of a CUDA graph, over more copies of the inputs than fit in the L2 cache."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

SHORT = 2e-3  # seconds; shorter calls are captured several times, to make the launch (microseconds) negligible
MOST_CALLS = 512  # in one graph
COPY_BYTES = 2 << 30  # size of the large copy, and of the two buffers that smaller copies rotate through
# The most bytes of one copy_: in a CUDA graph of an H200, most copies of 512 MiB or more reach 2.7 TB/s instead of 4.2.
PIECE_BYTES = 256 << 20
MEMORY_SHARE = 4  # all copies of the inputs take at most a quarter of the memory


class Replayed:
    """A timed contender. calls[i] works on the i-th copy of the inputs; `before` runs first and is not timed."""

    def __init__(self, calls: Sequence[Callable[[], Any]], before: Sequence[Callable[[], None]] = ()):
        self.calls, self.before = calls, before
        self.rounds = 1
        self.clock = ""  # "graph", or "events" and why there is no graph
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._run = self._rounds

    def _rounds(self) -> None:
        for _ in range(self.rounds):
            for call in self.calls:
                call()

    def sample(self) -> float:
        """Seconds per call."""
        for restore in self.before:
            restore()
        self._start.record()
        self._run()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3 / (self.rounds * len(self.calls))

    def warm_up(self) -> None:
        """Run the first calls, which load, compile and allocate; then capture enough calls for a sample."""
        for _ in range(3):
            self.sample()
        self._capture()
        one = min(self.sample() for _ in range(3)) * len(self.calls)
        if not self.before and one < SHORT:
            self.rounds = max(1, min(math.ceil(SHORT / one), MOST_CALLS // len(self.calls)))
            self._capture()
        self.sample()

    def _capture(self) -> None:
        self._run = self._rounds
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._rounds()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            torch.cuda.synchronize()
            self.clock = f"events, not capturable ({first_line(error)})"
        else:
            self._run, self.clock = graph.replay, "graph"


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join("".join(x if x.isprintable() else " " for x in text.splitlines()[0]).split())[:200]


def usable() -> bool:
    """Whether this process can still use the GPU; False after an illegal access, for instance."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@contextmanager
def at_most(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Call `give_up` in another thread if the block takes longer: a hung kernel blocks its process forever."""
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def memory_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def copies(moved: int, held: int) -> int:
    """Return how many copies of the inputs fill the L2 cache several times, as far as the memory allows.

    Args:
        moved: bytes that a call reads and writes.
        held: bytes of the memory of one copy.
    """
    fits = memory_bytes() // MEMORY_SHARE // max(1, held)
    return max(1, min(math.ceil(8 * l2_bytes() / max(1, moved)), MOST_CALLS, fits))


@functools.cache
def _buffers(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two buffers of COPY_BYTES: random values and a target."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    return source, torch.empty_like(source)


def copy_probes(moved: int, device: str) -> dict[str, Replayed]:
    """Return two probes: copies of the whole buffer, and of as many bytes as the row moves, each time elsewhere."""
    source, target = _buffers(device)
    found = {"large": Replayed([partial(_copy, target, source)])}
    part = moved // 8  # floats read, and as many written
    if 0 < part < source.numel():
        places = [slice(i * part, (i + 1) * part) for i in range(min(source.numel() // part, MOST_CALLS))]
        found["same"] = Replayed([partial(_copy, target[p], source[p]) for p in places])
    return found


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    for piece, values in zip(target.split(PIECE_BYTES // 4), source.split(PIECE_BYTES // 4)):
        piece.copy_(values)


def copied(probe: str, moved: int) -> int:
    """Return the bytes that a probe reads and writes per call."""
    return 2 * COPY_BYTES if probe == "large" else moved // 8 * 8
