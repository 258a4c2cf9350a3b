"""What the README and docs/ say works: every block of code is run or parsed, every link and anchor is there."""

import argparse
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE_DOCS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "bench/README.md")
PAGES = [*(ROOT / x for x in BESIDE_DOCS), *sorted((ROOT / "docs").rglob("*.md"))]
TAGS = ("python", "sh", "text")  # run; parsed, command by command; formulas and what programs print
COLUMNS = 100  # of a block, at most: readers of the site must scroll sideways otherwise

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(tag, code) of each fenced block, the indentation of its fence taken off."""
    found = re.findall(r"^( {0,3})```(.*)\n((?:.*\n)*?)\1```$", page.read_text(), re.MULTILINE)
    return [(tag, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)) for indent, tag, code in found]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^( {0,3})```.*\n(?:.*\n)*?\1```$", "", page.read_text(), flags=re.MULTILINE)


@every_page
def test_every_block_says_what_it_is(page):
    assert {tag for tag, _ in blocks(page)} <= {*TAGS}, f"{page.name}: blocks are of {', '.join(TAGS)}"
    assert "```" not in prose(page), f"{page.name}: a fence is not closed"
    indented = re.findall(r"^(?: {4}|\t).*", prose(page), re.MULTILINE)
    assert not indented, f"{page.name}: an indented block has no tag, fence it: {indented[0]}"


@every_page
def test_blocks_fit_the_site(page):
    wide = [line for _, code in blocks(page) for line in code.splitlines() if len(line) > COLUMNS]
    assert not wide, f"{page.name}: over {COLUMNS} columns:\n" + "\n".join(wide)


@every_page
def test_python_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {"__name__": "example"}
    for tag, code in blocks(page):
        if tag == "python":
            exec(compile(code, page.name, "exec"), names)


def test_the_example_of_a_method_is_evaluated_beside_others(tmp_path):
    from kvops.eval.__main__ import main

    code = next(code for tag, code in blocks(ROOT / "docs/adding_a_method.md") if tag == "python")
    assert len(code.splitlines()) < 40
    file, out = tmp_path / "value_norm.py", tmp_path / "out"
    file.write_text(code)
    methods = ["keydiff", f"{file}:ValueNorm", f"{file}:ValueNorm:power=1,recent=0.25"]
    small = ["--budgets", "64", "--context", "256", "--prompts", "1", "--points", "before"]
    assert main(["--methods", *methods, *small, "--out", str(out)]) == 0
    rows = json.loads((out / "summary.json").read_text())["rows"]
    assert {row["method"]: row["tokens"] for row in rows} == dict.fromkeys(
        ("KeyDiff", "ValueNorm", "ValueNorm power=1 recent=0.25"), 64
    )


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@every_page
def test_links_lead_somewhere(page):
    for file, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", prose(page)):
        if file.startswith("http"):
            continue
        target = (page.parent / file) if file else page
        assert target.exists(), f"{page.name} links to {file}, which is not there"
        if anchor:
            anchors = [slug(x) for x in re.findall(r"^#+ (.*)", prose(target), re.MULTILINE)]
            assert anchor in anchors, f"{page.name} links to {file}#{anchor}, which has {', '.join(anchors)}"


def test_every_experiment_is_listed():
    listed = re.findall(r"^\| \[(\w+\.py)\]\(experiments/\1\)", (ROOT / "bench/README.md").read_text(), re.MULTILINE)
    assert listed == sorted({x.name for x in (ROOT / "bench/experiments").glob("*.py")} - {"common.py"})


def test_every_record_is_listed_once():
    records = (ROOT / "bench/README.md").read_text().split("\n## Records\n")[1]
    patterns = [x for row in re.findall(r"^\| (`.*?) \|", records, re.MULTILINE) for x in re.findall(r"`([^`]+)`", row)]
    listed = [x.name for pattern in patterns for x in (ROOT / "bench/results").glob(pattern)]
    assert sorted(listed) == sorted(x.name for x in (ROOT / "bench/results").iterdir())


def test_pages_that_the_code_names_are_there():
    files = [x for folder in ("kvops", "csrc", "bench", "tests") for x in (ROOT / folder).rglob("*.*")]
    for file in [x for x in files if x.suffix in (".py", ".h", ".cpp", ".cuh", ".cu", ".md")]:
        for page in re.findall(r"\bdocs/[\w/]+\.md", file.read_text()):
            assert (ROOT / page).exists(), f"{file.relative_to(ROOT)} names {page}"


# Prose. Phrases that are literal translations or riddles; CONTRIBUTING.md says what to write instead.

BANNED = r"""
(has|have) no say | some times (its|the|their|as) | hangs? on (the|its|a) | leaves? word | bound by products
comes? behind | (made|computed|measured|begins?|written|looked up) anew | says? nothing of | asks? no quer\w+
its rooms? | that nobody has | nobody (has|knows|tells) | hands? over | (goes|go) by | costs? nothing on the way
what stays | what is held | an int, or a share | (do|does) not mind | foretells? | come out right
is the one to take | (is|are) due | alike in (all|every) | gives? its best | turned (back|on the way|to the|by the)
fires (once|whenever) | follows? from numbers | without a rest | there and back | read off | what was seen | as ever
is equal to the bit | tokens that a batch says | budget of some | by what `?\w+`? keeps
"""


def prose_files() -> list[Path]:
    sources = [x for folder in ("kvops", "csrc") for x in (ROOT / folder).rglob("*.*")]
    return [x for x in PAGES if x.name != "CONTRIBUTING.md"] + [
        x for x in sources if x.suffix in (".py", ".h", ".cpp", ".cuh", ".cu")
    ]


def test_no_page_or_comment_has_a_banned_phrase():
    banned = re.compile(
        rf"\b({'|'.join(x.strip() for line in BANNED.strip().splitlines() for x in line.split(' | '))})\b", re.I
    )
    found = []
    for file in prose_files():
        text = re.sub(r"\s*\n\s*(#|//|>)?\s*", " ", file.read_text())  # comments are one line each
        found += [
            f"{file.relative_to(ROOT)}: {text[max(0, x.start() - 30) : x.end() + 30]}" for x in banned.finditer(text)
        ]
    assert not found, "\n".join(found)
    assert banned.search("settings that hang on the budget") and not banned.search("settings that depend on the budget")


# Commands. Each is taken as far as its own parser takes it, and not run.


class Parsed(Exception):
    """A program's arguments were what it expects."""


