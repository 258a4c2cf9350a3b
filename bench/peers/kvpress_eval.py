"""Run kvpress' implementations of the shared methods on the prompts of `python -m kvops.eval`.

    python -m venv build/kvpress
    build/kvpress/bin/pip install -r bench/peers/requirements.txt
    build/kvpress/bin/python bench/peers/kvpress_eval.py --out eval
    python -m kvops.eval --from eval/results.jsonl --out eval

kvpress needs an older transformers than kvops.hf and therefore an environment of its own. kvops is imported from this
repository, with the library that `make build` put there. Options, prompts, seeds, cut points, budgets and scores are
those of kvops.eval. Results go to the same file, under names such as "kvpress KeyDiff".

A press cuts the cache once, during prefill; then the cache grows. Budgets, windows, sinks and lags are those of
kvops.eval; everything else (pooling, chunks, the shape of a pyramid, ...) is kvpress' default. Bytes are those of the
tensors in its cache. A press that fails is reported, and the others continue.
"""

# ruff: noqa: E402  (kvops from this repository, kvpress from its environment)

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
try:
    import kvpress
    from transformers import DynamicCache, PreTrainedModel
except ImportError as error:
    sys.exit(f"kvpress_eval.py: {error}; it runs in an environment of its own:\n{__doc__.split(chr(10) * 2)[1]}")

from kvops.eval.__main__ import arguments, make_parser, measure
from kvops.eval.methods import METHODS, Unreachable
from kvops.eval.reader import Prefill, Reader
from kvops.eval.specs import Refused
from kvops.eval.tasks import TASKS, AnswerTask


@dataclass(frozen=True)
class Press:
    """A row of the tables. make(ratio, settings) returns kvpress' object for the fraction of tokens to evict and the
    settings of kvops.eval for this budget; None evicts nothing."""

    name: str
    make: Callable | None
    settings: str = "keydiff"  # the method of kvops.eval whose settings apply
    eager: bool = False  # needs the whole attention matrix
    single: bool = False  # cuts all rows of a batch like the first, so prompts run one at a time
    rotates: bool = False  # keys are rotated to their slots, so positions continue from there

    @property
    def label(self) -> str:
        return f"kvpress {self.name}"

    @property
    def budgeted(self) -> bool:
        return self.make is not None


def _snapkv(ratio: float, x: dict) -> kvpress.SnapKVPress:
    return kvpress.SnapKVPress(ratio, window_size=x["window"])


PRESSES = {
    "full": Press("Full", None),
    "streamingllm": Press("StreamingLLM", lambda ratio, x: kvpress.StreamingLLMPress(ratio)),
    "streamingllm-rerotated": Press(
        "StreamingLLM rerotated",
        lambda ratio, x: kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(ratio)),
        rotates=True,
    ),
    "random": Press("Random", lambda ratio, x: kvpress.RandomPress(ratio)),
    "lagkv": Press(
        "LagKV", lambda ratio, x: kvpress.LagKVPress(ratio, n_sink=x["sinks"], lag_size=x["lag"]), settings="lagkv"
    ),
    "keydiff": Press("KeyDiff", lambda ratio, x: kvpress.KeyDiffPress(ratio)),
    "snapkv": Press("SnapKV", _snapkv, settings="snapkv"),
    "pyramidkv": Press(
        "PyramidKV", lambda ratio, x: kvpress.PyramidKVPress(ratio, window_size=x["window"]), settings="pyramidkv"
    ),
    "chunkkv": Press(
        "ChunkKV", lambda ratio, x: kvpress.ChunkKVPress(_snapkv(ratio, x)), settings="chunkkv", single=True
    ),
    "observed-attention": Press(
        "ObservedAttention", lambda ratio, x: kvpress.ObservedAttentionPress(ratio), eager=True
    ),  # H2O's scores, in prefill only
    "tova": Press("TOVA", lambda ratio, x: kvpress.TOVAPress(ratio)),
    "knorm": Press("Knorm", lambda ratio, x: kvpress.KnormPress(ratio)),  # L2
}


@dataclass
class Part:
    """Rows of a batch that share a cache."""

    cache: DynamicCache
    position: int  # of the next token

    @property
    def lengths(self) -> list[int]:
        """Return the slots that each layer holds."""
        return [x.keys.shape[2] for x in self.cache.layers]

    @property
    def nbytes(self) -> int:
        tensors = [x for layer in self.cache.layers for x in (layer.keys, layer.values)]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


