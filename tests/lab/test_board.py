"""The board: its data, the command that writes it, and the page in a browser."""

# ruff: noqa: E402  (after the check of what they need)

import json
import os
import re
import runpy
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import kvops
from kvops import files
from kvops.eval import __main__ as command
from kvops.eval import api, board, results, statistics, summary
from kvops.eval.methods import METHODS, rule
from kvops.eval.specs import Refused

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"


class Browser:
    """A headless Chromium with one page, by its DevTools protocol through a pair of pipes."""

    def __init__(self, program: str, profile: Path):
        ours, its = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        redirected = f'exec "$0" "$@" 3<&{ours[0]} 4>&{its[1]}'  # the protocol's file descriptors
        self.process = subprocess.Popen(
            ["bash", "-c", redirected, program, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(ours[0], its[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(its[1])
        self.to, self.back, self.rest, self.count = ours[1], its[0], b"", 0
        self.session, self.errors = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def message(self, seconds: float = 30) -> dict:
        while b"\0" not in self.rest:
            if not select.select([self.back], [], [], seconds)[0]:
                raise TimeoutError("Chromium does not answer")
            self.rest += os.read(self.back, 1 << 20)
        said, _, self.rest = self.rest.partition(b"\0")
        return json.loads(said)

    def call(self, method: str, **params) -> dict:
        self.count += 1
        said = {"id": self.count, "method": method, "params": params}
        os.write(self.to, json.dumps(said | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while (got := self.message()).get("id") != self.count:
            level = got.get("params", {}).get("type") or got.get("params", {}).get("entry", {}).get("level")
            if got["method"] == "Runtime.exceptionThrown" or level in ("error", "warning"):
                self.errors.append(got["params"])
        assert "result" in got, got
        return got["result"]

    def run(self, script: str):
        """The value of an expression on the page."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def show(self, url: str, width: int, height: int, dark: bool = False) -> None:
        """Load a page in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")  # another hash alone does not load a page
        self.call("Page.navigate", url=url)
        until = time.monotonic() + 20
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < until
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)


# ---- the data ----


@pytest.fixture(scope="module")
def page():
    return files.BOARD.read_text()


@pytest.fixture(scope="module")
def data(page):
    return board.data_of(page)


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools/board.py"))


def test_every_record_is_shown(data, tool):
    recorded = {x.stem for x in tool["records"]()}
    assert recorded >= {x.stem for x in RESULTS.glob("eval*.json*")}
    assert {Path(x).stem for x in data["records"]} == recorded
    assert {x for view in data["views"] for x in view["records"]} == {*data["records"]}
    assert "synthetic" not in recorded and "synthetic.json is left out" in tool["__doc__"]


def test_rows_are_those_of_the_records(data):
    """Each row is in the summary of one of its view's records; each row of a summary is on the board, or another
    record's is."""
    key = ("task", "context", "point", "method", "budget")
    found = {}
    for name in data["records"]:
        for row in json.loads((RESULTS / name).with_suffix(".json").read_text())["rows"]:
            row["method"] = board.short(row["method"])
            found.setdefault(tuple(row[x] for x in key), []).append((name, row))
    seen = set()
    for view in data["views"]:
        where = tuple(view[x] for x in key[:3])
        for method, budget, n, *score, tokens, held, full, _ in view["rows"]:
            same = [row for name, row in found[(*where, method, budget)] if name in view["records"]]
            of = [row["scores"][view["metric"]] for row in same if (row["n"], row["tokens"]) == (n, tokens)]
            assert any([board.rounded(x[y]) for y in ("mean", "low", "high")] == score for x in of), (where, method)
            assert any((row["bytes_held"], row["bytes_full"]) == (held, full) for row in same)
            seen.add((*where, method, budget))
        seen |= {(*where, *x[:2]) for x in view["unreachable"]}
    assert seen == {*found}


def compared(data, family, i, j):
    """The comparison of member i with member j, as the page reads it."""
    n, (a, b) = len(family["rows"]), sorted((i, j))
    at = 3 * (a * n - a * (a + 1) // 2 + b - a - 1)
    difference, low, high = family["pairs"][at : at + 3]
    found = [difference, low, high] if i < j else [-difference, -high, -low]
    return [x / 1e4 for x in found], data["verdicts"].get(family["verdicts"][i * n + j])


@pytest.mark.parametrize("record", ["eval-smollm2-others.jsonl", "eval-ragged.jsonl", "eval-merging.json"])
def test_comparisons_are_those_of_the_report(record):
    """Those with SnapKV and with the best, of runs with their prompts and of a summary without them."""
    data = board.board(board.sources([RESULTS / record]))
    rows = json.loads((RESULTS / record).with_suffix(".json").read_text())["rows"]
    found = {(x["point"], board.short(x["method"]), x["budget"]): x.get("compared", {}) for x in rows}
    checked = set()
    for view in data["views"]:
        for family in view["families"]:
            names = [view["rows"][i][0] for i in family["rows"]]
            for i, row in enumerate(view["rows"][x] for x in family["rows"]):
                where = (view["point"], *row[:2])
                for name, recorded in found[where].items():
                    verdict = data["verdicts"].get(family["to_best"][i])
                    if name == "best":
                        assert names[family["best"]] == board.short(recorded["to"]) and verdict == recorded["verdict"]
                    if recorded["verdict"] != "best":
                        numbers, verdict = compared(data, family, i, names.index(board.short(recorded["to"])))
                        assert numbers == pytest.approx([recorded[x] for x in ("difference", "low", "high")], abs=6e-5)
                        assert name == "best" or verdict == recorded["verdict"]
                    checked.add((*where, name))
    assert checked == {(*key, name) for key, x in found.items() for name in x} != set()


def test_each_method_can_be_compared_with():
    """With a baseline of `compare`, in whatever order; and with the full cache."""
    heads, lines = results.load([RESULTS / "eval-ragged.jsonl"])
    made = summary.summarize(heads, lines)
    rows = [x for x in made.rows if x.point == "before" and x.budget == 128]
    full = next(x for x in made.rows if x.point == "before" and x.method == "Full")
    scores = {x.method: x.prompts for x in rows}
    each = statistics.compare_each(scores, 1)
    assert len(each) == len(rows) * (len(rows) - 1)
    for name in scores:
        expected = statistics.compare(scores, 1, None, name)
        for x in scores:
            if x != name:
                assert each[x, name] == pytest.approx(expected[x][name])
    family = board.family(rows, [*rows, full], made.traits[rows[0].task])
    data = {"verdicts": {y: x for x, y in board.VERDICTS.items()}}
    for i, x in enumerate(rows):
        expected = statistics.compare({**scores, "Full": full.prompts}, 1, None, "Full")[x.method]["Full"]
        numbers, verdict = compared(data, family, i, len(rows))
        assert numbers == pytest.approx(expected[1:4], abs=6e-5) and verdict == expected.verdict


def test_filters_are_what_policies_do():
    """A cache evicts in decode if the filter says so, as far as it needs nothing but keys and values for that."""
    k, v = torch.randn(2, 1, 2, 256, 16)
    for name, entry in METHODS.items():
        flags = board.about(entry.label)["flags"]
        if name == "full" or entry.policy is kvops.LaCache or entry.required or "query-free" not in flags:
            continue
        policy = rule(name).policy(32, 64, 4)
        if not policy.needs.model:
            cache = kvops.Cache(policy, layer=3, num_layers=4)
            for i in (slice(0, 64), *(slice(x, x + 1) for x in range(64, 256))):
                cache.append(k[:, :, i], v[:, :, i])
            assert (len(cache) < 192) == ("decode" in flags), name
    held = {x: {y.label for y in METHODS.values() if x in board.about(y.label)["flags"]} for x in board.FLAGS}
    assert {"KeyDiff", "LagKV", "Random"} <= held["query-free"] and not {"SnapKV", "H2O", "LAQ"} & held["query-free"]
    assert {"KeyDiff", "TOVA", "LagKV"} <= held["decode"] and not {"SnapKV", "KVzip", "LAQ"} & held["decode"]
    assert {"SnapKV", "CriticalKV", "TriAttention"} <= held["engine-ready"]
    assert not {"KVzip", "LAQ", "PyramidKV", "KVzap", "LaCache"} & held["engine-ready"]
    assert {"SnapKV", "KVzap"} <= held["one reading"]
    assert not {"KVzip", "LAQ", "Attention Matching"} & held["one reading"]
    assert board.about("kvpress KeyDiff")["flags"] == board.about("Unknown")["flags"] == []
    assert "engine-ready" not in board.about("KeyDiff head_mode=adaptive")["flags"]


def some(method="KeyDiff", budget=64, scores=(1.0, 0.0) * 4, **more):
    where = {"task": "passkey", "context": 256, "point": "before", "method": method, "budget": budget, "batch": 0}
    facts = {"tokens": 64, "bytes_held": 1, "bytes_full": 4, "prefill_s": 1.0, "decode_s": 1.0, "steps": 1}
    return {**where, "scores": {"partial": [*scores]}, **facts, **more}


def write(file, *lines, **settings):
    head = {"settings": {"model": "m (0123456789ab)", "prompts": 8, "seed": 0, **settings}, "origin": {"command": "c"}}
    file.write_text("".join(json.dumps(x) + "\n" for x in (head, *lines)))
    return file


def test_files_with_the_same_prompts_are_joined(tmp_path):
    one = write(tmp_path / "one.jsonl", some(), some("SnapKV"), some("Full", None))
    two = write(tmp_path / "two.jsonl", some(scores=(0.0,) * 8), some("L2 x=/a/b/c.py"))
    other = write(tmp_path / "other.jsonl", some(), seed=1)
    data = board.board(board.sources([two, other, one]))
    first, second = data["views"]
    assert [x[0] for x in first["rows"]] == ["Full", "KeyDiff", "SnapKV", "L2 x=c.py"] and first["again"] == 1
    assert first["records"] == ["one.jsonl", "two.jsonl"] and first["rows"][1][3] == 0.5  # the larger file's
    assert second["records"] == ["other.jsonl"] and (first["model"], first["seed"], second["seed"]) == ("m", 0, 1)


def test_text_cannot_leave_its_element(tmp_path, page):
    name = "x</script><script>alert(1)</script>"
    made = board.with_data(page, board.board(board.sources([write(tmp_path / "a.jsonl", some(name))])))
    assert made.count("<script") == 2 and board.data_of(made)["views"][0]["rows"][0][0] == name
    assert ".innerHTML" not in page and not re.search(r"(src|href)=.?(https?:)?//|@import|url\(http", page)


def test_the_page_is_up_to_date(tool, tmp_path, monkeypatch):
    """The whole of it takes long; two records stand for the others, in any order of the files."""
    page = tmp_path / "index.html"
    names = tool["main"].__globals__
    few = [x for x in tool["records"]() if x.stem in ("eval-ragged", "eval-keydiff")]
    for name, value in {"records": lambda: few, "BOARD": page}.items():
        monkeypatch.setitem(names, name, value)
    page.write_text(files.BOARD.read_text())
    with pytest.raises(SystemExit, match="index.html is out of date with bench/results; run python tools/board.py"):
        tool["main"](["--check"])
    tool["main"]([])
    tool["main"](["--check"])
    few.reverse()
    tool["main"](["--check"])


@pytest.mark.full
def test_the_recorded_page_is_up_to_date(tool):
    tool["main"](["--check"])


# ---- the command ----

TINY = ["--context", "256", "--prompts", "2", "--methods", "full", "keydiff", "snapkv", "--budgets", "64", "128"]
TINY += ["--tasks", "passkey:digits=4", "--points", "before"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A board with a run of one's own."""
    folder = tmp_path_factory.mktemp("board")
    assert command.main([*TINY, "--out", str(folder / "out"), "--board", str(folder / "mine.html")]) == 0
    return folder


def test_the_command_writes_a_board(written, data, capsys):
    made = board.data_of((written / "mine.html").read_text())
    own, recorded = [x for x in made["views"] if x.get("own")], [x for x in made["views"] if not x.get("own")]
    assert recorded == data["views"] and len(own) == 1 and own[0]["model"] == "passkey-llama"
    rows = json.loads((written / "out/summary.json").read_text())["rows"]
    assert [(x[0], x[1], x[6]) for x in own[0]["rows"]] == [(x["method"], x["budget"], x["tokens"]) for x in rows]
    again = written / "again.html"
    for file in ("results.jsonl", "summary.json"):
        said = ["--from", str(written / "out" / file), "--out", str(written / "report"), "--board", str(again)]
        assert command.main(said) == 0
        assert f"board: {again}" in capsys.readouterr().out
        assert board.data_of(again.read_text())["views"][0]["rows"] == own[0]["rows"]


def test_results_in_python_write_a_board(written):
    heads, lines = results.load([written / "out/results.jsonl"])
    api.Evaluation(summary.summarize(heads, lines)).board(str(written / "python.html"))
    own = board.data_of((written / "mine.html").read_text())["views"][0]
    made = board.data_of((written / "python.html").read_text())["views"][0]
    assert made == own | {"records": ["kvops.eval.run (own)"]}


def test_own_names_leave_recorded_ones_alone():
    """A file with the name of a recorded one, and a method with the name of one of the library's."""
    recorded = board.data_of(board.page())
    own = {x: [] if isinstance(y, list) else dict.fromkeys(y, "own") for x, y in recorded.items()}
    assert board.joined(own, recorded) == recorded
    origin = {"command": "python -m kvops.eval --model /home/me/a b.py:X --methods=~/mine.py:Y --device cuda"}
    assert board.where(origin) == "python -m kvops.eval --model a b.py:X --methods=mine.py:Y --device cuda"


def test_a_method_of_ones_own_has_its_filters(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("import kvops\n\n\nclass Mine(kvops.KeyDiff):\n    pass\n")
    made = board.about("Mine", rule(f"{file}:Mine"))
    assert made == {"family": "others", "flags": board.about("KeyDiff")["flags"]}


def test_what_the_command_refuses(tmp_path, monkeypatch, capsys):
    """Before anything is measured."""
    monkeypatch.setattr(command, "measure", None)
    cases = [("", "--board: expected a path, got nothing"), (tmp_path, "--board: expected a file, got the folder")]
    (tmp_path / "file").touch()
    cases.append((tmp_path / "file/x.html", "--board: .*x.html cannot be written: Not a directory|--board: .*exists"))
    for said, expected in cases:
        try:
            assert command.main([*TINY, "--out", str(tmp_path / "out"), "--board", str(said)]) == 2
        except SystemExit as stopped:
            assert stopped.code == 2
        assert re.search(expected, " ".join(capsys.readouterr().err.split()))
    monkeypatch.setattr(board, "BOARD", tmp_path / "none.html")
    assert command.main([*TINY, "--board", str(tmp_path / "x.html")]) == 2
    assert "--board: expected the page" in capsys.readouterr().err
    with pytest.raises(Refused, match="expected a summary.json"):
        (tmp_path / "a.json").write_text("[]")
        board.sources([tmp_path / "a.json"])


# ---- the page in a browser ----

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZES = {"phone": (390, 844), "desktop": (1440, 900)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not PROGRAM:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    made = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits(browser, size, dark):
    browser.errors.clear()
    browser.show(files.BOARD.as_uri(), *SIZES[size], dark)
    width = browser.run("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1] == SIZES[size][0]
    assert browser.run("document.querySelectorAll('#body tr').length") > 30
    assert browser.run("document.querySelectorAll('#svg .bars').length") > 10
    light = browser.run("getComputedStyle(document.body).backgroundColor").startswith("rgb(247")
    assert light != dark and not browser.errors


def test_every_view_can_be_drawn(browser, data):
    """With every filter, and with every method drawn."""
    browser.errors.clear()
    browser.show(files.BOARD.as_uri(), *SIZES["phone"])
    script = """(() => {
      const found = [], set = x => { Object.assign(state, x); draw(); }; // not the address: too many for Chromium
      for (const v of data.views) {
        const where = Object.fromEntries(Object.entries(CHOICES).map(([x, [, label]]) => [x, label(v)]));
        for (const only of ["", ...Object.keys(data.flags)]) set({...DEFAULTS, ...where, only});
        set({only: "", pick: "all", budget: "all"});
        const wide = document.documentElement.scrollWidth, text = document.body.innerText;
        const odd = /NaN|undefined|Infinity/.test($("svg").outerHTML + text);
        found.push([view === v, document.querySelectorAll("#body tr").length, wide, odd]);
      }
      return found;
    })()"""
    found = browser.run(script)
    assert found == [[True, len(x["rows"]), SIZES["phone"][0], False] for x in data["views"]]
    assert not browser.errors


def test_the_address_names_the_view(browser):
    where = "only=query-free,decode&budget=128&ref=Full&sort=difference&pick=KeyDiff&point=cut after the question"
    browser.show(f"{files.BOARD.as_uri()}#{where}", *SIZES["desktop"])
    text = "[...document.querySelectorAll('{}')].map(x => x.textContent)"
    names = browser.run(text.format("#body td:first-child"))
    assert browser.run(text.format("button[aria-pressed=true]")) == ["query-free", "decode", "KeyDiff", "128"]
    assert any("KeyDiff" in x for x in names) and not any("SnapKV" in x for x in names)
    verdicts = browser.run(text.format("#body td:last-child"))
    assert {"worse", "undecided"} >= {*verdicts} - {""} != set()
    browser.run("(x => { x.focus(); x.click(); })(document.querySelector('[data-key=\"only decode\"]'))")
    assert browser.run("document.activeElement.textContent") == "decode"
    assert "only=query-free&" in browser.run("location.hash")
    browser.run("location.hash = ''")
    browser.run("new Promise(done => setTimeout(done, 50))")
    assert not browser.run("document.querySelectorAll('#filters [aria-pressed=true]').length")


def test_what_the_page_shows_is_recorded(browser):
    """A row of the table against its record, and the tip of the same point by the keyboard."""
    where = "model=smollm2-135m-instruct-0.1.2-bf16&point=cut after the question&budget=256&ref=SnapKV&pick=LAQ"
    browser.show(f"{files.BOARD.as_uri()}#{where}", *SIZES["desktop"])
    rows = json.loads((RESULTS / "eval-smollm2.json").read_text())["rows"]
    key = {"task": "needle:chat=True", "context": 1024, "point": "after", "method": "LAQ", "budget": 256}
    row = next(x for x in rows if {y: x[y] for y in key} == key)
    score, difference = row["scores"]["partial"], row["compared"]["SnapKV"]
    shown = browser.run(
        "[...document.querySelectorAll('#body tr')].map(x => [...x.cells].map(y => y.innerText))"
        ".find(x => x[0] == 'LAQ')"
    )
    percent = [f"{100 * score[x]:.0f}" for x in ("mean", "low", "high")]
    points = [f"{100 * difference[x]:+.0f}".replace("-", "\u2212") for x in ("difference", "low", "high")]
    assert shown[2] == "{} [{}, {}]".format(*percent) and shown[7] == difference["verdict"]
    assert shown[6] == "{} [{}, {}]".format(*points)
    browser.run("$('svg').focus()")
    for _ in range(400):
        browser.run("$('svg').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))")
        if "LAQ, budget 256;" in (said := browser.run("$('said').textContent")):
            break
    assert f"partial {shown[2]} %, 64 prompts" in said and f"(with SnapKV): {shown[6]}" in said


def test_ones_own_run_comes_first(browser, written):
    browser.errors.clear()
    browser.show((written / "mine.html").as_uri(), *SIZES["phone"])
    assert browser.run("$('model').value") == "passkey-llama (this run)" and not browser.errors
