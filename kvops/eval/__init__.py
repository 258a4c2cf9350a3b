"""How accurate, small and fast each method is, on any local model: `kvops.eval.run`, and `python -m kvops.eval`.

api.py        `run`: a loaded model, and methods and tasks of one's own
__main__.py   the command
plan.py       what is measured: every task, context, cut point, method and budget on the same prompts
tasks/        prompts with their answers, and how answers are scored
methods.py    the methods, each set to a budget in tokens
reader.py     a model that reads a prompt, lets a method cut the cache, and answers
stream.py     a text that streams through a cache, and the loss of each next token
results.py    measured cells as JSON lines; an interrupted run continues where it stopped
smollm2.py    a real language model, from the package index
identity.py   fingerprints of models, files and code, so that it continues with the same ones
statistics.py paired differences between methods, with intervals and tests
summary.py    those lines as rows, with means and intervals
report.py     the rows as tables; plots.py: as pictures; labels.py: labels at the ends of lines; board.py: as a page
"""

from .api import Evaluation as Evaluation
from .api import run as run
from .tasks import AnswerTask as AnswerTask
from .tasks import Filler as Filler
from .tasks import Outcome as Outcome
from .tasks import Prompt as Prompt
from .tasks import Task as Task
from .tasks import Turn as Turn

__all__ = ["AnswerTask", "Evaluation", "Filler", "Outcome", "Prompt", "Task", "Turn", "run"]
