"""The commands of `kvops COMMAND` and `python -m kvops COMMAND`. Each is the `main` of a module.

This module and `kvops.info` import torch and the rest of kvops only where a command needs them. So they work where
`import kvops` fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from .specs import did_you_mean


class Command(NamedTuple):
    """A command: the module whose `main(argv)` runs, and what it does."""

    module: str
    what: str


COMMANDS = {
    "info": Command("kvops.info", "print what this installation has, and what it lacks"),
    "demo": Command("kvops.demo.__main__", "show on a small model what eviction does"),
    "eval": Command("kvops.eval.__main__", "measure accuracy, memory and time of the methods on a model"),
    "bench": Command("kvops.bench.__main__", "measure the operators, and compare them with PyTorch"),
    "analysis": Command("kvops.analysis.__main__", "measure the keys and queries of a model"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines, instead of the usage with all options and then the error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the options\n")


def called() -> bool:
    """Return whether this process is the script `kvops` or `python -m kvops`, whose package is imported first."""
    if sys.argv[0] == "-m":  # Python is still importing the module that it is going to run
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "kvops"
    return Path(sys.argv[0]).name == "kvops"


def main(argv: list[str] | None = None, *, error: str = "") -> int:
    """Run a command.

    Args:
        argv: The command and its arguments; without a command, those of `info`. None: the arguments of this process.
        error: Why `import kvops` has failed; empty if it has not. Then only `info` runs.

    Returns:
        The exit status.
    """
    given = sys.argv[1:] if argv is None else argv
    name, rest = (given[0], given[1:]) if given and not given[0].startswith("-") else ("info", given)
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"kvops: expected a command, {known}, got {name!r}{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    if error and name != "info":
        print(f"kvops {name}: {error}", file=sys.stderr)
        return 1
    command = importlib.import_module(COMMANDS[name].module).main
    if name == "info":
        return command(rest, error=error)
    try:
        return command(rest)
    except BrokenPipeError:  # `kvops demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail to flush what is left
        return 1