def check_python(words: list[str], monkeypatch) -> None:
    """python -c CODE runs; python -m MODULE and python FILE run until they have parsed their arguments."""
    if words[0] == "-c":
        return exec(words[1], {})
    if words[0].startswith("examples/"):  # without arguments; tests/package/test_examples.py runs them
        assert (ROOT / words[0]).is_file() and not words[1:]
        return None
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, args=None, namespace=None):
        parse(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr("kvops.eval.models.found", lambda name: name)  # without a download
    monkeypatch.setattr(sys, "path", [str((ROOT / words[0]).parent), *sys.path])
    module = words[0] == "-m"
    monkeypatch.setattr(sys, "argv", words[1:] if module else words)
    with pytest.raises(Parsed):
        runpy.run_module(words[1], run_name="__main__") if module else runpy.run_path(words[0], run_name="__main__")


def check_make(words: list[str], monkeypatch) -> None:
    """There is such a target, and what it runs in the end takes ARGS."""
    env = {"PATH": os.environ["PATH"]}  # without what a make that runs the tests hands down
    run = subprocess.run(["make", "-n", *words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    program, *last = shlex.split(run.stdout.splitlines()[-1])
    if last[:2] == ["-m", "pytest"]:
        assert all((ROOT / x).exists() for x in last if x.startswith("tests/")), f"{last}: which is not there"
    elif Path(program).name.startswith("python"):
        check_python(last, monkeypatch)


def check_pip(words: list[str]) -> None:
    from pip._internal.commands import create_command

    _, what = create_command(words[0]).parse_args(words[1:])
    known = (ROOT / "Makefile").read_text()  # packages that a build of ours installs
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for x in what:
        path, extra = re.fullmatch(r"([^\[]+)(?:\[(\w+)\])?", x).groups()
        assert (ROOT / path).exists() or f" {path}=" in known, f"pip {words[0]} {x}: no such thing"
        assert extra is None or extra in extras, f"pip {words[0]} {x}: no such extra"
    assert what


def check_cmake(words: list[str]) -> None:
    help_text = subprocess.run(["cmake", "--help"], capture_output=True, text=True).stdout
    options = [re.match(r"-D|-\w|--\w+", x) for x in words]
    for option in filter(None, options):
        assert option.group() in help_text, f"cmake has no {option.group()}"
    for name in re.findall(r"-D(\w+)=", " ".join(words)):
        assert name.startswith("CMAKE_") or name in (ROOT / "CMakeLists.txt").read_text(), f"{name} says nothing here"
    if "-S" in words:
        assert (ROOT / words[words.index("-S") + 1] / "CMakeLists.txt").is_file()


def source_text() -> str:
    files = [ROOT / "setup.py", ROOT / "CMakeLists.txt"]
    files += [x for pattern in ("kvops/**/*.py", "csrc/**/*.[ch]*", "tests/**/*.py") for x in ROOT.glob(pattern)]
    return "\n".join(x.read_text() for x in files)


def check_command(line: str, monkeypatch) -> None:
    if assigned := re.fullmatch(r"\w+=\$\((.*)\)", line):  # name=$(command)
        return check_command(assigned.group(1), monkeypatch)
    words = shlex.split(line, comments=True)
    while re.match(r"\w+=", words[0]):  # NAME=value command
        name = words.pop(0).split("=")[0]
        assert name == "OMP_NUM_THREADS" or name in source_text(), f"nothing reads {name}"
    program, *rest = words
    if program == "kvops":
        program, rest = "python", ["-m", "kvops", *rest]
    if program in ("python", "make"):
        {"python": check_python, "make": check_make}[program](rest, monkeypatch)
    else:
        {"pip": check_pip, "cmake": check_cmake}[program](rest)


def commands() -> list[str]:
    """Those of the sh blocks, a line each (or parts of one, joined by &&), and those named in the text."""
    lines = []
    for page in PAGES:
        code = "".join(code for tag, code in blocks(page) if tag == "sh").replace("\\\n", " ")
        lines += [part.split(" #")[0].strip() for line in code.splitlines() for part in line.split(" && ")]
        text = re.sub(r"\s*\n", " ", prose(page))
        lines += re.findall(r"`((?:python (?:-m kvops|bench/|tests/)|make |pip )[^`]*)`", text)
    return list(dict.fromkeys(filter(None, lines)))


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package")  # other tests import them too
@pytest.mark.parametrize("line", commands())
def test_commands_are_what_their_programs_take(line, monkeypatch, capsys):
    if "kvops.eval.harness" in line:
        pytest.importorskip("lm_eval")  # the parser is its own
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    check_command(line, monkeypatch)


# The site: `make docs`.


def site_hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def public_names() -> set[str]:
    import kvops.analysis
    import kvops.demo
    import kvops.eval
    import kvops.hf
    from kvops.vllm import cpu_pages

    names = {f"kvops.{x}" for x in kvops.__all__} - {"kvops.ops"}
    modules = (kvops.ops, kvops.hf, kvops.eval, kvops.analysis, cpu_pages)
    return names | {f"{module.__name__}.{x}" for module in modules for x in module.__all__}


def test_the_reference_shows_schemas():
    pytest.importorskip("griffe")
    from kvops import ops

    schema = runpy.run_path(str(ROOT / "docs/site/docstrings.py"))["schema"]
    for op in ops.__all__:
        assert f"torch.ops.kvops.{op}" in schema(f"{getattr(ops, op).__module__}.{op}"), op


def test_the_reference_has_every_public_name():
    text = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    listed = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert len(listed) == len({*listed}), "listed twice in docs/api"
    assert not public_names() - {*listed}, "missing in docs/api"
    for name in listed:
        module, _, attribute = name.rpartition(".")
        if name not in public_names() and not module.startswith(("kvops.vllm.metrics", "kvops.vllm.plugin")):
            assert hasattr(importlib.import_module(module), attribute), f"docs/api lists {name}, which is not there"


MODULES = [
    "kvops",
    "kvops.demo",
    "kvops.eval",
    "kvops.analysis",
    "kvops.bench",
    "kvops.bench.attention",
    "kvops.bench.decode",
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package")
def test_the_reference_has_every_option(module, monkeypatch):
    class Caught(Exception):
        pass

    def parse_args(parser, *_):
        raise Caught(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(Caught) as caught:
        runpy.run_module(module, run_name="__main__")
    (parser,) = caught.value.args
    section = (ROOT / "docs/api/cli.md").read_text().split(f"\n## {module}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(--[\w-]+)` \|", section, re.MULTILINE)
    assert listed == [x.option_strings[-1] for x in parser._actions if x.dest != "help"]


def test_links_of_the_site():
    hooks, url = site_hooks(), "https://example.org/kvops"

    def on(uri, link):
        return hooks.adapted(f"[x]({link})", uri, url)[4:-1]

    assert on("methods/keydiff.md", "../methods.md#streaming") == "../methods.md#streaming"
    assert on("choosing.md", "../README.md#how-fast") == "overview.md#how-fast"
    assert on("methods/laq.md", "../../bench/results/eval.json") == "../bench/results/eval.json"
    assert on("overview.md", "docs/methods/laq.md") == "methods/laq.md"
    assert on("measurements.md", "../docs/images/demo.png") == "images/demo.png"
    assert on("measurements.md", "claims.py") == f"{url}/blob/main/bench/claims.py"
    assert on("building.md", "../csrc") == f"{url}/tree/main/csrc"
    assert on("building.md", "https://pytorch.org") == "https://pytorch.org" and on("faq.md", "#why") == "#why"
    fenced = "```python\nx[0](a)\n```\n| `a\\|b` |\n"
    assert hooks.adapted(fenced, "faq.md", url) == fenced.replace("\\|", "|")


def test_the_site_has_every_page():
    """mkdocs.yml is not parsed, as nothing else here needs YAML: its nav has a line for each page."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    shown = re.findall(r"- (?:[^:\n]+: )?([\w/]+\.md)$", nav, re.MULTILINE)
    hooks = site_hooks()
    pages = [x.relative_to(ROOT / "docs").as_posix() for x in (ROOT / "docs").rglob("*.md")]
    assert sorted(shown) == sorted({*pages, *hooks.PAGES} - {*hooks.NOT_IN_NAV})
    assert all((ROOT / x).is_file() for x in hooks.PAGES.values())


def test_the_ruff_that_formats_signatures_is_the_one_that_lints():
    pins = [re.search(r"^ruff==\S+", (ROOT / f"requirements-{x}.txt").read_text(), re.M) for x in ("dev", "docs")]
    assert pins[0].group() == pins[1].group()


# bench/measured.py, which writes the tables of measured rows.


@pytest.fixture
def measured():
    spec = importlib.util.spec_from_file_location("measured", ROOT / "bench/measured.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up_row(method: str, budget: int | None, mean: float, point: str = "before", **more) -> dict:
    score = {"mean": mean, "low": mean - 0.04, "high": mean + 0.02, "n": 22}
    return {"task": "passkey", "context": 2048, "point": point, "method": method, "budget": budget} | {
        "tokens": budget,
        "bytes_held": 1000,
        "bytes_full": 4000,
        **more,
        "scores": {"partial": score, "exact": score | {"mean": 0.0}},
    }


def test_measured_rows_are_written(measured, monkeypatch, tmp_path, capsys):
    rows = [made_up_row("LAQ", 64, 0.5), made_up_row("LAQ", 1024, 0.755), made_up_row("LAQ++", 64, 0.25, "after")]
    rows += [made_up_row("L2", 1024, 0.1), made_up_row("Full", None, 0.96)]
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "bench/results/eval.json")
    monkeypatch.setattr(measured, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(measured, "README", tmp_path / "README.md")
    measured.README.write_text("<!-- speed -->\n<!-- end -->\n")
    for folder in ("bench/results", "docs/methods"):
        (tmp_path / folder).mkdir(parents=True)
    measured.RESULTS.write_text(json.dumps({"rows": rows}))
    page, every = tmp_path / "docs/methods/laq.md", tmp_path / "docs/choosing.md"
    page.write_text("before\n<!-- measured: LAQ -->\n<!-- end -->\nafter\n")
    every.write_text("<!-- measured: all -->\nold\n<!-- end -->\n")

    with pytest.raises(SystemExit, match="README.md, choosing.md, laq.md; run python bench/measured.py"):
        measured.main(["--check"])
    measured.main([])
    found = json.loads((ROOT / "bench/results/cpu-v4.json").read_text())["rows"]
    times = {
        row["dtype"]: 1e3 * row["seconds"]["best"]
        for row in found
        if (row["operator"], row["form"], row["shape"][2]) == ("keydiff_compress", "fresh", 65536)
    }
    first = measured.README.read_text().splitlines()[4]  # what a plain call takes, before its other forms
    assert first.startswith(f"| `keydiff_compress` | {times['bfloat16']:.1f} / {times['float32']:.1f} |")
    assert "(../../bench/results/eval.json)" in page.read_text() and "; 22 prompts" in page.read_text()
    assert [x for x in page.read_text().splitlines() if not x.startswith(("Partial", "("))] == [
        "before",
        "<!-- measured: LAQ -->",
        *("", ""),
        "| method | cut | 64 | 1,024 |",
        "| --- | --- | --- | --- |",
        "| LAQ | before the question | 50 [46, 52] | 76 [72, 78] |",
        "| LAQ++ | after the question | 25 [21, 27] |  |",
        "",
        "<!-- end -->",
        "after",
    ]
    assert "old" not in every.read_text() and "| Full | before the question |  |  | 96 [92, 98] |" in every.read_text()
    measured.main(["--check"])

    where = {"task": "passkey", "context": 2048, "point": "before", "method": "LAQ", "budget": 16}
    measured.RESULTS.write_text(json.dumps({"rows": [*rows, where | {"unreachable": "why"}]}))
    measured.main([])
    assert "| LAQ | before the question | – | 50 [46, 52] | 76 [72, 78] |" in page.read_text()
    assert "; –: the method cannot meet the budget" in page.read_text() and "†" not in page.read_text()

    measured.RESULTS.write_text(json.dumps({"rows": [*rows, made_up_row("LAQ", 16, 0.5, tokens=17)]}))
    measured.main([])
    assert "50 [46, 52] † |" in page.read_text() and "; †: keeps over 5 %" in page.read_text()
    measured.RESULTS.write_text(json.dumps({"rows": [*rows, made_up_row("LAQ", 16, 0.5, tokens=15)]}))
    measured.main([])
    assert "50 [46, 52] ‡ |" in page.read_text() and "; ‡: keeps over 5 % less" in page.read_text()

    page.write_text("<!-- measured: LAQ H2O -->\n<!-- end -->")
    with pytest.raises(ValueError, match="one of the methods LAQ, LAQ\\+\\+, L2, Full, got H2O"):
        measured.main([])
    measured.RESULTS.write_text(json.dumps({"rows": rows + rows[:1]}))
    with pytest.raises(ValueError, match="LAQ, before the question, budget 64: expected one row, got two"):
        measured.main([])
    rows.append(made_up_row("LAQ", 64, 0.5, context=4096))
    assert "| LAQ | passkey, 4,096 tokens, before the question |" in measured.table(rows, "")


def test_claims(measured):
    """Each verdict follows from the records by the rule; every one occurs on a model that can test it."""
    claims = measured.claims
    found = [claims.verdict(x, y)[0] for x in (claims.TOY, claims.REAL) for z in claims.CLAIMS.values() for y in z]
    assert {*found} == {claims.HOLDS, claims.PARTLY, claims.NOT, claims.UNDECIDED, claims.CANNOT, ""}
    nowhere = claims.Test(claims.Cell("passkey", 2048, "before", 7), "KeyDiff", "H2O")
    with pytest.raises(ValueError, match="expected a row of a record of the passkey model, got KeyDiff in passkey, 2,"):
        claims.decide(claims.TOY, nowhere)


def cells(**means: float) -> list[dict]:
    """Rows of 100 prompts each, with intervals of 10 points around their means."""
    rows = []
    for name, mean in means.items():
        score = {"mean": mean, "low": max(0.0, mean - 0.05), "high": min(1.0, mean + 0.05), "n": 100}
        where = {"task": "t", "context": 10, "point": "after", "budget": None if name == "Full" else 5}
        rows.append({**where, "method": name, "tokens": 5, "scores": {"partial": score}})
    return rows


@pytest.mark.parametrize(
    "means, verdict",
    [
        ({"A": 0.9, "B": 0.5}, "HOLDS"),
        ({"A": 0.5, "B": 0.9}, "NOT"),
        ({"A": 0.52, "B": 0.5}, "UNDECIDED"),
        ({"A": 0.9, "B": 0.5, "Full": 0.55}, "CANNOT"),  # the full cache does not do the task
        ({"A": 0.9, "B": 0.5, "Random": 0.93}, "CANNOT"),  # as well as anything
        ({"A": 0.9, "B": 0.5, "Full": None}, "CANNOT"),  # not measured
    ],
)
def test_the_rule_of_claims(measured, monkeypatch, means, verdict):
    claims = measured.claims
    means = {"Full": 1.0, "Random": 0.1} | means
    made = cells(**{x: y for x, y in means.items() if y is not None})
    model = claims.Model("m", ("made-up",), "analysis.json")
    monkeypatch.setattr(claims, "rows", lambda record: made)
    test = claims.Test(claims.Cell("t", 10, "after", 5), "A", "B")
    assert claims.decide(model, test).verdict == getattr(claims, verdict)
    other = {claims.HOLDS: claims.PARTLY, claims.UNDECIDED: claims.UNDECIDED}
    claim = claims.Claim("", "", real=[test, test._replace(method="B", than="A")])
    expected = claims.PARTLY if verdict in ("HOLDS", "NOT") else other.get(getattr(claims, verdict), claims.CANNOT)
    assert claims.verdict(model, claim)[0] == expected


def test_claims_of_shares_factors_and_likeness(measured, monkeypatch):
    claims = measured.claims
    made, cell = cells(A=0.8, B=0.79, Full=0.9, Random=0.1), claims.Cell("t", 10, "after", 5)
    model = claims.Model("m", ("made-up",), "analysis.json")
    monkeypatch.setattr(claims, "rows", lambda record: made)
    for test, verdict in (
        (claims.Test(cell, "A", 0.5), claims.HOLDS),
        (claims.Test(cell, "A", 0.99), claims.NOT),
        (claims.Test(cell, "A", "B", times=1.2), claims.NOT),
        (claims.Test(cell, "A", "B", times=1.5), claims.CANNOT),  # more than all
        (claims.Test(cell, "A", "Random", times=1.5), claims.HOLDS),
        (claims.Test(cell, "A", "B", alike=True), claims.UNDECIDED),  # an interval of 14 points
        (claims.Test(cell, "A", "Random", alike=True), claims.NOT),
    ):
        assert claims.decide(model, test).verdict == verdict, test
    made[0]["compared"] = {"best": {"to": "B", "difference": 0.01, "low": 0.005, "high": 0.02}}
    assert claims.decide(model, claims.Test(cell, "A", "B")).verdict == claims.HOLDS  # by the recorded difference
    made[0]["tokens"] = 6
    assert "they keep 6 and 5 tokens" in claims.decide(model, claims.Test(cell, "A", "B")).text
    made[0]["tokens"] = 5
    monkeypatch.setattr(claims, "raw", lambda record: {(cell, x): {"partial": [0.8] * 9 + [0.7]} for x in "AB"})
    paired = claims.decide(model, claims.Test(cell, "A", "B", alike=True))
    assert paired.verdict == claims.HOLDS and "+0 [+0, +0]" in paired.text


def test_measured_rows_are_those_of_the_results(measured):
    measured.main(["--check"])