class KVPressReader(Reader):
    """A reader that prefills with kvpress' hooks and decodes like `Reader`."""

    def prepared(self, model: PreTrainedModel) -> PreTrainedModel:
        return model

    @torch.inference_mode()
    def prefill(self, prompts: np.ndarray, rule: Press, budget: int | None) -> Prefill:
        n = prompts.shape[1]
        press = None
        if rule.budgeted and budget < n:
            try:
                settings = METHODS[rule.settings].policy.at_budget(budget, n, self.num_layers, False, {})
                # kvpress keeps int(n (1 - ratio)), for a pyramid the nearest integer
                press = rule.make(1 - (budget + 0.25) / n, settings)
            except (ValueError, AssertionError) as error:
                raise Unreachable(failed(rule, error)) from error
        ids = self.tokens(prompts)
        torch.manual_seed(0)  # RandomPress
        if rule.eager:
            self.model.set_attn_implementation("eager")
        begin = self.clock()
        try:
            read = [self.read(x, press) for x in (ids.split(1) if rule.single else [ids])]
        except torch.OutOfMemoryError:  # `measure` retries it in the next run
            raise
        except Exception as error:  # a press may not support this model
            raise Unreachable(failed(rule, error)) from error
        finally:
            seconds = self.clock() - begin
            if rule.eager:
                self.model.set_attn_implementation("sdpa")
        parts = [Part(cache, cache.get_seq_length() if rule.rotates and press else n) for cache, _ in read]
        kept = round(np.mean([x.lengths for x in parts]))
        held = sum(x.nbytes for x in parts)
        full = sum(x.keys[:, :, :1].nbytes + x.values[:, :, :1].nbytes for p in parts for x in p.cache.layers) * n
        return Prefill(parts, torch.cat([x for _, x in read]), seconds, kept, held, full)

    def read(self, ids: Tensor, press: kvpress.BasePress | None) -> tuple[DynamicCache, Tensor]:
        """Read a prompt; return its cut cache and the logits of its last token."""
        cache = DynamicCache()
        if press is None:
            return cache, self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        with press(self.model):
            return cache, self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    def feed(self, cache: list[Part], ids: Tensor) -> Tensor:
        return torch.cat([self.feed_part(part, x) for part, x in zip(cache, ids.split(len(ids) // len(cache)))])

    def feed_part(self, part: Part, ids: Tensor) -> Tensor:
        # One mask serves all layers. Where they differ in length it fits only a single token, which needs none.
        for step in ids.split(ids.shape[1] if len(set(part.lengths)) == 1 else 1, dim=1):
            count = step.shape[1]
            positions = torch.arange(part.position, part.position + count, device=ids.device)[None]
            out = self.model(step, past_key_values=part.cache, position_ids=positions, logits_to_keep=1)
            part.position += count
        return out.logits[:, -1]


def failed(rule: Press, error: Exception) -> str:
    why = f"{rule.label}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    print(why, file=sys.stderr)
    return why


def press(name: str) -> Press:
    """Look a press up by its name on the command line."""
    if name not in PRESSES:
        raise ValueError(f"method must be one of {', '.join(PRESSES)}, got {name!r}")
    return PRESSES[name]


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    parser.prog, parser.description, parser.epilog = "kvpress_eval.py", __doc__.split("\n", 1)[0], None
    parser.set_defaults(methods=list(PRESSES))
    a = arguments(argv, parser, press)
    if a.list:
        print("\n".join(PRESSES))
        return
    if a.files:
        parser.error("--from: python -m kvops.eval makes the report")
    if a.share_prefill:
        parser.error("--share-prefill: presses act while a prompt is read, so each reads it for itself")
    if other := [x for x, task in a.kinds.items() if not isinstance(task, AnswerTask)]:
        answered = [name for name, task in TASKS.items() if isinstance(task, type) and issubclass(task, AnswerTask)]
        parser.error(f"--tasks: presses cut once, so expected some of {', '.join(answered)}, got {other[0]}")
    said = shlex.join(["python", "bench/peers/kvpress_eval.py", *(sys.argv[1:] if argv is None else argv)])
    versions = {x: importlib.metadata.version(x) for x in ("kvpress", "transformers")}
    try:
        files = measure(a, said, KVPressReader, **versions)
    except Refused as error:
        sys.exit(f"kvpress_eval.py: {error}")
    for file in files:
        print(f"wrote {file}; the report: python -m kvops.eval --from {file} --out {a.out}")


if __name__ == "__main__":
    main()
