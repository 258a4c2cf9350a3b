"""Text of result files, which may be others', in pages of ours."""

from __future__ import annotations

import re


def one_line(text: str) -> str:
    """Fit to be printed."""
    return "".join(x if x.isprintable() else "?" for x in " ".join(text.split()))


def escape(text: str) -> str:
    """In Markdown, as it is: no name is a link, a tag, or a new line of a table."""
    special = r"[\\`*\[\]<|&~$@]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(rf"{special}|:(?=//)|(?<=www)\.", r"\\\g<0>", one_line(text))


def code(text: str) -> str:
    """In Markdown, as code."""
    text, fence = one_line(text), "`"
    while fence in text:
        fence += "`"
    pad = " " * (len(fence) > 1)
    return f"{fence}{pad}{text}{pad}{fence}"
