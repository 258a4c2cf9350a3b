"""python -m kvops.eval: what each method keeps of what matters, at what memory and speed, on any local model.

tasks/        prompts with their answers, and how answers are judged
methods.py    the methods by name, brought to a budget in tokens
reader.py     a model that reads a prompt, lets a method cut the cache, and answers
stream.py     a text that streams through a cache, and how well each next token is foreseen
results.py    what was measured, as JSON lines; an interrupted run goes on where it stopped
summary.py    its lines as rows, with means and intervals
report.py     the rows as tables; plots.py: as pictures
__main__.py   the run: every task, context, point of the cut, method and budget on the same prompts
"""
