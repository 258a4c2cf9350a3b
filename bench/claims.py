"""The claims of the five papers as data, and the rule that decides each from the recorded runs, on two models.

A claim predicts, for some cells of the records, that a method's score exceeds another's, or reaches a share of the full
cache's. `bench/measured.py` writes the tables. No verdict is typed by hand:

- A test holds if the 95 % interval of the difference lies above 0, does not hold if it lies below, and is undecided if
  it contains 0. Differences are paired, prompt by prompt, where the record has every cell (a .jsonl file beside it) or
  the paired difference; otherwise the intervals of the two means are combined (Zou and Donner, 2008), which is wider.
- A test decides nothing if the full cache was not measured beside it, scores below `LEAST`, or is not above Random; if
  the two methods hold numbers of tokens that differ by over 5 %; or if the other's score times its factor exceeds 1.
- A claim holds if all its tests that can be decided do; holds partly if some do (if it is about `some` cases, it then
  holds); does not hold if none does and at least one is refuted; otherwise it is undecided. It cannot be tested if none
  of its tests can be decided, or if the model fails the claim's precondition.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from kvops.eval.statistics import bootstrap

RESULTS = Path(__file__).resolve().parent / "results"
HOLDS, PARTLY, NOT, UNDECIDED = "holds", "holds partly", "does not hold", "undecided"
CANNOT = "cannot be tested"
LEAST = 0.6  # of the full cache
NATS = ("loss", "kl")  # lower is better


class Model(NamedTuple):
    """A model that the claims are tested on.

    Attributes:
        name: in tables.
        records: its records, "" for eval.json, else NAME of eval-NAME.json.
        analysis: the record of python -m kvops.analysis.
    """

    name: str
    records: tuple[str, ...]
    analysis: str

    @property
    def facts(self) -> dict[str, float]:
        """What claims may need: layers; the attention on the 10 % most outlying keys; the cosine of q and k."""
        record = json.loads((RESULTS / f"{self.analysis}.json").read_text())
        outlying = [_mean(x["outlier_attention"]) for x in record["layers"]]
        cosine = record["gate"]["opposed"]["value"]
        return {"layers": len(record["layers"]), "outliers": fmean(outlying), "opposed": -cosine}


def _mean(values: float | Sequence) -> float:
    return values if isinstance(values, (int, float)) else fmean(_mean(x) for x in values)


TOY = Model(
    "passkey model",
    (
        "",
        "claims",
        "blocks",
        "chunked",
        "keydiff",
        "lag-long",
        "lagkv",
        "laq",
        "laq-draft",
        "protokv",
        "protokv-needle",
        "beside",
    ),
    "analysis",
)
REAL = Model(
    "SmolLM2-135M",
    ("smollm2", "smollm2-stream", "smollm2-decode", "lacache-ladders", "laq-grid"),
    "analysis-smollm2",
)
#: How a precondition reads in a table, and how much of it a claim needs. KeyDiff's Theorem 3.2 presumes "opposed".
NEEDS = {
    "layers": ("a ladder of several rungs needs more than 8 layers, the model has {:.0f}", 8),
    "outliers": ("the 10 % most outlying keys must have over 60 % of the attention, here they have {:.0%}", 0.6),
    "opposed": ("queries and keys must have a negative mean cosine, here it is {:+.2f}", 0.0),
}


class Cell(NamedTuple):
    """Where a score was measured. budget: tokens per KV head; None for settings that fix what is kept."""

    task: str
    context: int
    point: str
    budget: int | None

    def __str__(self) -> str:
        task = self.task.replace(",chat=True", "").replace(":chat=True", "")
        kept = "" if self.budget is None else f", {self.budget:,} kept"
        return f"{task}, {self.context:,} tokens, {self.point}{kept}"


class Test(NamedTuple):
    """What a claim predicts in a cell: method - times * than > 0.

    Attributes:
        cell: where.
        method: the better one.
        than: the other method, by default in the same cell; a number: a share of the full cache's score.
        times: a factor of the other's score.
        score: of the record. For losses the lower one is better.
        at: the other method's cell.
        alike: predicts instead that both differ by less than `ALIKE`.
    """

    cell: Cell
    method: str
    than: str | float
    times: float = 1.0
    score: str = "partial"
    at: Cell | None = None
    alike: bool = False


ALIKE = 0.05


class Claim(NamedTuple):
    """A claim of a paper.

    Attributes:
        claim: what the paper says, and where.
        paper: its setting and figure.
        toy, real: the tests on each model.
        needs: a precondition, of NEEDS.
        some: whether it is about some cases, not about all.
        elsewhere: where it is measured instead, or what a test would need.
    """

    claim: str
    paper: str
    toy: Sequence[Test] = ()
    real: Sequence[Test] = ()
    needs: str = ""
    some: bool = False
    elsewhere: str = ""


class Found(NamedTuple):
    """The result of a test: its verdict, and both scores with the difference and its interval."""

    verdict: str
    text: str


# The records


@functools.cache
def rows(record: str) -> list[dict]:
    file = RESULTS / (f"eval-{record}.json" if record else "eval.json")
    return json.loads(file.read_text())["rows"]


@functools.cache
def raw(record: str) -> Mapping[tuple, dict[str, list[float]]]:
    """Return the scores of every prompt, by cell and method; nothing if the record has no .jsonl file."""
    file = RESULTS / (f"eval-{record}.jsonl" if record else "eval.jsonl")
    found: dict[tuple, dict[str, list[float]]] = {}
    lines = [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []
    for x in sorted((x for x in lines if "scores" in x), key=lambda x: x["batch"]):
        key = Cell(x["task"], x["context"], x["point"], x["budget"]), x["method"]
        for name, values in x["scores"].items():
            found.setdefault(key, {}).setdefault(name, []).extend(values)
    return found


def find(model: Model, cell: Cell, method: str) -> tuple[str, dict] | None:
    """Return the record and the row of a method in a cell."""
    for record in model.records:
        for row in rows(record):
            if (Cell(row["task"], row["context"], row["point"], row["budget"]), row["method"]) == (cell, method):
                if "scores" in row:
                    return record, row
    return None


def measured(model: Model, cell: Cell, method: str) -> tuple[str, dict]:
    found = find(model, cell, method)
    if found is None:
        raise ValueError(f"bench/claims.py: expected a row of a record of the {model.name}, got {method} in {cell}")
    return found


def difference(model: Model, test: Test) -> tuple[float, float, float]:
    """Return the mean of method - times * than, and its interval; for losses with the sign that makes more better."""
    (one, x), (other, y) = measured(model, test.cell, test.method), measured(model, *_other(test))
    sign = -1.0 if test.score in NATS else 1.0
    times = test.than if isinstance(test.than, float) else test.times
    pair = [raw(one).get((test.cell, test.method)), raw(other).get(_other(test))]
    if all(z is not None for z in pair):
        a, b = (z[test.score] for z in pair if z is not None)
        d = [sign * (i - times * j) for i, j in zip(a, b, strict=True)]
        return fmean(d), *bootstrap(d)
    if (paired := recorded(x, test)) is not None:
        mean, low, high = paired
    else:
        a, b = x["scores"][test.score], y["scores"][test.score]
        mean = a["mean"] - times * b["mean"]
        low = mean - math.hypot(a["mean"] - a["low"], times * (b["high"] - b["mean"]))
        high = mean + math.hypot(a["high"] - a["mean"], times * (b["mean"] - b["low"]))
    return (mean, low, high) if sign > 0 else (-mean, -high, -low)


def recorded(row: dict, test: Test) -> tuple[float, float, float] | None:
    """Return the paired difference to the other method, if a row has it: rows have those of their first score to the
    best method and to SnapKV."""
    if test.times != 1 or test.at is not None or next(iter(row["scores"])) != test.score:
        return None
    for name, x in row.get("compared", {}).items():
        if test.than in (name, x.get("to")) and x["difference"] is not None:
            return x["difference"], x["low"], x["high"]
    return None


def _other(test: Test) -> tuple[Cell, str]:
    at = test.at or test.cell
    return (at._replace(budget=None), "Full") if isinstance(test.than, float) else (at, test.than)


# The rule


def decide(model: Model, test: Test) -> Found:
    """Decide a test."""
    score = measured(model, test.cell, test.method)[1]["scores"][test.score]
    cell, than = _other(test)
    text = f"{test.method} {_number(score['mean'], test.score)}"
    if than != "Full":
        other = measured(model, cell, than)[1]["scores"][test.score]["mean"]
        factor, where = "" if test.times == 1 else f"{test.times:g} times ", f" ({cell})" if test.at else ""
        text += f", {factor}{than} {_number(other, test.score)}{where}"
    kept, others = (measured(model, x, y)[1]["tokens"] for x, y in ((test.cell, test.method), (cell, than)))
    if than != "Full" and test.cell.budget is not None and not 1 / 1.05 <= kept / others <= 1.05:
        return Found(CANNOT, f"{text}: they keep {kept:,} and {others:,} tokens")
    if than != "Full" and test.score not in NATS and test.times * other > 1:
        return Found(CANNOT, f"{text}: more than all")
    if any(why_not(model, x, test.score) for x in (test.cell, test.at) if x is not None):
        return Found(CANNOT, text)
    mean, low, high = difference(model, test)
    if test.alike:
        verdict = HOLDS if -ALIKE < low and high < ALIKE else NOT if low > ALIKE or high < -ALIKE else UNDECIDED
    else:
        verdict = HOLDS if low > 0 else NOT if high < 0 else UNDECIDED
    scale, digits = (1, ".3f") if test.score in NATS else (100, ".0f")
    shown = [f"{scale * x:+{digits}}" for x in (mean, low, high)]
    share = f" to {test.than:.0%} of the full cache" if isinstance(test.than, float) else ""
    return Found(verdict, f"{text}: {shown[0]} [{shown[1]}, {shown[2]}]{share}, {verdict}")


def why_not(model: Model, cell: Cell, score: str) -> str:
    """Say why a cell decides nothing; nothing if it does."""
    full, random = beside(model, cell, score)
    if full is None:
        return "nothing to compare with"
    if score in NATS:
        return ""
    if full["mean"] < LEAST:
        return f"the full cache scores below {LEAST:.0%}"
    if random is not None and random["high"] >= full["low"]:
        return "Random is not below the full cache"
    return ""


def beside(model: Model, cell: Cell, score: str) -> tuple[dict | None, dict | None]:
    """Return the scores of the full cache and of Random in a cell, if they were measured."""
    full, random = find(model, cell._replace(budget=None), "Full"), find(model, cell, "Random")
    return full and full[1]["scores"][score], random and random[1]["scores"][score]


def _number(x: float, score: str) -> str:
    return f"{x:.2f}" if score in NATS else f"{100 * x:.0f}"


def verdict(model: Model, claim: Claim) -> tuple[str, str]:
    """Return a claim's verdict on a model, and what it rests on."""
    tests = claim.toy if model is TOY else claim.real
    if not tests:
        return "", claim.elsewhere or "not run"
    found = [(x, decide(model, x)) for x in tests]
    lacking = []
    if claim.needs:
        said, least = NEEDS[claim.needs]
        if not (value := model.facts[claim.needs]) > least:
            lacking.append(said.format(-value if claim.needs == "opposed" else value))
    lines = [*lacking]
    for cell, score in dict.fromkeys((x.cell, x.score) for x in tests):
        names = ("full cache", "Random")
        both = [
            f"{x} {'not measured' if y is None else _number(y['mean'], score)}"
            for x, y in zip(names, beside(model, cell, score))
            if y is not None or (cell.budget is not None and score not in NATS)
        ]
        head = "; ".join(filter(None, [", ".join(both), why_not(model, cell, score)]))
        lines.append(f"{cell} ({head}): " + "; ".join(y.text for x, y in found if (x.cell, x.score) == (cell, score)))
    seen = {x.verdict for _, x in found} - {CANNOT}
    text = "<br>".join(lines)
    if lacking or not seen:
        return CANNOT, text
    if HOLDS in seen:
        return (HOLDS if claim.some or seen == {HOLDS} else PARTLY), text
    return (NOT if NOT in seen else UNDECIDED), text


