"""Disassembles the CUDA kernels: their loops, and the instructions that a loop spends on each 16 bytes it loads.

python tests/cuda/sass.py attention_parts               # the loops of the instance for bf16 and head_dim 128, on sm_90a
python tests/cuda/sass.py attention_parts --pages       # of the instance for pages
python tests/cuda/sass.py attention_parts --all         # of every instance
python tests/cuda/sass.py attention_parts --file x.cubin
python tests/cuda/sass.py attention_parts --text        # and their instructions

A + marks a loop that contains others. `instructions` counts the whole loop. `quickest` counts the shortest iteration
with the most 16-byte loads from global memory: it leaves out everything that a branch can skip, such as careful paths
for rare cases (but also real work). `16 bytes` counts those loads, and `each` is quickest / 16 bytes. Needs cuobjdump
and nvdisasm, available from pip.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import resources

ARCH = "sm_90a"
# 16-byte loads from global memory, to registers or by cp.async.
WIDE = re.compile(r"(LDG|LD)\.E\.(\w+\.)*128|LDGSTS\.E\.(\w+\.)*128")


class Instruction(NamedTuple):
    address: int
    guard: str  # @!P0, or empty
    op: str  # LDG.E.128.CONSTANT
    operands: str

    @property
    def target(self) -> int | None:
        m = re.search(r"0x([0-9a-f]+)$", self.operands)
        return int(m[1], 16) if m else None


class Block(NamedTuple):  # of consecutive instructions
    code: list[Instruction]
    next: list[int]  # the start addresses of the blocks that may follow


class Loop:
    """Everything on the paths from its head back to its head, including inner loops."""

    def __init__(self, head: int, blocks: dict[int, Block]):
        self.head, self.blocks = head, blocks  # in topological order, back edges aside

    @cached_property
    def code(self) -> list[Instruction]:
        return sorted(x for block in self.blocks.values() for x in block.code)

    @property
    def kinds(self) -> Counter[str]:
        """The number of instructions of each kind, by first word: LDG, FFMA."""
        return Counter(x.op.split(".")[0] for x in self.code)

    def count(self, pattern: str | re.Pattern = WIDE) -> int:
        return count(self.code, pattern)

    def quickest(self, pattern: str | re.Pattern = WIDE) -> int:
        """The number of instructions in the shortest iteration that has the largest possible number of `pattern`.

        Inner loops run once.
        """
        best = {}  # for the rest of the path: number of matches, and minus the number of instructions
        for at, block in reversed(self.blocks.items()):
            ways = [best[x] for x in block.next if x in best] + [(0, 0)] * (self.head in block.next)
            if ways:
                most, fewest = max(ways)
                best[at] = most + count(block.code, pattern), fewest - len(block.code)
        return -best[self.head][1]


def count(code: list[Instruction], pattern: str | re.Pattern) -> int:
    return sum(bool(re.match(pattern, x.op)) for x in code)


def functions(text: str) -> dict[tuple[str, str], list[Instruction]]:
    """The kernels in cuobjdump's disassembly, by name and instance."""
    found = {}
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+) )?([A-Z]\S*)\s*(.*?) ?;", body)
        found[name.strip()] = [Instruction(int(a, 16), guard, op, rest) for a, guard, op, rest in code]
    names = resources.output("c++filt", text="\n".join(found)).splitlines()
    return {resources.kernel_name(name): code for name, code in zip(names, found.values(), strict=True)}


def blocks_of(code: list[Instruction]) -> dict[int, Block]:
    """The basic blocks, by start address. Assumes whole warps (BRA.DIV is not taken) and that calls return."""
    ends, starts = {}, {code[0].address}
    for i, x in enumerate(code):
        after = [code[i + 1].address] if i + 1 < len(code) else []
        kind = x.op.split(".")[0]
        if kind == "BRA" and x.op != "BRA.DIV":
            always = not x.guard and re.fullmatch(r"0x[0-9a-f]+", x.operands)
            ends[x.address] = [x.target] + ([] if always else after)
        elif kind in ("EXIT", "RET", "BRX"):
            ends[x.address] = after if x.guard else []
        else:
            continue
        starts.update(ends[x.address], after)
    found: dict[int, Block] = {}
    for i, x in enumerate(code):
        if x.address in starts:
            block = found[x.address] = Block([], [])
        block.code.append(x)
        if x.address in ends:
            block.next.extend(ends[x.address])
        elif i + 1 < len(code) and code[i + 1].address in starts:
            block.next.append(code[i + 1].address)
    return found


