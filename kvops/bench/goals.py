"""Performance goals of the kernels on a GPU, and whether a record reaches them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Goal(NamedTuple):
    """A goal of a row: the wanted and the measured value, as text."""

    what: str
    wanted: str
    found: str
    reached: bool


# Rows dominated by launches rather than bytes, by operator and tokens.
MOST_SECONDS = {("keydiff_compress, 4096 tokens", 4096): 25e-6, ("select_topk", 131072): 8e-6}


def goals(record: dict[str, Any]) -> list[Goal]:
    """Return the goals that the record covers, in the order of its rows."""
    return [goal for r in record["rows"] for goal in goals_of(r)]


def goals_of(r: dict[str, Any]) -> list[Goal]:
    """Return the goals of one row."""
    if "clock" not in r:  # CPU or failed
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
    if most := MOST_SECONDS.get((r["operator"], r["shape"][2])):
        seconds = r["seconds"]["median"]
        add(f"< {most * 1e6:.0f} us", f"{seconds * 1e6:.1f} us", seconds < most)
    return found
