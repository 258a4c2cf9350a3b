"""What the kernels are to reach on a GPU, and what a record of the benchmark says about it."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    what: str
    wanted: str
    found: str
    reached: bool


def goals(record: dict) -> list[Goal]:
    """The goals that the record can tell about, in the order of its rows."""
    return [goal for r in record["rows"] for goal in goals_of(r)]


def goals_of(r: dict) -> list[Goal]:
    """Those of one row."""
    if "clock" not in r:  # of a CPU, or failed
        return []
    found = []
    label = f"{r['operator']} {r['form']}".strip() + f", n {r['shape'][2]}, {r['dtype']}"

    def add(wanted: str, value: str, reached: bool) -> None:
        found.append(Goal(label, wanted, value, reached))

    wanted = r.get("goals", {})
    if "copy" in wanted and "bandwidth" in r:
        share = r["bandwidth"]["share"]
        add(f">= {wanted['copy']:.0%} of copy", f"{share:.0%}", share >= wanted["copy"])
    for name, goal in wanted.items():
        if name in r["ratio"]:
            times = r["ratio"][name]["median"]
            add(f">= {goal:.3g}x {name}", f"{times:.3g}x", times >= goal)
    if wanted:
        for stage, share in r["stages"].items():
            add(f"{stage} < 10 % of it", f"{share:.1%}", share < 0.1)
    if r["operator"] == "keydiff_compress, 4096 tokens":
        seconds = r["seconds"]["median"]
        add("< 25 us", f"{seconds * 1e6:.1f} us", seconds < 25e-6)
    return found
