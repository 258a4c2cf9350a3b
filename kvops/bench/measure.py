"""Timing: compared calls run in turns in one process, together with probes of the memory bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _lib
from . import gpu
from .rows import Case, Row, size

SHORT = 1e-3  # seconds; shorter calls run several times per sample
MOST_SHARE = 3.0  # the most a row may plausibly exceed a bandwidth: its bytes may be cached where the probe's are not
TRIES = 3  # for an implausible probe
OUTPUTS = ("out", "lagkv_out", "ladder_out", "rope_out")  # attributes of a Case that calls write to
GOALS_FROM = 131072  # tokens; below, launch overhead matters


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Contender:
    """A timed contender on the CPU.

    Attributes:
        call: the timed call.
        before: runs before every sample and is not timed.
        calls: calls per sample; `warm_up` sets it so that a sample is not too short for the clock.
    """

    call: Callable[[], Any]
    before: Callable[[], None] | None = None
    calls: int = 1

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


def in_turns(rivals: Iterable[Contender], seconds: float, least: int) -> list[list[float]]:
    """Warm up, then sample the rivals in turns for `seconds`, for at least `least` rounds. Returns the rounds."""
    rivals = list(rivals)
    for rival in rivals:
        rival.warm_up()
    end = time.monotonic() + seconds
    rounds: list[list[float]] = []
    while len(rounds) < least or time.monotonic() < end:
        rounds.append([rival.sample() for rival in rivals])
    return rounds


def cpu_seconds(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Run the calls in turns, once to warm up and then `rounds` times; return the median CPU seconds of each.

    CPU time, unlike time on the clock, hardly depends on other work on the machine.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(own[1:]) for name, own in seconds.items()}


def probes(row: Row, case: Case) -> dict[str, Contender]:
    """Return ways to move as many bytes as the row on the CPU; the fastest gives the bandwidth to compare with."""
    if not row.against:
        return {}
    touched = row.touched(case)
    if row.against == "read":
        kinds = {"simd sum": 0, "four accumulators": 1}
        return {name: Contender(partial(_read, touched, kind)) for name, kind in kinds.items()}
    flat = [x.view(-1) for x in (case.k, case.v)]
    if row.against == "copy":
        pairs = [(x, source[: x.numel()]) for x, source in zip(touched, flat)]
        return {
            "memcpy": Contender(lambda: [_lib.probe_copy(x, source, 0) for x, source in pairs]),
            "non-temporal": Contender(lambda: [_lib.probe_copy(x, source, 1) for x, source in pairs]),
            "torch.copy_": Contender(lambda: [x.view(-1).copy_(source) for x, source in pairs]),
        }
    # Compaction to a fraction r reads r n rows and writes r n, of which r (r n) are the same: it touches (2 - r) r n
    # rows. So does a shift of r n rows by (1 - r) r n.
    pairs = [(x[:m], x[m - m * m // x.numel() :][:m]) for x in flat for m in [touched[0].numel()]]
    return {"shift": Contender(lambda: [_lib.probe_copy(x, source, 2) for x, source in pairs])}


def _read(tensors: Iterable[Tensor], kind: int) -> None:
    for x in tensors:
        _lib.probe_read(x, kind)


def on_gpu(case: Case) -> bool:
    return case.device != "cpu"


def contenders(row: Row, cases: list[Case], compiled: bool) -> dict[str, Contender | gpu.Replayed]:
    """Return everything that is timed for a row.

    Args:
        row: an entry of `ROWS`.
        cases: inputs that differ only in their values; on a GPU the calls rotate through them.
        compiled: also time the baseline under torch.compile.

    Returns:
        kvops' forms ("kvops ..."), the baselines, the stages ("stage ...") and the bandwidth probes ("probe ...").
    """
    case, cuda = cases[0], on_gpu(cases[0])

    def timed(calls: list[Callable[[], Any]], restore: bool = False) -> Contender | gpu.Replayed:
        before = [c.restore for c in cases] if restore else []
        if cuda:
            return gpu.Replayed(calls, before)
        return Contender(calls[0], before[0] if before else None)

    args = [row.args(c) for c in cases]
    found = {
        f"kvops {form}": timed([partial(call, c) for c in cases], row.restore and form == "in place")
        for form, call in row.forms.items()
    }
    for name in row.peers(case):
        found[name] = timed([row.peers(c)[name] for c in cases])
    if row.parts and not cuda:
        found["parts"] = timed([partial(row.parts, case)])
    found["eager"] = timed([partial(row.eager, *a) for a in args])
    if compiled:
        torch.compiler.reset()
        function = torch.compile(row.eager, fullgraph=True, dynamic=False)
        found["compile"] = timed([partial(function, *a) for a in args])
    if not cuda:
        return found | {f"probe {name}": probe for name, probe in probes(row, case).items()}
    for name, call in row.stages.items():
        found[f"stage {name}"] = timed([partial(call, c) for c in cases])
    if row.against:
        found |= {f"probe {name}": probe for name, probe in gpu.copy_probes(row.bytes(case), case.device).items()}
    return found


def bandwidth(row: Row, case: Case, seconds: dict[str, float], rate: float) -> dict[str, Any]:
    """Return the bandwidth that the fastest probe reached on the CPU, and the row's fraction of it.

    Args:
        row, case: the measured row and its inputs.
        seconds: seconds per call, by contender.
        rate: bytes per second of the row.

    Returns:
        {"bandwidth": ...}, in GB/s; {} if the row has no bandwidth to compare with.
    """
    probe = min((key for key in seconds if key.startswith("probe")), key=lambda key: seconds[key], default=None)
    if probe is None:
        return {}
    reached = size(*row.touched(case)) * (1 if row.against == "read" else 2) / seconds[probe]
    found = {"of": row.against, "by": probe.removeprefix("probe "), "gb_per_s": reached / 1e9, "share": rate / reached}
    return {"bandwidth": found}


def copy_bandwidth(row: Row, case: Case, seconds: dict[str, float], rate: float) -> dict[str, Any]:
    """Return the bandwidth on a GPU: of a large copy, and of one that moves as many bytes as the row."""
    moved = row.bytes(case)
    reached = {x: gpu.copied(x, moved) / seconds[f"probe {x}"] for x in ("large", "same") if f"probe {x}" in seconds}
    if "large" not in reached:
        return {}
    same = reached.get("same", reached["large"])  # a row that moves more is compared with the large copy
    found = {"of": "copy", "by": "torch.copy_", "gb_per_s": reached["large"] / 1e9, "share": rate / reached["large"]}
    return {"bandwidth": found | {"same_bytes": {"gb_per_s": same / 1e9, "share": rate / same}}}


def plausible(found: dict[str, Any]) -> bool:
    """Whether a measured bandwidth is plausible, that is, no probe was disturbed."""
    band = found.get("bandwidth")
    return band is None or max(band["share"], band.get("same_bytes", band)["share"]) <= MOST_SHARE


def make_cases(row: Row, like: Case) -> list[Case]:
    """Return `like`, and on a GPU more cases with other values, so that no call finds its inputs in the cache."""
    if not on_gpu(like):
        return [like]
    row.args(like)  # creates them
    count = gpu.copies(row.bytes(like), like.held)
    return [like] + [
        Case(like.n, like.dtype, like.heads, like.d, like.device, like.batch, seed) for seed in range(1, count)
    ]


def check_written(cases: list[Case], rival: gpu.Replayed) -> None:
    """Check that the timed calls write all of their results, which are filled with NaN first."""
    results = [x for c in cases for name in OUTPUTS for x in vars(c).get(name, ())]
    for x in results:
        x.fill_(torch.nan)
    rival.sample()
    if any(x.isnan().any() for x in results):
        raise RuntimeError("the call that is timed left parts of its result unwritten")


@torch.no_grad()
def measure(name: str, row: Row, case: Case, repeats: int, compiled: bool) -> list[dict[str, Any]]:
    """Time a row in one shape and dtype, all contenders in turns.

    Args:
        name: the row's name.
        row: an entry of `ROWS`.
        case: its inputs.
        repeats: samples per contender.
        compiled: also time the baseline under torch.compile.

    Returns:
        One result per form of the row, as it goes into a record.

    Raises:
        RuntimeError: the GPU is lost.
    """
    cases, cuda = make_cases(row, case), on_gpu(case)
    rivals = contenders(row, cases, compiled)
    failed: dict[str, str] = {}
    for key, rival in list(rivals.items()):
        try:
            rival.warm_up()
            if isinstance(rival, gpu.Replayed) and key == "kvops out=":
                check_written(cases, rival)
        except Exception as error:  # torch.compile without a compiler, or no memory for the eager one: others go on
            failed[key] = gpu.first_line(error)
            del rivals[key]
            if cuda and not gpu.usable():
                raise RuntimeError(f"{key}: {failed[key]}") from error
    seconds: dict[str, list[float]] = {key: [] for key in rivals}
    for _ in range(repeats):  # in turns, so that changes of the machine's speed affect all alike
        for key, rival in rivals.items():
            seconds[key].append(rival.sample())

    def compared(form: str) -> dict[str, Any]:
        """Return the bandwidth and the fraction of it that a form reaches."""
        typical = {key: (statistics.median if cuda else min)(x) for key, x in seconds.items()}
        rate = row.bytes(case) / typical[f"kvops {form}"]
        return (copy_bandwidth if cuda else bandwidth)(row, case, typical, rate)

    probed = [key for key in rivals if key.startswith("probe")]
    forms = [form for form in row.forms if f"kvops {form}" in rivals]
    for _ in range(TRIES):  # on a busy machine a probe may never run undisturbed
        if all(plausible(compared(form)) for form in forms):
            break
        for _ in range(repeats):
            for key in probed:
                seconds[key].append(rivals[key].sample())
    best = {key: min(x) for key, x in seconds.items()}
    median = {key: statistics.median(x) for key, x in seconds.items()}
    typical = median if cuda else best

    results = []
    for form in row.forms:
        key, failures = f"kvops {form}", {x: why for x, why in failed.items() if not x.startswith("kvops")}
        result: dict[str, Any] = {
            "operator": name,
            "form": form,
            "dtype": str(case.dtype).removeprefix("torch."),
            "shape": [case.batch, case.heads, case.n, case.d],
        }
        results.append(result)
        if key in failed:
            result["error"] = failed[key]
            continue
        rate = row.bytes(case) / typical[key]
        named = ("eager", "compile", *row.peers(case), "parts")
        others = [x for x in named if x in best and (x != "parts" or form == "fresh")]
        found = compared(form)
        if not plausible(found):
            of, reached = found["bandwidth"]["of"], found["bandwidth"]["gb_per_s"]
            failures[f"probe {found.pop('bandwidth')['by']}"] = (
                f"implausible: a {of} of {reached:.3g} GB/s beside a row of {rate / 1e9:.3g} GB/s; is the machine busy?"
            )
        result |= {
            "seconds": {"best": best[key], "median": median[key]},
            "bytes": row.bytes(case),
            "gb_per_s": rate / 1e9,
            **({"gflop_per_s": row.flops(case) / typical[key] / 1e9} if row.flops else {}),
            **found,
            # how many times longer the other takes
            "ratio": {
                x: {"best": best[x] / best[key], "median": median[x] / median[key], "seconds": typical[x]}
                for x in others
            },
        }
        if cuda:
            result |= {
                "copies": len(cases),  # of the inputs, which the calls rotate through
                "clock": {x: rival.clock for x in (key, *others) if isinstance(rival := rivals[x], gpu.Replayed)},
                "stages": {x: median[f"stage {x}"] / median[key] for x in row.stages if f"stage {x}" in median},
                "failed": failures,
            }
            if case.n >= GOALS_FROM and (form != "in place" or len(row.forms) == 1):
                goals = {"copy": row.copy_goal, "eager": row.eager_goal, **row.peer_goals}
                result["goals"] = {x: goal for x, goal in goals.items() if goal}
        elif failures:
            result["failed"] = failures
    return results
