"""The memory traffic of the CUDA kernels, as the simulator (cudasim/cudasim_traffic.cpp) counts it. Not measured.

python tests/cuda/traffic.py              # every call of the table, and the places of its worst accesses
python tests/cuda/traffic.py -k lag       # only calls whose name contains this; "pages": the paged ones
python tests/cuda/traffic.py --write      # regenerate the table in docs/cuda.md
python tests/cuda/traffic.py --plans h200 # grids and waves at 131,072 tokens; runs no kernel

Uses the library build/cudasim-thread/libkvops_cudasim_traffic.so, which tests/cuda/test_traffic.py builds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/cudasim-thread/libkvops_cudasim_traffic.so"
PAGE = ROOT / "docs/cuda.md"
BEGIN, END = "<!-- traffic -->\n", "<!-- end of traffic -->\n"


class Card(NamedTuple):
    """A GPU model. `column` is its column in the table of registers."""

    multiprocessors: int
    l2: int  # bytes
    l1: int  # per multiprocessor, including its shared memory
    shared: int
    column: int


CARDS = {
    "a100": Card(108, 40 << 20, 192 << 10, 164 << 10, 0),
    "h200": Card(132, 50 << 20, 256 << 10, 228 << 10, 1),
    "b200": Card(148, 126 << 20, 256 << 10, 228 << 10, 2),
}
TOKENS = 131072  # with 8 heads: the size that the scaled-down cards stand for
HEADS = 8


class Call(NamedTuple):
    """A benchmark row at a number of tokens, on an H200 scaled down in proportion, with limits for its traffic.

    dram, l2: multiples of the bytes that must move (`Row.bytes`). sectors: of all requests, a multiple of the fewest
    that their bytes fit into. conflicts: extra wavefronts of shared memory per KiB that must move. why: the reason for
    reading or writing more than 1.05 times the bytes. lag: if not the benchmark's. page: slots per page of K and V, in
    head-first order and shuffled; 0: dense.
    """

    row: str
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 8192
    dram: float = 1.05
    l2: float = 1.1
    sectors: float = 1.05
    conflicts: float = 0.0
    why: str = ""
    lag: int | None = None
    page: int = 0

    @property
    def name(self) -> str:
        more = (f", lag {self.lag}" * bool(self.lag), ", fp32" * (self.dtype is torch.float32))
        return self.row + "".join(more) + f", pages of {self.page}" * bool(self.page)

    @property
    def scale(self) -> int:
        return TOKENS // self.tokens


FP32 = torch.float32
NEIGHBOURS = "the keys on either side of a block's own, which L2 no longer holds when all blocks run in step"
PARTS = (
    "the parts of each row, one per split of the keys, written and read; with more keys there are fewer parts per key"
)
LOGITS = "the logits of one row, 8 G bytes per key, written and read; the second time partly from L2"
COVARIANCES = "U, as much as for 131,072 tokens, and K once per query head from L2"
TABLES = "cosines and sines once per head, from L2 except for the first; and " + LOGITS
CALLS = [
    Call("lag_score", l2=1.05, conflicts=2.4),
    Call("lag_score", FP32, l2=1.05, conflicts=0.3),
    Call("lag_score", tokens=16384, l2=1.05, conflicts=2.0, lag=1024),
    Call("anchor_cosine", l2=1.05, sectors=1.15, conflicts=1.8),
    Call("anchor_cosine", FP32, l2=1.05, conflicts=0.5),
    Call("select_topk", l2=1.2, sectors=1.1, conflicts=21),
    Call("window_scores", tokens=4096, conflicts=0.1),
    Call("window_scores, no lse", tokens=4096, l2=1.2, conflicts=12.5),
    Call("window_scores, 8 rows", tokens=4096),
    Call("window_attention", tokens=4096, dram=1.4, l2=1.52, sectors=1.4, conflicts=7.7, why=PARTS),
    Call("window_attention, decode", dram=1.1, l2=1.15, sectors=1.06, conflicts=0.9, why=LOGITS),
    Call("window_attention, decode, RoPE", dram=1.1, l2=1.95, sectors=1.55, conflicts=0.9, why=TABLES),
    Call("window_attention, decode, bias", dram=1.1, l2=1.15, sectors=1.06, conflicts=0.9, why=LOGITS),
    Call("window_attention, decode, int8", dram=1.2, l2=1.22, sectors=1.06, conflicts=9.6, why=LOGITS),
    Call("drop_scores", tokens=2048, dram=1.5, l2=1.68, sectors=1.43, conflicts=3.1, why=PARTS),
    Call("gather_kv"),
    Call("compact_kv_"),
    Call("ladder_compact_"),
    Call("ladder_compact_, RoPE", sectors=1.15),
    Call("ladder_gather"),
    Call("rope_at_slots", sectors=1.8),
    Call("value_range"),
    Call("outlier_degree", l2=1.25, why="the keys on either side of a warp's own"),
    Call("outlier_degree", FP32, dram=1.2, l2=1.25, why=NEIGHBOURS),
    Call("lsh_bucket", dram=1.1, l2=1.7, why="the indices and the projection, compared with only 32 keys per head"),
    Call("build_prototypes", conflicts=49),
    Call("assign_prototypes", tokens=4096, dram=1.55, l2=1.55, why="the prototypes, as many as for 131,072 tokens"),
    Call("quadratic_scores", tokens=2048, dram=3.0, l2=7.3, sectors=1.4, why=COVARIANCES),
    Call("trig_scores", conflicts=0.03),
    Call(
        "cluster_mean", dram=1.15, l2=2.7, conflicts=85, why="the sums of the clusters, as many as for 131,072 tokens"
    ),
    Call(
        "cluster_priority",
        dram=1.1,
        l2=1.7,
        sectors=2.2,
        conflicts=19,
        why="the clusters, as many as for 131,072 tokens",
    ),
]
# Limits for paged calls, as multiples of the bytes and sectors of the same dense call.
MORE_IN_PAGES = 1.02
MORE_OF_FEW = {"lsh_bucket": 1.1}  # 32 keys per head, each in a page of its own


def paged_calls() -> list[Call]:
    """The calls that support pages, in pages. They are not in the table."""
    from kvops.bench import pages

    return [x._replace(page=16) for x in CALLS if x.row in pages.OPERATORS and not x.lag]


# ---- Running them ----------------------------------------------------------------------------------------------------


def kernels_of(card: Card, paged: bool = False) -> dict[str, tuple[int, int]]:
    """Registers per thread (bf16, head dim 128) and static shared memory, from the table in docs/cuda.md."""
    table = PAGE.read_text().split("<!-- resources -->")[1].split("<!-- end of resources -->")[0]
    found = {}
    for name, dense, in_pages, static in re.findall(
        r"^\| `(\w+)` \| \d+ \| ([^|]+) \| ([^|]*)\|[^|]+\| (\d+) \|$", table, re.MULTILINE
    ):
        count = (paged and in_pages.strip() or dense).split(", ")[card.column]
        if count != "-":
            found[f"{name}_kernel"] = int(count), int(static)
    return found


class Counters:
    """The library's counters; they count one call at a time."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))
        self.library.cudasim_traffic_report.restype = ctypes.c_char_p

    def know(self, kernels: dict[str, tuple[int, int]]) -> None:
        for name, needs in kernels.items():
            self.library.cudasim_traffic_kernel(name.encode(), *map(ctypes.c_uint64, needs))

    def count(self, call: Callable[[], Any], card: Card) -> dict:
        sizes = card.multiprocessors, card.l2, card.l1, card.shared
        self.library.cudasim_traffic_begin(*map(ctypes.c_uint64, sizes))
        call()
        return json.loads(self.library.cudasim_traffic_report())


