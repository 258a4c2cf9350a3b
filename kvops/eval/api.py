"""`kvops.eval.run`: the evaluation of a loaded model, from Python."""

from __future__ import annotations

import csv
import hashlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..bench.record import origin, replace
from ..files import TEXT
from ..methods import Policy
from .identity import described, described_model, digest
from .methods import DEFAULT, rule_of
from .plan import SHARES, Plan, Step
from .results import Results, cell_of, load
from .specs import Refused, canonical
from .summary import Row, Summary, of_line, summarize
from .tasks import POINTS, TASKS, Filler, Task, code_of, in_chat, make_task, spec_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(repr=False)
class Evaluation:
    """The results of `run`. `print` shows the main scores as a table.

    Attributes:
        summary: The rows with their intervals and paired differences, as `summary.json` has them.
    """

    summary: Summary

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per task, context, cut point, method and budget, over all prompts.

        It has `task`, `context`, `point`, `method`, `budget`, the number of prompts `n`, each score as its mean and the
        ends of its 95 % interval (`partial`, `partial_low`, `partial_high`), `tokens` kept per KV head, `bytes_held`,
        `bytes_full`, `prefill_s`, `decode_tokens_per_s`, and `unreachable`: why the method cannot meet the budget, or
        None. What is not known is None.
        """
        metrics = dict.fromkeys(x for kind in self.summary.traits.values() for x in kind.metrics)
        return [flat(x, metrics) for x in self.summary.rows]

    def to_pandas(self) -> pandas.DataFrame:
        """Return `rows` as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "Evaluation.to_pandas: expected pandas, which is not installed: pip install pandas, or use to_csv"
            ) from error
        return pandas.DataFrame(self.rows)

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write `rows` to a CSV file, with a line of names first. What is not known is empty."""
        text = StringIO(newline="")
        writer = csv.DictWriter(text, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        replace(Path(path), text.getvalue())

    def report(self, folder: str | PathLike[str]) -> Path:
        """Write `report.md`, its pictures and `summary.json` to a folder, as the command line does.

        Returns:
            The path of `report.md`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        need_matplotlib("Evaluation.report")
        from . import report

        report.write_summary(self.summary, Path(folder))
        return Path(folder) / "report.md"

    def board(self, path: str | PathLike[str]) -> None:
        """Write [the board](../evaluation.md#the-board) with these results and the recorded runs, as the command line
        does with `--board`: one HTML file."""
        from . import board

        board.write_board(Path(path), [board.of_summary("kvops.eval.run", self.summary)])

    def plot(self, task: str | None = None, context: int | None = None) -> Figure:
        """Draw the main score against the tokens kept, with a panel per cut point.

        Args:
            task: The task's name in `rows`; default: the first one.
            context: The context's length; default: the shortest one of that task.

        Returns:
            The figure, for a notebook to show or for `savefig`.

        Raises:
            ValueError: There is no such task or context, or nothing to draw.
            ImportError: matplotlib is not installed.
        """
        need_matplotlib("Evaluation.plot")
        from . import plots

        known = dict.fromkeys((x.task, x.context) for x in self.summary.rows)
        found = [x for x in known if task in (None, x[0]) and context in (None, x[1])]
        if not found:
            names = "; ".join(f"{x}, {n}" for x, n in known)
            raise ValueError(f"Evaluation.plot: expected a task and context of {names}, got {task!r} and {context}")
        figure = plots.accuracy(self.summary, *found[0])
        if figure is None:
            raise ValueError(
                f"Evaluation.plot: {found[0][0]} has no score of a method at a budget; give budgets to run"
            )
        return figure

    def __str__(self) -> str:
        from . import report

        return report.table(self.summary)

    __repr__ = __str__


def flat(row: Row, metrics: Iterable[str]) -> dict[str, Any]:
    """Return a row of results as a flat dict; `metrics` are the scores that all rows have."""
    keys = ("task", "context", "point", "method", "budget")
    found: dict[str, Any] = {**dict(zip(keys, row.cell)), "n": row.n}
    for name in metrics:
        score = row.scores.get(name)
        found |= {name: score and score.mean, f"{name}_low": score and score.low, f"{name}_high": score and score.high}
    known = row.unreachable is None
    for name in ("tokens", "bytes_held", "bytes_full", "prefill_s", "decode_tokens_per_s"):
        found[name] = getattr(row, name) if known else None
    return {**found, "unreachable": row.unreachable}


