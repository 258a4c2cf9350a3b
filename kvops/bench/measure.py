"""Timing: everything that is compared runs in turns in one process, beside the memory bandwidth of that moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _lib
from .rows import Case, Row, size

SHORT = 1e-3  # seconds; what takes less is called several times per sample


@dataclass
class Contender:
    """Something to time. `before` runs ahead of every call, outside the clock."""

    call: Callable[[], Any]
    before: Callable[[], None] | None = None
    calls: int = 1  # per sample

    def sample(self) -> float:
        """Seconds per call."""
        if self.before:
            self.before()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        return (time.perf_counter() - start) / self.calls

    def warm_up(self) -> None:
        first = self.sample()
        if self.before is None and first < 20 * SHORT:
            self.calls = max(1, int(SHORT / min(self.sample() for _ in range(3))))


def probes(row: Row, case: Case) -> dict[str, Contender]:
    """The ways to move as many bytes as the row does; the fastest of them is the bandwidth to compare with."""
    if not row.against:
        return {}
    touched = row.touched(case)
    if row.against == "read":
        kinds = {"simd sum": 0, "four accumulators": 1}
        return {
            name: Contender(lambda kind=kind: [_lib.probe_read(x, kind) for x in touched])
            for name, kind in kinds.items()
        }
    flat = [x.view(-1) for x in (case.k, case.v)]
    if row.against == "copy":
        pairs = [(x, source[: x.numel()]) for x, source in zip(touched, flat)]
        return {
            "memcpy": Contender(lambda: [_lib.probe_copy(x, source, 0) for x, source in pairs]),
            "non-temporal": Contender(lambda: [_lib.probe_copy(x, source, 1) for x, source in pairs]),
            "torch.copy_": Contender(lambda: [x.view(-1).copy_(source) for x, source in pairs]),
        }
    # Compaction to a share r reads r n rows and writes r n, of which r (r n) are the same: it touches (2 - r) r n rows.
    # So does a shift of r n rows by (1 - r) r n.
    pairs = [(x[:m], x[m - m * m // x.numel() :][:m]) for x in flat for m in [touched[0].numel()]]
    return {"shift": Contender(lambda: [_lib.probe_copy(x, source, 2) for x, source in pairs])}


def contenders(row: Row, case: Case, compiled: bool) -> dict[str, Contender]:
    """kvops' forms (keys "kvops ..."), the baselines, and the bandwidth probes (keys "probe ...")."""
    args = row.args(case)
    found = {
        f"kvops {form}": Contender(
            lambda call=call: call(case), case.restore if row.restore and form == "in place" else None
        )
        for form, call in row.forms.items()
    }
    if row.parts:
        found["parts"] = Contender(lambda: row.parts(case))
    found["eager"] = Contender(lambda: row.eager(*args))
    if compiled:
        torch.compiler.reset()
        function = torch.compile(row.eager, fullgraph=True, dynamic=False)
        found["compile"] = Contender(lambda: function(*args))
    return found | {f"probe {name}": probe for name, probe in probes(row, case).items()}


def bandwidth(row: Row, case: Case, best: dict[str, float], rate: float) -> dict:
    """What the fastest probe reached, and the share of it that `rate` (bytes per second) is."""
    if not row.against:
        return {}
    probe = min((key for key in best if key.startswith("probe")), key=best.get)
    reached = size(*row.touched(case)) * (1 if row.against == "read" else 2) / best[probe]
    found = {"of": row.against, "by": probe.removeprefix("probe "), "gb_per_s": reached / 1e9, "share": rate / reached}
    return {"bandwidth": found}


@torch.no_grad()
def measure(name: str, row: Row, case: Case, repeats: int, compiled: bool, tick: Callable[[], Any]) -> list[dict]:
    """One result per form of the row. `tick` is called after each repetition."""
    rivals = contenders(row, case, compiled)
    for rival in rivals.values():
        rival.warm_up()
    seconds: dict[str, list[float]] = {key: [] for key in rivals}
    for _ in range(repeats):  # in turns, so that a machine that speeds up or slows down does so for all
        for key, rival in rivals.items():
            seconds[key].append(rival.sample())
        tick()
    best = {key: min(x) for key, x in seconds.items()}
    median = {key: statistics.median(x) for key, x in seconds.items()}

    results = []
    for form in row.forms:
        key = f"kvops {form}"
        rate = row.bytes(case) / best[key]
        others = [x for x in ("eager", "compile") if x in best] + (["parts"] if row.parts and form == "fresh" else [])
        results.append(
            {
                "operator": name,
                "form": form,
                "dtype": str(case.dtype).removeprefix("torch."),
                "shape": [1, case.heads, case.n, case.d],
                "seconds": {"best": best[key], "median": median[key]},
                "bytes": row.bytes(case),
                "gb_per_s": rate / 1e9,
                **bandwidth(row, case, best, rate),
                # how many times longer the other takes
                "ratio": {
                    x: {"best": best[x] / best[key], "median": median[x] / median[key], "seconds": best[x]}
                    for x in others
                },
            }
        )
    return results