def measure(library: Path, calls: Iterable[Call]) -> Iterator[dict]:
    """The traffic of each call. The CPU kernels create the inputs, so all inputs are created first."""
    import kvops
    from kvops.bench.rows import ROWS, Case

    class Made(Case):
        lag = None

    made = []
    for call in calls:
        row, case = ROWS[call.row], Made(call.tokens, call.dtype, HEADS)
        case.lag = call.lag or Case.lag.fget(case)
        row.args(case), row.bytes(case), [form(case) for form in row.forms.values()]
        case.restore()
        made.append((call, row, case, paged_form(case, call) if call.page else next(iter(row.forms.values()))))
    kvops._lib.load(library)
    counters = Counters(library)
    card = CARDS["h200"]
    for call, row, case, form in made:
        os.environ |= {"CUDASIM_DEVICE": f"h200/{call.scale}", "KVOPS_SM90": "0"}
        scaled = card._replace(multiprocessors=card.multiprocessors // call.scale, l2=card.l2 // call.scale)
        counters.know(kernels_of(card, bool(call.page)))
        begin = time.perf_counter()
        counts = counters.count(partial(form, case), scaled)
        print(f"{call.name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        yield {"name": call.name, "bytes": row.bytes(case)} | counts


def paged_form(case, call: Call) -> Callable[[Any], Any]:
    """The call on K and V in shuffled pages."""
    from kvops import ops
    from kvops.bench import pages
    from kvops.bench.rows import SINK

    places = torch.randperm(case.n // call.page, generator=torch.Generator().manual_seed(0))
    k, v = (pages.paged(x, "HND", call.page, places) for x in (case.k, case.v))
    table = places.to(torch.int32).view(1, -1)
    run = pages.calls(case, k, v, table)[call.row]
    if call.row == "lag_score":  # the partitions of its row
        run = partial(ops.lag_score, k, v, lag=case.lag, prefix=SINK, block_table=table)
    return lambda _: run()


def measured(library: Path, calls: list[Call]) -> list[Counted]:
    """The same in a separate process, because the simulator replaces the CPU kernels."""
    command = [sys.executable, "-W", "ignore", __file__, "--json", str(library), *(x.name for x in calls)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-5000:])
    print(done.stderr, file=sys.stderr)
    lines = [json.loads(x) for x in done.stdout.splitlines()]
    return [Counted(call, x, library) for call, x in zip(calls, lines, strict=True)]


# ---- Results ---------------------------------------------------------------------------------------------------------


@dataclass
class Counted:
    """The traffic of a call."""

    call: Call
    counts: dict
    library: Path

    def total(self, key: str) -> int:
        return sum(x[key] for x in self.counts["launches"])

    def accesses(self, shared: bool) -> list[dict]:
        return [
            a | {"kernel": x["kernel"]} for x in self.counts["launches"] for a in x["accesses"] if a["shared"] == shared
        ]

    @property
    def bytes(self) -> int:
        return self.counts["bytes"]

    @property
    def dram(self) -> float:
        return (self.total("dram_read") + self.total("dram_written")) / self.bytes

    @property
    def l2(self) -> float:
        return (self.total("l2_read") + self.total("l2_written")) / self.bytes

    @property
    def sectors(self) -> float:
        found = self.accesses(shared=False)
        return sum(x["sectors"] for x in found) / sum(x["least"] for x in found)

    @property
    def conflicts(self) -> float:
        return 1024 * sum(x["wavefronts"] - x["least"] for x in self.accesses(shared=True)) / self.bytes

    def worst(self, shared: bool, count: int = 3) -> list[str]:
        """The places with the most waste, one line each."""
        key = "wavefronts" if shared else "sectors"
        found: dict[tuple, dict] = {}
        for x in self.accesses(shared):
            at = x["kernel"], x["kind"], self.places[x["place"]]
            sums = found.setdefault(at, {"requests": 0, key: 0, "least": 0})
            for name in sums:
                sums[name] += x[name]
        found = {at: x for at, x in found.items() if x[key] > x["least"]}
        order = sorted(found.items(), key=lambda x: x[1]["least"] - x[1][key])
        return [
            f"{kernel}: {kind} at {place}: {x[key] / x['requests']:.1f} {key} per request,"
            f" at best {x['least'] / x['requests']:.1f}; {x['requests']} requests"
            for (kernel, kind, place), x in order[:count]
        ]

    @cached_property
    def places(self) -> list[str]:
        """file:line of each place, from the operator's kernel inwards."""
        return symbols(self.library, self.counts["places"])

    def __str__(self) -> str:
        lines = [
            f"{self.call.name}: {self.bytes / 1e6:.2f} MB must move; DRAM {self.dram:.3f}, L2 {self.l2:.3f}, sectors"
            f" {self.sectors:.3f} times the least, {self.conflicts:.2f} bank conflicts per KiB"
        ]
        for x in self.counts["launches"]:
            lines.append(
                f"    {x['kernel']}: {x['blocks']} blocks of {x['threads']}, {x['resident']} resident;"
                f" DRAM {x['dram_read'] / 1e6:.2f} + {x['dram_written'] / 1e6:.2f} MB,"
                f" L2 {x['l2_read'] / 1e6:.2f} + {x['l2_written'] / 1e6:.2f} MB"
            )
        return "\n".join(lines + [f"      {x}" for shared in (False, True) for x in self.worst(shared)])


def ratios(paged: Counted, dense: Counted) -> tuple[float, float, float]:
    """The DRAM bytes, L2 bytes and sectors of a paged call, relative to the same dense call."""

    def of(x: Counted) -> tuple[float, float, float]:
        sectors = sum(a["sectors"] - a.get("l1_hits", 0) for a in x.accesses(shared=False))
        return x.dram, x.l2, sectors / x.bytes

    return tuple(a / b for a, b in zip(of(paged), of(dense)))


def symbols(library: Path, places: list[list[int]]) -> list[str]:
    """For each list of return addresses, the lines of csrc that they belong to, innermost first."""
    addresses = sorted({x for place in places for x in place})
    text = "\n".join(hex(x - 1) for x in addresses)
    command = ["addr2line", "-a", "-i", "-e", str(library)]
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    lines: dict[int, list[str]] = {}
    for line in output.splitlines():
        if line.startswith("0x"):
            here = lines.setdefault(int(line, 16) + 1, [])
        else:
            here.append(re.sub(r" \(discriminator \d+\)$", "", line))
    found = []
    for place in places:
        frames = [line for address in place for line in lines[address]]
        own = [m[0] for x in frames if (m := re.search(r"(csrc|tests/cuda/cudasim)/[\w./]+:\d+$", x))]
        kernels = [os.path.relpath(x, "csrc") for x in own if x.startswith("csrc")]
        found.append(" < ".join(dict.fromkeys(kernels or own)) or "?")
    return found


def table(found: list[Counted]) -> str:
    lines = [
        "| call | tokens | MB that must move | DRAM | L2 | sectors | bank conflicts per KiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for x in found:
        numbers = f"{x.dram:.2f} | {x.l2:.2f} | {x.sectors:.2f} | {x.conflicts:.1f}"
        lines.append(f"| {x.call.name} | {x.call.tokens} | {x.bytes / 1e6:.1f} | {numbers} |")
    return "\n".join(lines) + "\n"


def write(found: list[Counted]) -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(found) + END + rest.split(END)[1])


# ---- Plans -----------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """A launch as CUDASIM_DRY records it."""

    kernel: str
    blocks: int
    threads: int
    cluster: int  # blocks per cluster
    dynamic_bytes: int
    static_bytes: int
    resident: int  # blocks per multiprocessor, limited by threads, registers and shared memory
    waves: float

    multiprocessors: int

    @property
    def busy(self) -> float:
        """The fraction of the multiprocessors' time that blocks of equal length fill."""
        turns = self.waves if self.waves > 1 else self.blocks / self.multiprocessors
        return turns / math.ceil(turns)


def plans(library: Path, card_name: str, tokens: int = TOKENS) -> dict[str, list[Launch]]:
    """The launches of each benchmark row at this many tokens, bf16. Runs in a separate process; no kernel runs."""
    command = [sys.executable, "-W", "ignore", __file__, "--dry", str(library), str(tokens)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"CUDASIM_DEVICE": card_name}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-5000:])
    card = CARDS[card_name]
    kernels = kernels_of(card)
    found: dict[str, list[Launch]] = {}
    for line in done.stdout.splitlines():
        row, name, grid, block, dynamic, cluster = line.split("\t")
        kernel = re.search(r"(\w+)(<.*)?$", name)[1]
        registers, static = kernels.get(kernel, (0, 0))
        blocks, threads = (math.prod(map(int, x.split(","))) for x in (grid, block))
        of_block = 32 * -(-threads // 32) * (-(-registers // 8) * 8)
        resident = min(
            32,
            2048 // threads,
            65536 // of_block if of_block else 32,
            card.shared // (int(dynamic) + static + 1024),
        )
        waves = blocks / (card.multiprocessors * resident)
        launch = Launch(
            kernel, blocks, threads, int(cluster), int(dynamic), static, resident, waves, card.multiprocessors
        )
        found.setdefault(row, []).append(launch)
    return found


def dry(library: Path, tokens: int) -> None:
    import kvops
    from kvops.bench.rows import GROUP, ROWS, Case, Window

    class Empty(Case):
        """Inputs whose contents are never read, since no kernel runs."""

        k = cached_property(lambda self: torch.empty(self.batch, self.heads, self.n, self.d, dtype=self.dtype))
        v = cached_property(lambda self: torch.empty(self.batch, self.heads, self.n, self.d, dtype=self.dtype))
        _source = property(lambda self: [self.k, self.v])

        def _randn(self, *shape: int, stream: int) -> Tensor:
            return torch.empty(self.batch, self.heads, *shape)

        def _window(self, rows: int) -> Window:
            heads = self.batch, GROUP * self.heads
            visible = torch.empty(rows, dtype=torch.int32)
            return Window(torch.empty(*heads, rows, self.d, dtype=self.dtype), visible, torch.empty(*heads, rows))

        @cached_property
        def indices(self) -> Tensor:
            return torch.empty(self.batch, self.heads, self.budget, dtype=torch.int64)

        def copies(self, count: int) -> tuple[Tensor, Tensor]:
            shape = self.batch, self.heads, count, self.d
            return torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype)

        out = cached_property(lambda self: self.copies(self.budget))

    kvops._lib.load(library)
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "launches"
        os.environ["CUDASIM_DRY"] = str(notes)
        for name, row in ROWS.items():
            if row.parts or "compress" in name:  # whole calls consist of these operators
                continue
            case = Empty(tokens, torch.bfloat16, HEADS, batch=row.batch)
            form = next(iter(row.forms.values()))
            row.args(case)
            notes.write_text("")
            form(case)
            for line in notes.read_text().splitlines():
                print(name, line, sep="\t")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="TEXT", help="only calls whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.relative_to(ROOT)}")
    parser.add_argument("--plans", choices=CARDS, help="show the launches on this card instead")
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--json", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--dry", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.json:
        library, *names = args.json
        for x in measure(Path(library), [x for x in (*CALLS, *paged_calls()) if x.name in names]):
            print(json.dumps(x), flush=True)
    elif args.dry:
        dry(Path(args.dry[0]), int(args.dry[1]))
    elif args.plans:
        for row, launches in plans(args.library, args.plans).items():
            print(row)
            for x in launches:
                print(
                    f"    {x.kernel}: {x.blocks} blocks of {x.threads}, {x.dynamic_bytes} + {x.static_bytes} bytes,"
                    f" {x.resident} resident, {x.waves:.2f} waves, {x.busy:.0%}"
                )
    else:
        calls = CALLS if args.write else [x for x in (*CALLS, *paged_calls()) if args.k in x.name]
        found = measured(args.library, calls)
        if args.write:
            write(found)
        else:
            print("\n".join(map(str, found)))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