def need_matplotlib(who: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{who}: expected matplotlib, which is not installed: pip install 'kvops[bench]'") from error


def run(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    methods: Iterable[str | Policy | type[Policy]] = DEFAULT,
    tasks: Iterable[str | Task] = ("passkey",),
    budgets: Iterable[int | float] = tuple(SHARES),
    context: int | Iterable[int] = 2048,
    points: Iterable[Literal["before", "after"]] = ("before", "after"),
    prompts: int = 64,
    batch: int = 11,
    seed: int = 0,
    chat: bool | None = None,
    text: str | None = None,
    data: str | PathLike[str] | None = None,
    share_prefill: bool = False,
    out: str | PathLike[str] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> Evaluation:
    """Evaluate methods on a loaded model, at the same budgets and on the same prompts.

    ```python
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvops.eval
    from kvops import demo

    model, tokenizer = (x.from_pretrained(demo.MODEL) for x in (AutoModelForCausalLM, AutoTokenizer))
    results = kvops.eval.run(
        model, tokenizer, methods=["full", "keydiff", "snapkv"], budgets=[0.25], context=512, prompts=4, on_row=print
    )
    print(results)
    ```

    During the run the model is in eval mode and uses the library's attention. Afterwards it is as it was before.

    Args:
        model: A causal language model of transformers, on the device where it runs. PEFT or `torch.compile` may have
            wrapped it, and its weights may be quantized.
        tokenizer: The model's tokenizer.
        methods: Names as on the command line ("keydiff:recent=0.1"), classes, or policies. A name or a class is
            measured at every budget (`Policy.at_budget`). A policy is measured once, as it is. Default: all of the
            library's methods but KVzap, which needs gates.
        tasks: Names as on the command line ("passkey:digits=64"), or task objects, such as those of a subclass of
            `kvops.eval.Task`.
        budgets: Tokens per KV head (int), or fractions of the context (float); default: 0.5, 0.125 and 0.03125.
        context: Tokens of context, or several such numbers.
        points: Evict before the question is known, after it, or both.
        prompts: The number of prompts per task and context.
        batch: How many of them are read together.
        seed: The seed of the prompts.
        chat: Whether prompts with questions are a user's turn in the tokenizer's chat template; None: if it has one.
        text: The text in which needles are hidden; default: the one that comes with kvops.
        data: The folder with a local copy of RULER or LongBench.
        share_prefill: Read each prompt once for all methods and budgets, which saves about half of the time. Their
            prefill times are None then. LAQ, KVzip and tasks that read in chunks read for themselves. The uncut cache
            and the queries of all layers stay in memory meanwhile.
        out: A folder. Each measured cell is on disk there before the next one starts, and a second run with the same
            arguments continues an interrupted one. None: results are in memory only.
        on_row: Called with each measured cell: a dict as in `Evaluation.rows`, without intervals, for the prompts of
            one `batch`.

    Returns:
        The results of these methods, tasks, contexts, cut points and budgets. If memory was short for some of them, a
        warning says so, and they are missing.

    Raises:
        ValueError: An argument is not possible, `out` has results of other settings, or another process writes there.
        TypeError: A method, a task or the model is of the wrong type.
    """
    from ..hf.attention import own_attention, unwrap
    from .reader import Reader

    who = "kvops.eval.run"
    inner = unwrap(who, model)
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise TypeError(
            f"{who}: tokenizer must be the model's tokenizer of transformers, got {type(tokenizer).__name__}"
        )
    folder = None if out is None else Path(out)
    with arguments_named(who), tempfile.TemporaryDirectory() as temporary:
        if not (chat is None or isinstance(chat, bool)):
            raise Refused(f"--chat: expected True, False or None, got {chat!r}")
        use_chat = bool(tokenizer.chat_template) if chat is None else chat
        made = dict(in_chat(*task_of(x, data), use_chat) for x in several("tasks", tasks, str, Task))
        named = [(f"{x!r:.80}", rule_of(x)) for x in several("methods", methods, str, Policy, type)]
        contexts = [context] if isinstance(context, int) else [*context]
        plan = Plan(made, contexts, [*points], named, [*budgets], prompts, batch, seed)
        if wrong := [x for x in plan.points if x not in POINTS]:
            raise Refused(f"--points: expected some of {', '.join(POINTS)}, got {wrong[0]!r}")
        settings = {
            **(settings_of(inner, text, data) if plan.needs_model else {}),
            **{"prompts": prompts, "batch": batch, "seed": seed},
            **{"dtype": str(inner.dtype).removeprefix("torch."), "device": str(inner.device)},
            **({"share_prefill": True} if share_prefill else {}),
        }
        codes = [*(x.code for x in plan.rules), *map(code_of, made.values())]
        where = origin(who, device=inner.device.type)
        where |= {name: mark for x in codes for name, mark in x.items()}
        if any(getattr(x, "chat", False) for x in made.values()):
            where["chat template"] = digest(tokenizer.chat_template)
        failed: list[Step] = []

        def prepared() -> tuple[Reader, Filler]:
            reader = Reader(model, tokenizer, inner, share_prefill)
            return reader, Filler(tokenizer, TEXT.read_text() if text is None else text)

        with Results((folder or Path(temporary)) / "results.jsonl", settings, where) as results:
            with in_eval_mode(inner), own_attention(inner):
                for step in plan.measure(results, prepared, warm_each=inner.device.type != "cpu"):
                    if step.line is None:
                        failed.append(step)
                    elif on_row is not None:
                        on_row(row_of(step, plan, step.line))
        if failed:
            warnings.warn(
                f"{who}: {len(failed)} of {len(plan.cells())} cells ran out of memory and are missing, the first one "
                f"{failed[0].cell}: {failed[0].failed}; lower batch or context, and run again with the same out",
                stacklevel=2,
            )
        classes = {name: type(x) for name, x in made.items()}
        heads, lines = load([results.file])
        asked = plan.cells()
        return Evaluation(summarize(heads, [x for x in lines if cell_of(x) in asked], classes))


def several(name: str, given: Any, *kinds: type) -> list[Any]:
    """Return an argument's elements, each of one of the types. A single one, such as a text, is a mistake."""
    if isinstance(given, kinds) or not isinstance(given, Iterable):
        raise TypeError(f"kvops.eval.run: {name}: expected a list, got {given!r:.80}; write [{given!r:.40}]")
    found = [*given]
    for x in found:
        if not isinstance(x, kinds):
            raise TypeError(f"kvops.eval.run: {name}: expected {EXPECTED[name]}, got {type(x).__name__} {x!r:.80}")
    return found


EXPECTED = {
    "methods": "names, kvops policies or subclasses of kvops.Policy",
    "tasks": "names or objects of subclasses of kvops.eval.Task",
}


def task_of(task: str | Task, data: str | PathLike[str] | None) -> tuple[str, Task]:
    """Return a task with its name in the results."""
    if isinstance(task, str):
        spec = canonical(task, TASKS)
        return spec, make_task(spec, None if data is None else Path(data))
    return spec_of(task), task


def settings_of(model: PreTrainedModel, text: str | None, data: str | PathLike[str] | None) -> dict[str, str]:
    """Return the settings on which prompts and answers depend, for the record."""
    found = {"model": described_model(model)}
    found["text"] = described(TEXT) if text is None else f"text ({hashlib.sha256(text.encode()).hexdigest()[:12]})"
    return found if data is None else {**found, "data": described(Path(data))}


def row_of(step: Step, plan: Plan, line: dict[str, Any]) -> dict[str, Any]:
    """Return a measured cell as a row."""
    row, kind = of_line(line, plan.tasks[step.cell.task])
    found = flat(row, kind.metrics)
    return {x: y for x, y in found.items() if not x.endswith(("_low", "_high"))} | {"batch": step.cell.batch}


@contextmanager
def arguments_named(who: str) -> Iterator[None]:
    """Name arguments instead of options of the command line in errors."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{who}: {re.sub(r'--(?=[a-z])', '', str(error))}") from error


@contextmanager
def in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch a model to eval mode; afterwards each of its modules is in the mode that it was in before."""
    training = [x for x in model.modules() if x.training]
    try:
        yield
    finally:
        for x in training:
            x.training = True