def table(paper: str) -> str:
    """Return a paper's claims as a Markdown table."""
    models = TOY, REAL
    head = ["claim", "paper", *(x.name for x in models)]
    lines = [head, ["---"] * len(head)]
    for claim in CLAIMS[paper]:
        cells = [verdict(x, claim) for x in models]
        lines.append([claim.claim, claim.paper, *("<br>".join(filter(None, [x and f"**{x}**", y])) for x, y in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# The claims


def each(cells: Sequence[Cell], *pairs: tuple[str, str | float], **options: float | str) -> list[Test]:
    """Return a test for each pair of methods in each cell."""
    return [Test(cell, *pair, **options) for cell in cells for pair in pairs]  # type: ignore[arg-type]


def passkey(*budgets: int | None, point: str = "before", task: str = "passkey", context: int = 2048) -> list[Cell]:
    """Return cells of the passkey model."""
    return [Cell(task, context, point, x) for x in budgets]


def needle(*budgets: int | None, point: str = "after", task: str = "needle", context: int = 1024) -> list[Cell]:
    """Return cells of the real model."""
    return [Cell(task + ("," if ":" in task else ":") + "chat=True", context, point, x) for x in budgets]


def stream(*budgets: int, context: int = 4096, task: str = "perplexity") -> list[Cell]:
    """Return cells of a stream, on either model."""
    return [Cell(task, context, "stream", x) for x in budgets]


LAGS = {(x, y): f"LagKV lag={x} ratio={y}" for x in (128, 512, 1024) for y in (0.5, 0.25, 0.125)}
LONG = passkey(None, point="after", task="passkey:digits=64", context=4000)
FIXED = passkey(None, point="after")
TOY_BLOCKS = [
    x for size in (128, 64, 256) for x in passkey(1024, 512, 256, point="chunked", task=f"chunked:chunk={size}")
]
REAL_BLOCKS = needle(256, 512, 1024, point="chunked", task="chunked:digits=7,chunk=128", context=2048)
STREAM = stream(512, 1024)
DECODED = stream(256, context=1024, task="perplexity:window=1")
#: Spans and overlaps beside the default, which is 8 and 4 in 30 layers.
LADDERS = ((4, 0), (4, 2), (8, 0), (8, 6), (15, 0), (15, 7))
DRAFTERS = ("snapkv", "streamingllm")
SOFTMAX = "ProtoKV score=softmax window=8"
RIVALS = ("H2O", "TOVA", "SnapKV")
RAW = "KeyDiff normalize_anchor=False"  # the anchor of the paper's experiments
BIG = "needs LongBench or Math-500, and a model that can do them"

CLAIMS: dict[str, list[Claim]] = {
    "LagKV": [
        Claim(
            "almost no loss at r = 1/2 (abstract, Table 1): at least 95 % of the full cache's score",
            "64 digits, up to 20K tokens, L 1,024: 99 and 100 % of the digits",
            each(LONG, (LAGS[1024, 0.5], 0.95)),
            each(needle(512), ("LagKV", 0.95)),
        ),
        Claim(
            "about 90 % of the performance at r = 1/8 (abstract)",
            "LongBench, L 1,024: 93 and 91 % of the full score; 64 digits: 86 and 67 %",
            each(LONG, (LAGS[1024, 0.125], 0.9)),
            each(needle(128), ("LagKV", 0.9)),
        ),
        Claim(
            "r L against the length of the wanted passage decides (Sec. 3.3, Fig. 2): 256 better than 64, 64 than 16",
            "Qwen, 64 tokens of key: r L 256 gives 97 %, r L 64 30 to 66 %, r L 16 15 %",
            each(FIXED, (LAGS[1024, 0.25], LAGS[512, 0.125]), (LAGS[512, 0.125], LAGS[128, 0.125])),
            each(
                needle(None, task="passkey", context=2048),
                (LAGS[512, 0.5], LAGS[512, 0.125]),
                (LAGS[512, 0.125], LAGS[128, 0.125]),
            ),
        ),
        Claim(
            "over 50 % better than H2O at equal ratios (abstract, Sec. 3.3)",
            "64 digits, r 1/4: 97 %, H2O 71 %",
            each(passkey(1024, 256), ("LagKV", "H2O"), times=1.5),
            each(needle(512, 256), ("LagKV", "H2O"), times=1.5),
        ),
        Claim(
            "better than LocalKV and the L2 score (App. A.2, Fig. 12)",
            "64 digits, L 1,024, all r",
            each(passkey(1024, 256, 64), ("LagKV", "LocalKV"), ("LagKV", "LagKV L2")),
            each(needle(512, 256, 128), ("LagKV", "LocalKV"), ("LagKV", "LagKV L2")),
        ),
        Claim(
            "17 % of the memory at 20K and r = 1/8 (Sec. 3.5, Fig. 7)",
            "20,480 + 16 tokens, L 1,024",
            elsewhere="arithmetic, Eq. 10: [LagKV](methods/lagkv.md#when-to-use-it)",
        ),
        Claim(
            "first token 1.5 times, next tokens 2 times faster at 20K and r = 1/8 (Sec. 3.5, Fig. 5, 6)",
            "Llama-3.1-8B, one A800",
            elsewhere="no accuracy: [end to end](#end-to-end)",
        ),
    ],
    "KeyDiff": [
        Claim(
            "block by block, KeyDiff beats H2O, TOVA and SnapKV at every budget (Table 1)",
            "LongBench, blocks of 128, 2K to 8K kept",
            each(TOY_BLOCKS, *((RAW, x) for x in ("H2O", "TOVA", "SnapKV pooling=avg kernel_size=7"))),
            each(REAL_BLOCKS, *((RAW, x) for x in RIVALS)),
        ),
        Claim(
            "the blocks hurt methods that score by attention (Sec. 4.2, Table 10)",
            "the same, with the prompt in one block",
            [Test(passkey(1024, point="after")[0], x, x, at=TOY_BLOCKS[0]) for x in RIVALS],
            [Test(needle(1024, context=2048)[0], x, x, at=REAL_BLOCKS[2]) for x in RIVALS],
        ),
        Claim(
            "and do not hurt KeyDiff",
            "the same",
            [Test(passkey(1024, point="after")[0], "KeyDiff", "KeyDiff", at=TOY_BLOCKS[0], alike=True)],
            [Test(needle(1024, context=2048)[0], "KeyDiff", "KeyDiff", at=REAL_BLOCKS[2], alike=True)],
        ),
        Claim(
            "distinctive keys are the ones that matter, and finding them needs no query (Sec. 3): before the question, "
            "better than what is newest, and than what the last queries attend to",
            "Spearman 0.94 of -cos and attention (Table 3)",
            each(passkey(256), ("KeyDiff", "StreamingLLM"), ("KeyDiff", "SnapKV")),
            each(needle(512, 256, point="before"), ("KeyDiff", "StreamingLLM"), ("KeyDiff", "SnapKV")),
            needs="opposed",
        ),
        Claim(
            "the same with many similar keys (Phonebook, App. H.1)",
            "a list of numbers, 6K kept",
            (),
            each(needle(512, point="before", task="niah-multikey"), ("KeyDiff", "StreamingLLM"), ("KeyDiff", "SnapKV")),
            needs="opposed",
        ),
        Claim(
            "needles are found at all lengths and depths (Fig. 6): 95 % of the full cache's",
            "up to 32K, 6K kept",
            each(passkey(1000, task="passkey:digits=64", context=4000), ("KeyDiff", 0.95)),
            each(needle(512, 256), ("KeyDiff", 0.95)),
        ),
        Claim(
            "a window of recent tokens helps on some tasks (Sec. 3.2, Table 14)",
            "code, 2K kept",
            each([*passkey(256, point="after"), *passkey(64)], ("KeyDiff window", "KeyDiff")),
            each([*needle(256, 512), *needle(256, point="before")], ("KeyDiff window", "KeyDiff")),
            some=True,
        ),
        Claim(
            "cosine is the best metric (Sec. 4.4, Table 16)",
            "LongBench",
            each(passkey(64), ("KeyDiff", "KeyDiff metric=dot"), ("KeyDiff", "KeyDiff metric=euclidean")),
            each(needle(512, 256), ("KeyDiff", "KeyDiff metric=dot"), ("KeyDiff", "KeyDiff metric=euclidean")),
        ),
        Claim(
            "the anchor hardly matters (Table 15)",
            "LongBench",
            each(passkey(64), ("KeyDiff", "KeyDiff anchor=median"), alike=True),
            each(
                needle(512, 256),
                ("KeyDiff", "KeyDiff anchor=median"),
                ("KeyDiff", RAW),
                alike=True,
            ),
        ),
        Claim(
            "in long generations, with a window of 20 % of the budget, level with SnapKV or better (App. E, Table 4): "
            "here the loss of a text read token by token, beside methods that evict in decode",
            "Math-500, DeepSeek-R1 distilled, 1K to 8K kept",
            real=each(DECODED, *(("KeyDiff window", x) for x in ("H2O", "TOVA", "StreamingLLM")), score="loss"),
            some=True,
        ),
        Claim(
            "at most 0.04 % loss at 8K (abstract); near the full cache on Math-500 (Sec. 4.3)",
            "LongBench; DeepSeek-R1 distilled",
            elsewhere=BIG,
        ),
        Claim(
            "up to 30 % lower latency than TOVA and SnapKV (Sec. 4.5, Fig. 7)",
            "Llama-3.2-3B, one A100",
            elsewhere="no accuracy: [end to end](#end-to-end)",
        ),
    ],
    "LaCache": [
        Claim(
            "lower perplexity than StreamingLLM at the same budget (Table 1)",
            "Llama-2-7B-Chat, 1K, 512 kept: 5.20, StreamingLLM 6.67",
            each(STREAM[:1], ("LaCache", "StreamingLLM"), score="loss"),
            each(STREAM, ("LaCache", "StreamingLLM"), score="loss"),
            needs="layers",
        ),
        Claim(
            "endless generation with flat perplexity and memory, where the full cache fails (Fig. 5, 6)",
            "PG-19, 600K and 10M tokens",
            elsewhere="[endless streams](endless.md)",
        ),
        Claim(
            "needles: nearly twice StreamingLLM's accuracy (Fig. 8, 9), here at least 1.5 times",
            "half kept: 99 %, StreamingLLM 55 %",
            each(passkey(1024), ("LaCache", "StreamingLLM"), times=1.5),
            each(needle(512, 256, point="before"), ("LaCache", "StreamingLLM"), times=1.5),
            needs="layers",
        ),
        Claim(
            "better scores than H2O, TOVA and SnapKV at equal memory (Fig. 7)",
            "LongBench, one H200",
            each(passkey(1024, point="after"), *(("LaCache", x) for x in RIVALS)),
            each(needle(512, 256), *(("LaCache", x) for x in RIVALS)),
            needs="layers",
        ),
        Claim(
            "the ladder lies on the Pareto front of random patterns (Fig. 3)",
            "1,500 patterns",
            elsewhere="[endless streams](endless.md#is-the-ladder-a-good-shape)",
        ),
        Claim(
            "a span of a quarter of the layers, with an overlap of half of the span, is best (Sec. 4.4, Fig. 10)",
            "Llama-2-7B-Chat, 256 kept",
            real=each(
                stream(512, context=2048),
                *(("LaCache", f"LaCache span={s} overlap={o}") for s, o in LADDERS),
                score="loss",
            ),
            needs="layers",
            elsewhere="a ladder of several rungs needs more than 8 layers, the model has 3",
        ),
        Claim("LongBench and RULER (Tables 3-6)", "32 layers", elsewhere=BIG),
    ],
    "LAQ": [
        Claim(
            "the answer's queries recall more of the keys it needs than the prompt's last queries (Sec. 3, Fig. 2)",
            "GovReport, 1,024 kept",
            each(passkey(256, point="after", task="recall"), ("LAQ", "SnapKV"), score="recall"),
            each(needle(128, 256, 512, task="recall:digits=7"), ("LAQ", "SnapKV"), score="recall"),
        ),
        Claim(
            "needles at a budget of 128 (Table 2, Fig. 4)",
            "32K: 93 to 100 %, SnapKV 73 to 77 %",
            each(passkey(128, point="after", task="needle", context=4000), ("LAQ++", "SnapKV")),
            each(needle(128), ("LAQ++", "SnapKV")),
        ),
        Claim(
            "better than SnapKV at small budgets (Table 1)",
            "LongBench, 128 to 512 kept",
            each(passkey(64, 1024, point="after"), ("LAQ", "SnapKV")),
            each(needle(128, 256, 512), ("LAQ", "SnapKV")),
        ),
        Claim(
            "LAQ++, which observes the prompt's last eight queries too, is better than LAQ (Sec. 5.2, Table 1)",
            "LongBench, Qwen: +0.2, -0.2 and 0.0 points at 128, 256 and 512 (Table 7)",
            each(passkey(64, 256, point="after"), ("LAQ++", "LAQ")),
            each(needle(128, 256, 512), ("LAQ++", "LAQ")),
        ),
        Claim(
            "more draft steps help (Sec. 6.2, Fig. 5): eight are better than one",
            "1 to 8 steps",
            each(passkey(64, point="after"), ("LAQ", "LAQ steps=1")),
            each(needle(128, 256), ("LAQ", "LAQ steps=1")),
        ),
        Claim(
            "and the draft's quality matters less (Sec. 6.1): one over the full cache scores alike",
            "drafts of any method and budget",
            each(passkey(64, point="after"), ("LAQ", "LAQ steps=8 stage1=full"), alike=True),
            each(needle(128, 256), ("LAQ", "LAQ stage1=full"), alike=True),
        ),
        Claim(
            "and how many tokens it is made over hardly matters (Sec. 6.1, Fig. 5a): 64 and 512 score alike",
            "drafts by several methods over 64 to 1,024 tokens",
            real=each(
                needle(64, 128, 256),
                *((f"LAQ stage1={x} stage1_budget=64", f"LAQ stage1={x} stage1_budget=512") for x in DRAFTERS),
                alike=True,
            ),
        ),
        Claim(
            "budgets by layer would improve it further (Sec. 5.2)",
            "a conjecture",
            each(passkey(64, point="after"), ("PyramidLAQ", "LAQ")),
        ),
        Claim(
            "a draft is better than fixed texts in its place (App. B, Table 4)",
            "LongBench, Mistral, 512 kept: 38.2 and 37.8, SnapKV 40.5, LAQ++ 41.7",
            each(passkey(64, point="after"), ("LAQ", "TheAnswerIs"), ("LAQ", "FoundTheAnswer")),
        ),
        Claim("+1 to +4 points on LongBench, +15 on RULER (Table 1, 5)", "7B and 8B models, one A100", elsewhere=BIG),
        Claim(
            "the second stage takes under 5 % of the time (App. A, Table 3)",
            "one A100",
            elsewhere="no accuracy: [LAQ](methods/laq.md#cost)",
        ),
    ],
    "ProtoKV": [
        Claim(
            "better than SnapKV at equal memory: +2.1 % on LongBench, needles 97 against 94 % at 128 (Fig. 8, 9)",
            "up to 8K tokens",
            [
                *each(passkey(128, point="after", task="needle"), ("ProtoKV", "SnapKV")),
                *each(passkey(256, point="after"), ("ProtoKV", "SnapKV"), (SOFTMAX, "SnapKV")),
            ],
            each(needle(128, 256, 512), ("ProtoKV", "SnapKV"), (SOFTMAX, "SnapKV")),
            needs="outliers",
        ),
        Claim(
            "anchors are few, cluster and draw most attention; losing them hurts (Sec. 3, Fig. 3-6)",
            "top 10 % have over 60 % of the attention",
            elsewhere="[semantic anchors](anchors.md)",
        ),
        Claim(
            "clusters are better than keeping the anchors alone (SATKV, Sec. 4.1, App. H)",
            "LongBench",
            each(passkey(1024), ("ProtoKV", "SATKV")),
            each(needle(128, 256, 512), ("ProtoKV", "SATKV")),
            needs="outliers",
        ),
        Claim(
            "chunk-only and LSH-only clusters are worse (Fig. 10)",
            "LongBench, all budgets",
            each(
                passkey(256, point="after"), ("ProtoKV", "ProtoKV clusters=chunks"), ("ProtoKV", "ProtoKV clusters=lsh")
            ),
            each(needle(128, 256, 512), ("ProtoKV", "ProtoKV clusters=chunks"), ("ProtoKV", "ProtoKV clusters=lsh")),
            needs="outliers",
        ),
        Claim(
            "20 to 40 anchors are best (Fig. 12): 32 better than none and than 128",
            "LongBench, 256 kept",
            each(passkey(256, point="after"), (SOFTMAX, f"{SOFTMAX} num_sats=0"), (SOFTMAX, f"{SOFTMAX} num_sats=128")),
            each(needle(128, 256, 512), ("ProtoKV", "ProtoKV num_sats=0"), ("ProtoKV", "ProtoKV num_sats=128")),
            needs="outliers",
        ),
        Claim(
            "about 500 prototypes are best (Fig. 11)",
            "5K to 15K tokens: 10 to 30 tokens each",
            each(passkey(256, point="after"), (f"{SOFTMAX} num_chunks=496", f"{SOFTMAX} num_chunks=32")),
            needs="outliers",
            elsewhere="needs longer contexts: 500 prototypes would be of two tokens each",
        ),
        Claim(
            "budgets by layer improve it (Table 4)",
            "+0.3 to +0.9 points",
            each(passkey(256, point="after"), ("PyramidProtoKV", "ProtoKV")),
            needs="outliers",
        ),
        Claim(
            "K-means takes many iterations to find clusters as good (Sec. 4.2, Fig. 7, Table 3)",
            "LongBench, 512 kept: 40.8, ClusterKV 40.5, SqueezedAttention 40.4",
            elsewhere="[ProtoKV](methods/protokv.md#k-means)",
        ),
        Claim(
            "costs about as much as SnapKV (Fig. 13)",
            "two RTX 3090",
            elsewhere="no accuracy: [ProtoKV](methods/protokv.md#formula)",
        ),
        Claim(
            "RULER, dynamic decoding on MATH and AIME (Tables 2, 8, 9)", "Llama-3-8B", elsewhere="needs models that can"
        ),
    ],
}
