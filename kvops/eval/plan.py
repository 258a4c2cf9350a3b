"""What a run measures: every task, context, cut point, method and budget on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..methods.budgets import budget_tokens
from .methods import Rule, Unreachable
from .results import Cell, Results
from .specs import Refused
from .tasks import POINTS, Filler, Prompt, Reader, Task

MOST = 2**31 - 1  # tokens
SHARES = [0.5, 0.125, 0.03125]  # the default budgets, fractions of the context


class Step(NamedTuple):
    """A cell that was measured, with its line in the results; the reason instead of a line if memory was short."""

    cell: Cell
    line: dict[str, Any] | None
    failed: str = ""


@dataclass
class Plan:
    """The cells of a run, and how they are measured.

    Attributes:
        tasks: by their names in the results.
        contexts: tokens.
        points: cut points, of those that the tasks have.
        methods: with what the user calls them.
        budgets: tokens per KV head, or fractions of the context.
        prompts: per task and context.
        batch: prompts that are read together.
        seed: of the prompts.

    Raises:
        Refused: a number is too small or too large, or there is nothing to measure.
    """

    tasks: dict[str, Task]
    contexts: list[int]
    points: list[str]
    methods: list[tuple[str, Rule]]
    budgets: list[int | float]
    prompts: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("tasks", "contexts", "points", "methods"):
            if not getattr(self, name):
                raise Refused(f"--{name.replace('contexts', 'context')}: expected at least one, got none")
        for name, least in (("prompts", self.prompts), ("batch", self.batch), ("context", min(self.contexts))):
            if least < 1:
                raise Refused(f"--{name}: expected at least 1, got {least}")
        if max(self.contexts) > MOST:
            raise Refused(f"--context: expected at most {MOST}, got {max(self.contexts)}")
        if self.seed < 0:
            raise Refused(f"--seed: expected at least 0, got {self.seed}")
        for budget in self.budgets:
            if not (1 <= budget <= MOST if isinstance(budget, int) else 0 < budget < 1):
                raise Refused(f"--budgets: expected tokens (an integer) or a fraction in (0, 1), got {budget}")
        if not self.budgets and any(x.budgeted for _, x in self.methods):
            raise Refused("--budgets: expected at least one, got none")
        named: dict[str, tuple[str, Rule]] = {}
        for said, rule in self.methods:
            other, found = named.setdefault(rule.label, (said, rule))
            if found != rule:
                raise Refused(
                    f"--methods: {other} and {said} are both called {rule.label} in tables; name only one of them"
                )
        self.rules = [rule for _, rule in named.values()]

    @property
    def needs_model(self) -> bool:
        return any(x.needs_model for x in self.tasks.values())

    def batch_size(self, task: Task) -> int:
        return self.batch if task.batches else 1

    def cells(self) -> dict[Cell, Rule]:
        """Return the cells in the order of the run, so that compared cells are measured close together.

        Each is there once: a fraction and a number may be the same budget.
        """
        found: dict[Cell, Rule] = {}
        for spec, task in self.tasks.items():
            for context in self.contexts:
                for batch in range(-(-self.prompts // self.batch_size(task))):
                    for point in (x for x in task.points if x in self.points or x not in POINTS):
                        for rule in self.rules:
                            sizes = [budget_tokens(x, context) for x in self.budgets]
                            for size in sizes if rule.budgeted else [None]:
                                found[Cell(spec, context, point, rule.label, size, batch)] = rule
        return found

    def measure(
        self, results: Results, load: Callable[[], tuple[Reader, Filler]], warm_each: bool = False
    ) -> Iterator[Step]:
        """Measure the cells that the results lack.

        Args:
            results: where they are written.
            load: returns the model and the text; called if one of the missing cells needs them.
            warm_each: run each method once untimed, as on a GPU, not only the first one.

        Yields:
            Each cell, after it is on disk.
        """
        todo = [x for x in self.cells().items() if x[0] not in results.done]
        reader: Any = None
        filler: Any = None
        if any(self.tasks[x.task].needs_model for x, _ in todo):
            reader, filler = load()
        made: tuple[tuple[str, int] | None, list[Prompt]] = (None, [])  # the prompts of a task and context
        warm: set[tuple[Any, ...]] = set()
        for cell, rule in todo:
            task, size = self.tasks[cell.task], self.batch_size(self.tasks[cell.task])
            if made[0] != (cell.task, cell.context):
                made = (cell.task, cell.context), task.prompts(filler, cell.context, self.prompts, self.seed)
            prompts = made[1][cell.batch * size : (cell.batch + 1) * size]
            run = partial(task.run, reader, filler, prompts, rule, cell.budget, cell.point)
            # Untimed: the first call with these shapes loads, compiles and allocates; on a GPU each method's does.
            shapes = (cell.task, cell.context) + ((cell.point, cell.method) if warm_each else ())
            try:
                if shapes not in warm:
                    warm.add(shapes)
                    run()
                outcome = run()
                check_scores(cell.task, outcome.scores, len(prompts))
                yield Step(cell, results.add(cell, {**asdict(outcome), "depths": [x.depth for x in prompts]}))
            except Unreachable as error:
                yield Step(cell, results.add(cell, {"unreachable": str(error)}))
            except torch.OutOfMemoryError as error:  # not recorded: the next run tries again
                yield Step(cell, None, str(error).splitlines()[0])


def check_scores(task: str, scores: dict[str, list[float]], count: int) -> None:
    """Refuse the scores of a task that are not one number per prompt."""
    for name, values in scores.items():
        if len(values) != count or not all(isinstance(x, (int, float)) for x in values):
            raise Refused(
                f"task {task}: expected a list of {count} numbers as {name}, one per prompt, got {values!r:.80}"
            )
