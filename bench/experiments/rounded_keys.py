"""Round keys before or after their rotation?

    python bench/experiments/rounded_keys.py [--model smollm2] [--texts 8] [--context 1024] [--json FILE]

A model with RoPE reads texts whose keys, or values, are rounded at every token: to int8 with a scale per token and head
(`kvops.quantize_rows`), or to torch.float8_e4m3fn. "error": the mean of |rounded - exact|^2 over the mean of |exact|^2,
of the rows of all layers. "KL": how far the predictions of the next token move from those of exact rows, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import common
import kvops
from kvops.bench.columns import aligned
from kvops.bench.record import write
from kvops.demo import TEXT

Rule = Callable[[Tensor], Tensor]
FORMATS: dict[str, Rule] = {
    "int8": lambda x: kvops.dequantize_rows(*kvops.quantize_rows(x), x.dtype),
    "fp8": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
}
WHAT = "keys before rotation", "keys after rotation", "values"


class Errors:
    """Rounds rows [.., d] and adds up their errors."""

    def __init__(self, rule: Rule):
        self.rule, self.error, self.size = rule, 0.0, 0.0

    def __call__(self, x: Tensor) -> Tensor:
        y = self.rule(x)
        self.error += (y - x).double().square().sum().item()
        self.size += x.double().square().sum().item()
        return y


class Rounded(DynamicCache):
    """A cache of rows that are rounded as they come."""

    def __init__(self, keys: Rule, values: Rule):
        super().__init__()
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return super().update(self.keys(key_states), self.values(value_states), *args, **options)


def predictions(model: PreTrainedModel, ids: Tensor, what: str | None, rule: Rule) -> Tensor:
    """The log-probabilities of the next tokens, [n, vocabulary], with what is rounded by the rule."""
    d = model.config.head_dim

    def projected(module: torch.nn.Module, args: object, out: Tensor) -> Tensor:
        return rule(out.unflatten(-1, (-1, d))).flatten(-2)

    exact: Rule = lambda x: x  # noqa: E731
    cache = Rounded(rule if what == WHAT[1] else exact, rule if what == WHAT[2] else exact)
    with ExitStack() as hooks:
        if what == WHAT[0]:
            for layer in model.model.layers:
                hooks.callback(layer.self_attn.k_proj.register_forward_hook(projected).remove)
        return model(ids, past_key_values=cache).logits[0].log_softmax(-1)


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    common.add_model(parser, TEXT)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each text")
    a = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).eval().to(a.device)
    ids = common.load_text(a.model, a.text, a.device)[0].split(a.context)[: a.texts]
    found: dict[str, dict[str, list[float]]] = {f"{x}, {y}": {"error": [], "kl": []} for y in FORMATS for x in WHAT}
    with torch.inference_mode():
        for text in tqdm(ids, leave=False):
            exact = predictions(model, text[None], None, lambda x: x)
            for name, of in found.items():
                what, _, form = name.rpartition(", ")
                rule = Errors(FORMATS[form])
                other = predictions(model, text[None], what, rule)
                of["kl"].append((exact.exp() * (exact - other)).sum(-1).mean().item())
                of["error"].append(rule.error / rule.size)
    lines = [("", "error, %", "KL, 1e-3 nats")]
    lines += [(x, f"{100 * fmean(of['error']):.4f}", f"{1e3 * fmean(of['kl']):.3f}") for x, of in found.items()]
    print(aligned(lines, left=(0,)))
    if a.json:
        settings = {"texts": len(ids), "context": a.context}
        write(a.json, {**common.origin(__file__, argv, a.device), **settings, "rounded": found})


if __name__ == "__main__":
    main()
