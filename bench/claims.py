"""The claims of the five papers, and what the recorded runs say about each. `bench/measured.py` writes the tables.

A figure in braces names its cell: {record, task, context, cut point, method, budget, score}. The record is
bench/results/eval.json ("eval") or eval-NAME.json ("NAME"); the budget is "-" for settings that fix what is kept. The
score is a metric, or "best" or "SnapKV" for the paired difference to that method.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
HOLDS, PARTLY, NOT, CANNOT = "holds", "holds partly", "does not hold", "cannot be tested here"
LONGBENCH = "needs LongBench and a model that can do it"


class Claim(NamedTuple):
    """A claim of a paper.

    Attributes:
        claim: what the paper says, and where.
        paper: its setting and figure.
        here: our setting.
        measured: our figure.
        verdict: one of the four above.
    """

    claim: str
    paper: str
    here: str
    measured: str
    verdict: str


def cell(path: str) -> dict:
    """Return the row of a record that a path in braces names."""
    record, task, context, point, method, budget = path.split(", ")[:6]
    for row in rows(record):
        where = row["task"], str(row["context"]), row["point"], row["method"], str(row["budget"] or "-")
        if where == (task, context, point, method, budget) and "scores" in row:
            return row
    raise ValueError(f"bench/claims.py: expected a row of a record, got {path!r}")


@functools.lru_cache
def rows(record: str) -> list[dict]:
    file = RESULTS / ("eval.json" if record == "eval" else f"eval-{record}.json")
    return json.loads(file.read_text())["rows"]


def figure(path: str) -> str:
    """Return a score as "92 [74, 98] %", or a paired difference as "-15 [-22, -8] points". Losses are in nats."""
    row, score = cell(path), path.split(", ")[6]
    x = row.get("compared", {}).get(score)
    nats = (score if x is None else next(iter(row["scores"]))) in (
        "loss",
        "kl",
    )  # methods are compared by the first one
    if x is not None:
        if nats:
            return f"{x['difference']:+.3f} [{x['low']:+.3f}, {x['high']:+.3f}] ({x['verdict']})"
        return f"{100 * x['difference']:+.0f} [{100 * x['low']:+.0f}, {100 * x['high']:+.0f}] points ({x['verdict']})"
    mean, low, high = (row["scores"][score][x] for x in ("mean", "low", "high"))
    if nats:
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
    return f"{100 * mean:.0f} [{100 * low:.0f}, {100 * high:.0f}] %"


def table(paper: str) -> str:
    """Return a paper's claims as a Markdown table."""
    lines = [["claim", "paper", "setting here", "measured", "verdict"], ["---"] * 5]
    for claim in CLAIMS[paper]:
        text = [re.sub(r"\{([^{}]+)\}", lambda x: figure(x[1]), x) for x in claim]
        lines.append([*text[:4], f"**{text[4]}**"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


HALF = "32 digits, 2,048 tokens, 1,024 kept"
CLAIMS = {
    "LagKV": [
        Claim(
            "almost no loss at r = 1/2 (abstract, Table 1)",
            "64 digits, up to 20K tokens, L 1,024: 99 and 100 % of the digits",
            "64 digits, 4,000 tokens, L 1,024, r 1/2",
            "{lag-long, passkey:digits=64, 4000, after, LagKV lag=1024 ratio=0.5, -, partial}",
            HOLDS,
        ),
        Claim(
            "about 90 % of the performance at r = 1/8 (abstract)",
            "LongBench, L 1,024: 93 and 91 % of the full score; 64 digits: 86 and 67 %",
            "L 1,024, r 1/8, 4,000 tokens: r L is 128 tokens of each partition",
            "64 digits {lag-long, passkey:digits=64, 4000, after, LagKV lag=1024 ratio=0.125, -, partial}",
            HOLDS,
        ),
        Claim(
            "r L against the length of the wanted passage decides (Sec. 3.3, Fig. 2)",
            "Qwen, 64 tokens of key: r L 256 gives 97 %, r L 64 30 to 66 %, r L 16 15 %",
            "32 digits, 2,048 tokens; [all L and r](#lagkv-by-lag-and-ratio)",
            "r L 256: {lagkv, passkey, 2048, after, LagKV lag=1024 ratio=0.25, -, partial}; r L 64: "
            "{lagkv, passkey, 2048, after, LagKV lag=512 ratio=0.125, -, partial} (L 512) and "
            "{lagkv, passkey, 2048, after, LagKV lag=128 ratio=0.5, -, partial} (L 128); r L 32: "
            "{lagkv, passkey, 2048, after, LagKV lag=128 ratio=0.25, -, partial}; r L 16: "
            "{lagkv, passkey, 2048, after, LagKV lag=128 ratio=0.125, -, partial}",
            HOLDS,
        ),
        Claim(
            "over 50 % better than H2O at equal ratios (abstract, Sec. 3.3)",
            "64 digits, r 1/4: 97 %, H2O 71 %",
            HALF + ", before the question; 256 kept",
            "{eval, passkey, 2048, before, LagKV, 1024, partial}, H2O "
            "{eval, passkey, 2048, before, H2O, 1024, partial}; at 256 both are near chance: "
            "{eval, passkey, 2048, before, LagKV, 256, partial} and {eval, passkey, 2048, before, H2O, 256, partial}",
            PARTLY,
        ),
        Claim(
            "better than LocalKV and the L2 score (App. A.2, Fig. 12)",
            "64 digits, L 1,024, all r",
            HALF + ", before the question",
            "{eval, passkey, 2048, before, LagKV, 1024, partial}; LocalKV "
            "{eval, passkey, 2048, before, LocalKV, 1024, partial}; L2 with more memory "
            "{eval, passkey, 2048, before, LagKV L2, 1024, partial}",
            HOLDS,
        ),
        Claim(
            "chunked prefill keeps the first token in about 80 % of the cases at r = 1/8 (Sec. 3.4, Fig. 3)",
            "64 digits, L 1,024, r 1/8",
            "32 digits, 2,048 tokens, L 512, r 1/8",
            "{lag-chunked, chunked, 2048, chunked, LagKV lag=512 ratio=0.125, -, fgt}",
            HOLDS,
        ),
        Claim(
            "17 % of the memory at 20K and r = 1/8 (Sec. 3.5, Fig. 7)",
            "20,480 + 16 tokens, L 1,024",
            "Eq. 10 for the same n",
            "3,472 of 20,496 tokens, 16.9 %; the measured bytes are those of Eq. 10 at five contexts",
            HOLDS,
        ),
        Claim(
            "first token 1.5 times, next tokens 2 times faster at 20K and r = 1/8 (Sec. 3.5, Fig. 5, 6)",
            "Llama-3.1-8B, one A800",
            "one of 32 layers, two CPU cores, three runs ([table](#end-to-end))",
            "on that CPU, first token 1.31 [1.25, 1.41] times, next tokens 1.12 [1.04, 1.41] times as fast",
            CANNOT,
        ),
    ],
    "KeyDiff": [
        Claim(
            "block by block, KeyDiff beats H2O, TOVA and SnapKV at every budget (Table 1)",
            "LongBench, blocks of 128, 2K to 8K kept",
            "32 digits, 2,048 tokens, blocks of 128, 1,024 kept",
            "{chunked, chunked:chunk=128, 2048, chunked, KeyDiff, 1024, partial}; H2O "
            "{chunked, chunked:chunk=128, 2048, chunked, H2O, 1024, partial}; TOVA "
            "{chunked, chunked:chunk=128, 2048, chunked, TOVA, 1024, partial}; SnapKV "
            "{chunked, chunked:chunk=128, 2048, chunked, SnapKV, 1024, partial}",
            HOLDS,
        ),
        Claim(
            "the blocks hurt methods that score by attention, and not KeyDiff (Sec. 4.2, Table 10)",
            "the same, with the prompt in one block",
            HALF + ", after the question, pruned once; compare with the row above",
            "KeyDiff {eval, passkey, 2048, after, KeyDiff, 1024, partial}, TOVA "
            "{eval, passkey, 2048, after, TOVA, 1024, partial}, SnapKV "
            "{eval, passkey, 2048, after, SnapKV, 1024, partial}; only H2O, "
            "{eval, passkey, 2048, after, H2O, 1024, partial}, loses nothing by the blocks",
            PARTLY,
        ),
        Claim(
            "distinctive keys are the ones that matter, and finding them needs no query (Sec. 3)",
            "Spearman 0.94 of -cos and attention (Table 3)",
            "32 digits, 2,048 tokens, 256 kept, before the question",
            "{eval, passkey, 2048, before, KeyDiff, 256, partial}; next of those that read the text once "
            "{eval, passkey, 2048, before, LaCache, 256, partial} (LaCache)",
            HOLDS,
        ),
        Claim(
            "the same with many similar keys (Phonebook, App. H.1)",
            "a list of numbers, 6K kept",
            "four keys in the text, 512 of 2,048 kept, before the question",
            "{claims, niah-multikey, 2048, before, KeyDiff, 512, partial}; SATKV "
            "{claims, niah-multikey, 2048, before, SATKV, 512, partial}",
            NOT,
        ),
        Claim(
            "needles are found at all lengths and depths (Fig. 6)",
            "up to 32K, 6K kept",
            "64 digits, a quarter kept, 512 to 4,000 tokens, before the question",
            "4,000 tokens: {claims, passkey:digits=64, 4000, before, KeyDiff, 1000, partial}; SnapKV "
            "{claims, passkey:digits=64, 4000, before, SnapKV, 1000, partial}",
            HOLDS,
        ),
        Claim(
            "a window of recent tokens helps on some tasks (Sec. 3.2, Table 14)",
            "code, 2K kept",
            "256 kept, after and before the question; 64 kept before",
            "after: {eval, passkey, 2048, after, KeyDiff window, 256, partial} with, "
            "{eval, passkey, 2048, after, KeyDiff, 256, partial} without; before, 64 kept: "
            "{eval, passkey, 2048, before, KeyDiff window, 64, partial} with, "
            "{eval, passkey, 2048, before, KeyDiff, 64, partial} without",
            PARTLY,
        ),
        Claim(
            "the anchor hardly matters, and cosine is the best metric (Sec. 4.4, Tables 15, 16)",
            "LongBench",
            "32 digits, 2,048 tokens, 64 kept, before the question",
            "cosine to the mean {keydiff, passkey, 2048, before, KeyDiff, 64, partial}; to the median "
            "{keydiff, passkey, 2048, before, KeyDiff anchor=median, 64, partial}; dot product "
            "{keydiff, passkey, 2048, before, KeyDiff metric=dot, 64, partial}; distance "
            "{keydiff, passkey, 2048, before, KeyDiff metric=euclidean, 64, partial}",
            PARTLY,
        ),
        Claim(
            "at most 0.04 % loss at 8K (abstract); near the full cache on Math-500 (Sec. 4.3)",
            "LongBench; DeepSeek-R1 distilled",
            "",
            "needs LongBench and Math-500, and models that can do them",
            CANNOT,
        ),
        Claim(
            "up to 30 % lower latency than TOVA and SnapKV (Sec. 4.5, Fig. 7)",
            "Llama-3.2-3B, one A100",
            "4,096 tokens in blocks of 128, 1,024 kept, one layer, two CPU cores",
            "2.7 s with KeyDiff, TOVA and SnapKV alike (full cache 2.9 s, [table](#end-to-end)): no method here "
            "writes attention weights",
            NOT,
        ),
    ],
    "LaCache": [
        Claim(
            "lower perplexity than StreamingLLM at the same budget (Table 1)",
            "Llama-2-7B-Chat, 1K, 512 kept: 5.20, StreamingLLM 6.67",
            "4,096 tokens in windows of 256, 512 kept; nats per token",
            "{claims, perplexity, 4096, stream, LaCache, 512, loss}, StreamingLLM "
            "{claims, perplexity, 4096, stream, StreamingLLM, 512, loss}: "
            "{claims, perplexity, 4096, stream, LaCache, 512, best}",
            NOT,
        ),
        Claim(
            "endless generation with flat perplexity and memory, where the full cache fails (Fig. 5, 6)",
            "PG-19, 600K and 10M tokens",
            "100,000 tokens ([endless streams](endless.md))",
            "perplexity 2.60 at the end, full cache 21.9",
            HOLDS,
        ),
        Claim(
            "needles: nearly twice StreamingLLM's accuracy (Fig. 8, 9)",
            "half kept: 99 %, StreamingLLM 55 %",
            HALF + ", before the question",
            "{eval, passkey, 2048, before, LaCache, 1024, partial}, StreamingLLM "
            "{eval, passkey, 2048, before, StreamingLLM, 1024, partial}",
            NOT,
        ),
        Claim(
            "a better trade of score for throughput than H2O, TOVA and SnapKV (Fig. 7)",
            "LongBench, one H200",
            HALF + ", after the question",
            "{eval, passkey, 2048, after, LaCache, 1024, partial}, H2O "
            "{eval, passkey, 2048, after, H2O, 1024, partial}, TOVA "
            "{eval, passkey, 2048, after, TOVA, 1024, partial}; no method here decodes slower for its scores",
            NOT,
        ),
        Claim(
            "the ladder lies on the Pareto front of random patterns (Fig. 3)",
            "1,500 patterns",
            "60 patterns for each of eight sizes ([details](endless.md#is-the-ladder-a-good-shape))",
            "at eight sizes it beats 50 to 93 % of them, and never the best one",
            PARTLY,
        ),
        Claim(
            "LongBench, RULER and the ablation of S and O (Tables 3-6, Fig. 10)",
            "32 layers",
            "",
            "needs those data and a deeper model: three layers allow ladders of one rung",
            CANNOT,
        ),
    ],
    "LAQ": [
        Claim(
            "the answer's queries recall far more of the keys it needs than the prompt's last queries (Sec. 3, Fig. 2)",
            "GovReport, 1,024 kept",
            "32 digits, 2,048 tokens, 256 kept; recall of Eq. 3",
            "LAQ {claims, recall, 2048, after, LAQ, 256, recall}, SnapKV "
            "{claims, recall, 2048, after, SnapKV, 256, recall}: {claims, recall, 2048, after, LAQ, 256, SnapKV}",
            HOLDS,
        ),
        Claim(
            "needles at a budget of 128 (Table 2, Fig. 4)",
            "32K: 93 to 100 %, SnapKV 73 to 77 %",
            "7 digits, 4,000 tokens, 128 kept, after the question",
            "LAQ++ {claims, needle, 4000, after, LAQ++, 128, partial}, SnapKV "
            "{claims, needle, 4000, after, SnapKV, 128, partial}",
            HOLDS,
        ),
        Claim(
            "the lead is largest at small budgets (Table 1)",
            "LongBench, 128 to 512 kept",
            "8 and 32 digits, after the question",
            "8 digits: 64 kept {claims, passkey:digits=8, 2048, after, LAQ, 64, partial}, SnapKV "
            "{claims, passkey:digits=8, 2048, after, SnapKV, 64, partial}; 256 kept "
            "{claims, passkey:digits=8, 2048, after, LAQ, 256, partial}, SnapKV "
            "{claims, passkey:digits=8, 2048, after, SnapKV, 256, partial}. 32 digits, LAQ minus SnapKV: 64 kept "
            "{laq, passkey, 2048, after, LAQ, 64, SnapKV}, 1,024 kept {laq, passkey, 2048, after, LAQ, 1024, SnapKV}",
            PARTLY,
        ),
        Claim(
            "LAQ++, which observes the prompt's last eight queries too, is better than LAQ (Sec. 5.2, Table 1)",
            "LongBench, Qwen: +0.2, -0.2 and 0.0 points at 128, 256 and 512 (Table 7)",
            "32 digits, 64 kept, after the question; [why](#why-laq-is-better-than-laq)",
            "LAQ++ {laq, passkey, 2048, after, LAQ++, 64, partial}, LAQ {laq, passkey, 2048, after, LAQ, 64, partial}; "
            "paired {laq, passkey, 2048, after, LAQ++, 64, best}",
            NOT,
        ),
        Claim(
            "the number of draft steps matters more than the draft's quality (Sec. 6.1, 6.2, Fig. 5)",
            "1 to 8 steps; drafts of any method and budget score alike",
            "32 digits, 64 kept",
            "1, 8 and 32 steps: {laq-draft, passkey, 2048, after, LAQ steps=1, 64, partial}, "
            "{laq, passkey, 2048, after, LAQ, 64, partial}, "
            "{laq-draft, passkey, 2048, after, LAQ steps=32, 64, partial}; over a full-cache draft 8 and 32 steps: "
            "{laq-draft, passkey, 2048, after, LAQ steps=8 stage1=full, 64, partial}, "
            "{laq-draft, passkey, 2048, after, LAQ steps=32 stage1=full, 64, partial}",
            PARTLY,
        ),
        Claim(
            "budgets by layer would improve it further (Sec. 5.2)",
            "a conjecture",
            "PyramidKV's budgets, 64 kept",
            "{laq, passkey, 2048, after, PyramidLAQ, 64, partial}, LAQ {laq, passkey, 2048, after, LAQ, 64, partial}",
            NOT,
        ),
        Claim(
            "fixed texts in place of the draft do not help (App. B, Table 4)",
            "LongBench, Mistral, 512 kept: 38.2 and 37.8, SnapKV 40.5, LAQ++ 41.7",
            "32 digits, 64 kept, after the question; the paper's two texts",
            "{laq, passkey, 2048, after, TheAnswerIs, 64, partial} and "
            "{laq, passkey, 2048, after, FoundTheAnswer, 64, partial}; "
            "SnapKV {laq, passkey, 2048, after, SnapKV, 64, partial}, "
            "LAQ {laq, passkey, 2048, after, LAQ, 64, partial}",
            HOLDS,
        ),
        Claim(
            "+1 to +4 points on LongBench, +15 on RULER (Table 1, 5); stage 2 takes under 5 % (Table 3)",
            "7B and 8B models, one A100",
            "",
            LONGBENCH + ", and a GPU",
            CANNOT,
        ),
    ],
    "ProtoKV": [
        Claim(
            "better than SnapKV at equal memory: +2.1 % on LongBench, needles 97 against 94 % at 128 (Fig. 8, 9)",
            "up to 8K tokens",
            "7 digits, 128 kept; 32 digits, 256 kept; 2,048 tokens, after the question",
            "7 digits: {protokv-needle, needle, 2048, after, ProtoKV, 128, partial}, SnapKV "
            "{protokv-needle, needle, 2048, after, SnapKV, 128, partial}. 32 digits, minus SnapKV: "
            "{protokv, passkey, 2048, after, ProtoKV, 256, SnapKV}; with softmax scores and a window of 8 "
            "{protokv, passkey, 2048, after, ProtoKV score=softmax window=8, 256, SnapKV}, then with 32 chunks "
            "{protokv, passkey, 2048, after, ProtoKV score=softmax window=8 num_chunks=32, 256, SnapKV} or without "
            "anchors {protokv, passkey, 2048, after, ProtoKV score=softmax window=8 num_sats=0, 256, SnapKV}",
            PARTLY,
        ),
        Claim(
            "anchors are few, cluster and draw most attention; losing them hurts (Sec. 3, Fig. 3-6)",
            "top 10 % have over 60 % of the attention",
            "[semantic anchors](anchors.md)",
            "[figures there](anchors.md)",
            PARTLY,
        ),
        Claim(
            "clusters are better than keeping the anchors alone (SATKV, Sec. 4.1, App. H)",
            "LongBench",
            HALF + ", before the question",
            "SATKV {eval, passkey, 2048, before, SATKV, 1024, partial}, ProtoKV "
            "{eval, passkey, 2048, before, ProtoKV, 1024, partial}",
            NOT,
        ),
        Claim(
            "chunk-only and LSH-only clusters are worse (Fig. 10)",
            "LongBench, all budgets",
            "32 digits, 256 kept, after the question",
            "{protokv, passkey, 2048, after, ProtoKV, 256, partial}; chunks "
            "{protokv, passkey, 2048, after, ProtoKV clusters=chunks, 256, partial}; LSH "
            "{protokv, passkey, 2048, after, ProtoKV clusters=lsh, 256, partial}",
            PARTLY,
        ),
        Claim(
            "20 to 40 anchors are best (Fig. 12)",
            "LongBench, 256 kept",
            "softmax scores, window 8, 256 kept",
            "0, 8, 32, 128 anchors: {protokv, passkey, 2048, after, ProtoKV score=softmax window=8 num_sats=0, 256, "
            "partial}, {protokv, passkey, 2048, after, ProtoKV score=softmax window=8 num_sats=8, 256, partial}, "
            "{protokv, passkey, 2048, after, ProtoKV score=softmax window=8, 256, partial}, "
            "{protokv, passkey, 2048, after, ProtoKV score=softmax window=8 num_sats=128, 256, partial}",
            NOT,
        ),
        Claim(
            "about 500 prototypes are best (Fig. 11)",
            "5K to 15K tokens: 10 to 30 tokens each",
            "softmax scores, window 8, 256 kept, 2,048 tokens",
            "32 chunks (64 tokens each) "
            "{protokv, passkey, 2048, after, ProtoKV score=softmax window=8 num_chunks=32, 256, partial}, "
            "129 (16 tokens each) {protokv, passkey, 2048, after, ProtoKV score=softmax window=8, 256, partial}, "
            "496 (4 tokens each) "
            "{protokv, passkey, 2048, after, ProtoKV score=softmax window=8 num_chunks=496, 256, partial}",
            NOT,
        ),
        Claim(
            "budgets by layer or head improve it (Table 4)",
            "+0.3 to +0.9 points",
            "PyramidKV's budgets, 256 kept; heads of a cache cannot differ in length",
            "{protokv, passkey, 2048, after, PyramidProtoKV, 256, partial}, without "
            "{protokv, passkey, 2048, after, ProtoKV, 256, partial}",
            NOT,
        ),
        Claim(
            "costs about as much as SnapKV (Fig. 13)",
            "two RTX 3090",
            "65,536 tokens, 8 heads, two CPU cores",
            "SnapKV takes 0.6 (bf16) and 0.9 (fp32) of its time ([ProtoKV](methods/protokv.md#formula))",
            HOLDS,
        ),
        Claim(
            "RULER, dynamic decoding on MATH and AIME (Tables 2, 8, 9)",
            "Llama-3-8B",
            "",
            "needs models that can do them",
            CANNOT,
        ),
    ],
}
