"""Escape text from result files, which may come from an untrusted source, for Markdown pages."""

from __future__ import annotations

import re


def one_line(text: str) -> str:
    """Return the text on one line, with unprintable characters replaced."""
    return "".join(x if x.isprintable() else "?" for x in " ".join(text.split()))


def escape(text: str) -> str:
    """Escape text for Markdown, so that it cannot make a link, a tag or a table row."""
    special = r"[\\`*\[\]<|&~$@]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(rf"{special}|:(?=//)|(?<=www)\.", r"\\\g<0>", one_line(text))


def code(text: str) -> str:
    """Format text as Markdown code."""
    text, fence = one_line(text), "`"
    while fence in text:
        fence += "`"
    pad = " " * (len(fence) > 1)
    return f"{fence}{pad}{text}{pad}{fence}"
