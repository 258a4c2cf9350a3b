"""Tasks without text scores: how well a method preserves the full cache's answer, attention and predictions.

They inspect the cache, or do not cut it exactly once, so they need kvops' own reader (reader.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...methods.recall_metric import best_slots
from ..specs import Refused
from .base import Filler, Outcome, Prompt, Task, asked, check_options
from .needles import Passkey

if TYPE_CHECKING:  # which needs transformers, where it is run
    from ..methods import Rule
    from ..reader import Prefill, Reader


def measured(scores: Mapping[str, Iterable[float | Tensor]], prefill: Prefill, prompts: list[Prompt]) -> Outcome:
    """Return the outcome of scores that need no generated answer."""
    count = len(prompts)
    found = {name: [float(x) for x in values] for name, values in scores.items()}
    return Outcome(found, prefill.tokens, prefill.bytes_held // count, prefill.bytes_full // count, prefill.seconds)


@dataclass
class OfPasskeys(Task):
    """A measure on the prompts of `passkey`."""

    digits: int = Passkey.digits
    depths: int = Passkey.depths
    chat: bool | None = None

    def __post_init__(self) -> None:
        self.passkey = Passkey(self.digits, self.depths, self.chat)

    def prompts(self, filler: Filler, context: int, count: int, seed: int) -> list[Prompt]:
        return self.passkey.prompts(filler, context, count, seed)


@dataclass
class Agreement(OfPasskeys):
    """Logit agreement with the full cache, whose greedy answer is fed to the cut cache.

    kl: mean over the answer's tokens of KL(p || q) = sum over the vocabulary of p (log p - log q), in nats; p is the
    full cache's prediction, q the cut cache's. top1: the fraction of tokens where both have the same most likely token.
    """

    name = "agreement"
    metrics = ("kl", "top1")
    percent = False
    better = "lower"

    def run(  # type: ignore[override]  # only kvops' own reader can inspect the cache
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        context, (question,) = asked(prompts, point)
        whole = reader.whole(context, question, prompts[0].turns[0].new_tokens)
        prefill = reader.prefill(context, rule, budget)
        logits = reader.follow(prefill, question, whole.said)
        kl = [divergence(*row).mean() for row in zip(whole.logits, logits)]
        top1 = (logits.argmax(-1) == whole.logits.argmax(-1)).double().mean(-1)
        return measured({"kl": kl, "top1": top1}, prefill, prompts)


def divergence(logits: Tensor, others: Tensor) -> Tensor:
    """KL(softmax(logits) || softmax(others)) in nats, over the last dim, in fp64."""
    p, q = (x.double().log_softmax(-1) for x in (logits, others))
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


@dataclass
class Recall(OfPasskeys):
    """How many of the slots that the answer attends to were kept (LAQ, Sec. 3).

    The queries of the full cache's greedy answer attend to the prompt's keys only. Their softmax, summed over the
    answer and averaged over a group's query heads, gives each slot of each layer and KV head a weight (`kvops.recall`).
    recall: the fraction of the heaviest slots that the method kept, counting as many as it kept there. mass: the
    fraction of all weight on the kept slots. Both are means over layers and heads. With a cut before the question the
    prompt is the context.
    """

    name = "recall"
    metrics = ("recall", "mass")

    def run(  # type: ignore[override]  # only kvops' own reader can inspect the cache
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        context, (question,) = asked(prompts, point)
        weights = reader.whole(context, question, prompts[0].turns[0].new_tokens).scores
        prefill = reader.prefill(context, rule, budget)
        pairs = list(zip(weights, prefill.positions, strict=True))
        recall = [best_slots(x, kept.shape[2]).gather(2, kept).double().mean(-1) for x, kept in pairs]
        mass = [x.gather(2, kept).sum(-1) / x.sum(-1) for x, kept in pairs]
        scores = {"recall": recall, "mass": mass}
        return measured({name: torch.stack(x).mean((0, 2)) for name, x in scores.items()}, prefill, prompts)


@dataclass
class OfText(Task):
    """The loss of pieces of the text, in nats."""

    metrics = ("loss",)
    percent = False
    better = "lower"

    def __post_init__(self) -> None:
        check_options(self)

    def prompts(self, filler: Filler, context: int, count: int, seed: int, more: int = 0) -> list[Prompt]:
        """Cut pieces of context + more tokens from the text, without overlap if it is long enough."""
        room = context + more - len(filler.first)
        if room < 2 or room > len(filler.ids):
            least, most = len(filler.first) + 2, len(filler.ids) + len(filler.first)
            raise Refused(
                f"--context: expected {max(1, least - more)} to {most - more} (the length of --text), got {context}"
            )
        spare = len(filler.ids) - count * room
        if spare >= 0:
            gaps = np.sort(np.random.default_rng([seed, context]).integers(0, spare + 1, count))
            begins = np.arange(count) * room + gaps
        else:
            begins = np.linspace(0, len(filler.ids) - room, count).astype(int)
        return [Prompt(np.concatenate([filler.first, filler.ids[x : x + room]]), ()) for x in begins]


@dataclass
class Perplexity(OfText):
    """Perplexity by position over a long text (LaCache, Table 1), in pieces of --context tokens.

    The text arrives in windows of `window` tokens. After each the method evicts as in a stream, so for most methods the
    cache never exceeds the budget plus a window. loss: mean of -log p over all tokens but the first, in nats; its
    exponential is the perplexity. Memory is taken after the window at which the cache was largest. Positions beyond the
    model's training length are measured like others.

    more: "ends", the last token of each of `bins` stretches of the text; "loss" and "perplexity" there, for the batch.
    """

    window: int = 256
    bins: int = 8

    name = "perplexity"
    points = ("stream",)

    def run(  # type: ignore[override]  # only kvops' own reader can inspect the cache
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        count = len(prompts)
        stream = reader.stream(np.stack([x.context for x in prompts]), rule, budget, self.window)
        most = max(stream.held, key=lambda x: (x.bytes, x.tokens))
        stretches = np.array_split(stream.losses, min(self.bins, stream.losses.shape[1]), axis=1)
        loss = [float(x.mean()) for x in stretches]
        more = {
            "ends": np.cumsum([x.shape[1] for x in stretches]).tolist(),
            "loss": loss,
            "perplexity": np.exp(loss).tolist(),
        }
        scores = {"loss": stream.losses.mean(1).tolist()}
        full = stream.held[-1].bytes_full // count
        return Outcome(scores, most.tokens, most.bytes // count, full, float(stream.seconds.sum()), more=more)


@dataclass
class Continuation(OfText):
    """Loss of the text that follows a context, after the cache was cut once.

    The model reads the first --context tokens of a piece of text and the method cuts their cache. Then the model
    predicts each of the next `tokens` tokens from what is left of the context and from those before it. loss: mean of
    -log p over these tokens, in nats; its exponential is the perplexity. The first is predicted before anything is
    evicted.
    """

    tokens: int = 256

    name = "continuation"
    points = ("once",)

    def prompts(self, filler: Filler, context: int, count: int, seed: int, more: int = 0) -> list[Prompt]:
        return super().prompts(filler, context, count, seed, more + self.tokens)

    def run(  # type: ignore[override]  # only kvops' own reader can inspect the cache
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        context, following = np.split(np.stack([x.context for x in prompts]), [-self.tokens], axis=1)
        prefill = reader.prefill(context, rule, budget)
        logits = reader.follow(prefill, None, following)
        loss = F.cross_entropy(logits.mT.float(), reader.tokens(following), reduction="none").mean(1)
        return measured({"loss": loss}, prefill, prompts)


@dataclass
class Chunked(OfPasskeys):
    """Chunked prefill (LagKV, Sec. 3.4): the passkey prompt with its question arrives in chunks of `chunk` tokens.

    After each the method evicts as in a stream; later chunks attend to what is left. chunk=0: the paper's chunks for
    LagKV, S + 2 L tokens and then L; 256 for the others. fgt: the first generated token equals that of the full cache's
    one-step prefill. exact, partial: as in `passkey`; the cache does not evict while the model answers.
    """

    chunk: int = 0

    name = "chunked"
    points = ("chunked",)
    metrics = ("fgt", "exact", "partial")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.chunk, int) or self.chunk < 0:
            raise ValueError(f"chunked: chunk must be an integer, at least 0, got {self.chunk!r}")

    def run(  # type: ignore[override]  # only kvops' own reader can inspect the cache
        self, reader: Reader, filler: Filler, prompts: list[Prompt], rule: Rule, budget: int | None, point: str
    ) -> Outcome:
        ids, questions = asked(prompts, "after")
        whole = reader.whole(ids, None, 1)
        prefill = reader.prefill(ids, rule, budget, self.chunk)
        first = prefill.logits.argmax(-1).cpu().numpy()
        outcome = self.passkey.answers(reader, filler, prompts, prefill, questions)
        outcome.scores = {"fgt": (first == whole.said[:, 0]).astype(float).tolist(), **outcome.scores}
        return outcome