def loops(code: list[Instruction]) -> list[Loop]:
    """All loops, ordered by head. An edge closes a loop if every path to its start passes through its end."""
    blocks = blocks_of(code)
    entry = code[0].address
    order, seen = [], set()

    def visit(start: int) -> None:
        stack = [(start, iter(blocks[start].next))]
        seen.add(start)
        while stack:
            at, rest = stack[-1]
            for x in rest:
                if x not in seen:
                    seen.add(x)
                    stack.append((x, iter(blocks[x].next)))
                    break
            else:
                order.append(at)
                stack.pop()

    visit(entry)
    order.reverse()
    place = {x: i for i, x in enumerate(order)}
    before: dict[int, list[int]] = {x: [] for x in order}
    for x in order:
        for y in blocks[x].next:
            before[y].append(x)
    # The last block, other than itself, that all paths to a block pass through (Cooper, Harvey and Kennedy).
    dominator = {entry: entry}

    def meet(a: int, b: int) -> int:
        while a != b:
            while place[a] > place[b]:
                a = dominator[a]
            while place[b] > place[a]:
                b = dominator[b]
        return a

    changed = True
    while changed:
        changed = False
        for x in order[1:]:
            ways = [y for y in before[x] if y in dominator]
            new = ways[0]
            for y in ways[1:]:
                new = meet(new, y)
            changed |= dominator.get(x) != new
            dominator[x] = new

    def passes(x: int, head: int) -> bool:
        while place[x] > place[head]:
            x = dominator[x]
        return x == head

    members: dict[int, set[int]] = {}
    for x in order:
        for head in blocks[x].next:
            if passes(x, head):
                inside, stack = members.setdefault(head, {head}), [x]
                while stack:
                    y = stack.pop()
                    if y not in inside:
                        inside.add(y)
                        stack.extend(before[y])
    return [Loop(head, {x: blocks[x] for x in order if x in inside}) for head, inside in sorted(members.items())]


def hot_loops(code: list[Instruction], pattern: str | re.Pattern = WIDE) -> list[Loop]:
    """The loops with such instructions, most first, except loops around one that has at least half of them."""
    having = [x for x in loops(code) if x.count(pattern)]

    def within(x: Loop) -> Iterator[Loop]:
        return (y for y in having if y.head != x.head and y.head in x.blocks)

    own = [x for x in having if not any(2 * y.count(pattern) >= x.count(pattern) for y in within(x))]
    return sorted(own, key=lambda x: (-x.count(pattern), len(x.code)))


def usual(found: dict[tuple[str, str], list[Instruction]], name: str, paged: bool = False) -> list[str]:
    """The instances of a kernel for bf16 and head_dim 128, dense or paged."""
    return resources.usual(sorted(instance for kernel, instance in found if kernel == name), lambda x: x, paged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="its name, or part of it")
    parser.add_argument("--file", type=Path, default=resources.LIBRARY, help="a library or cubin")
    parser.add_argument("--arch", default=ARCH)
    parser.add_argument("--pages", action="store_true", help="the instance that reads K and V from pages")
    parser.add_argument("--all", action="store_true", help="every instance")
    parser.add_argument("--text", action="store_true", help="the instructions of each loop")
    args = parser.parse_args()
    if why := missing():
        sys.exit(f"sass: {why}")
    found = functions(resources.disassembly(args.file, args.arch))
    names = sorted({name for name, _ in found if args.kernel in name})
    if not names:
        sys.exit(f"sass: no kernel {args.kernel}; there are {', '.join(sorted({name for name, _ in found}))}")
    for (name, instance), code in sorted(found.items()):
        if name not in names or not args.all and instance not in usual(found, name, args.pages):
            continue
        print(f"{name}<{instance}>: {len(code)} instructions")
        print("  loop at  instructions  quickest  16 bytes     each")
        found_loops = loops(code)
        for loop in found_loops:
            wide = loop.count()
            each = f"{loop.quickest() / wide:8.1f}" if wide else " " * 8
            outer = "+" if any(x is not loop and x.head in loop.blocks for x in found_loops) else " "
            kinds = " ".join(f"{n} {kind}" for kind, n in loop.kinds.most_common(12))
            print(f"  {loop.head:#07x}{outer} {len(loop.code):12} {loop.quickest():9} {wide or '':9} {each}  {kinds}")
            if args.text:
                for x in loop.code:
                    print(f"    {x.address:#07x} {x.guard:6} {x.op} {x.operands}")


def missing() -> str:
    """What is missing to read the code, or an empty string."""
    return resources.missing() or (
        "" if resources.find_nvdisasm() else "no nvdisasm (pip install nvidia-cuda-nvdisasm)"
    )


if __name__ == "__main__":
    main()
