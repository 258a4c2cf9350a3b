"""python -m kvops.eval: how accurate, small and fast each method is, on any local model.

tasks/        prompts with their answers, and how answers are scored
methods.py    the methods by name, each set to a budget in tokens
reader.py     a model that reads a prompt, lets a method cut the cache, and answers
stream.py     a text that streams through a cache, and the loss of each next token
results.py    measured cells as JSON lines; an interrupted run continues where it stopped
statistics.py paired differences between methods, with intervals and tests
summary.py    those lines as rows, with means and intervals
report.py     the rows as tables; plots.py: as pictures; labels.py: labels at the ends of lines
__main__.py   the run: every task, context, cut point, method and budget on the same prompts
"""
