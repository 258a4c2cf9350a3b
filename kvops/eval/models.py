"""The model, the tokenizer and the text that the command line names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from ..bench.gpu import first_line
from .specs import Refused
from .tasks import Filler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")

SMOLLM2 = "smollm2"  # as --model


def load(
    name: str,
    text: Path,
    dtype: str,
    device: str,
    prepare: Callable[[PreTrainedModel, PreTrainedTokenizerBase], T],
) -> tuple[T, Filler]:
    """Load a model, and its tokenizer with a text.

    Args:
        name: folder or hub name of a causal language model of transformers.
        text: the text's file.
        dtype: of the model, "auto" for the dtype of its files.
        device: "cpu", "cuda" or "cuda:NUMBER".
        prepare: makes what is returned from the model and its tokenizer.

    Raises:
        Refused: the model or the text cannot be read or used, or memory is short.
    """
    import transformers

    check_name(name)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # the text is longer than the model's context, on purpose
    try:
        written = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"--text: expected UTF-8, got {text}: {error}") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        moved = model.to(torch.device(device))  # type: ignore[arg-type]  # its decorator hides the types
        prepared = prepare(moved, tokenizer)
    except torch.OutOfMemoryError as error:
        raise Refused(f"--model {name}: out of memory: {first_line(error)}") from error
    except Exception as error:  # no such folder or name, not a language model, or damaged files
        raise Refused(f"--model {name}: {first_line(error)}") from error
    return prepared, Filler(tokenizer, written)


def found(name: str) -> str:
    """Return the folder or hub name of a model; "smollm2" is the real one that `smollm2.smollm2` downloads, if there is
    no such folder.

    Raises:
        Refused: it cannot be downloaded.
    """
    if name.lower() != SMOLLM2 or Path(name).is_dir():
        return name
    from .smollm2 import smollm2

    try:
        return str(smollm2())
    except (ImportError, RuntimeError, ValueError) as error:
        raise Refused(f"--model {name}: {error}") from error


def check_name(name: str) -> None:
    """Refuse a folder that does not exist: transformers would take it for a hub's name."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    if is_path and not Path(name).is_dir():
        raise Refused(f"--model {name}: expected a folder that holds a model, or a name on a hub, got no such folder")


def has_template(name: str) -> bool:
    """Whether a model's tokenizer has a chat template.

    Raises:
        Refused: the tokenizer cannot be read.
    """
    import transformers

    check_name(name)
    try:
        return bool(transformers.AutoTokenizer.from_pretrained(name).chat_template)
    except Exception as error:  # no such name, or damaged files
        raise Refused(f"--model {name}: {first_line(error)}") from error
