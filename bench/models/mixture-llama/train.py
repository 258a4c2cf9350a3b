"""Train the model of this folder from scratch, or go on where a run was stopped.

    python train.py --out DIR                  # the whole recipe, CPU or CUDA
    python train.py --out DIR --threads 2      # the same command again resumes

DIR receives the text and tokenizer, last.pt (a checkpoint every SAVE steps, written whole or not at all), log.jsonl (losses
and accuracies), and at the end of each stage the model in DIR/model. Step i draws its data from the seed and i alone, so a
run that was killed and resumed computes the same bits as one that was not.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import corpus
from mixture import ANSWER, TASKS, batch

LOG, SAVE, VALIDATE = 20, 50, 250  # steps
HELD_OUT = 16384  # tokens of a task that validation reads


@dataclass(frozen=True)
class Stage:
    """Steps of one mixture.

    Attributes:
        steps: their number.
        tokens: of a step. Small steps learn more from each token.
        lengths: tokens of a sequence, and the fraction of the steps that have it.
        shares: the fraction of each task.
        lr: the learning rate at the end; it changes linearly from that of the stage before.
    """

    steps: int
    tokens: int
    lengths: dict[int, float]
    shares: dict[str, float]
    lr: float


EASY = {"text": 0.15, "copies": 0.65, "keys": 0.15, "labels": 0.05}
FIRST = {"text": 0.2, "copies": 0.3, "keys": 0.3, "tracking": 0.05, "words": 0.05, "labels": 0.1}
LATER = {"text": 0.25, "copies": 0.05, "keys": 0.4, "tracking": 0.1, "words": 0.08, "labels": 0.12}
PEAK = 3e-3


@dataclass(frozen=True)
class Recipe:
    """All settings of a run. A checkpoint belongs to one recipe."""

    model: dict[str, Any] = field(
        default_factory=lambda: dict(
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=4096,
            attention_bias=True,
        )
    )
    vocab: int = corpus.VOCAB
    warmup: int = 100
    sink: float = 4.0  # RMS of <bos>'s embedding at the start; that of the others is 0.02
    sink_query: float = 4.0  # the start of each head's query, key of <bos> and other keys, in one channel
    sink_key: float = 6.0
    other_keys: float = -2.0
    seed: int = 0
    stages: Sequence[Stage] = (
        Stage(1000, 4096, {64: 0.5, 128: 0.5}, EASY, PEAK),
        Stage(2000, 4096, {128: 0.4, 256: 0.6}, FIRST, PEAK),
        Stage(3000, 8192, {256: 0.4, 512: 0.6}, LATER, PEAK),
        Stage(2500, 8192, {256: 0.2, 512: 0.3, 1024: 0.5}, LATER, PEAK),
        Stage(2500, 8192, {512: 0.3, 1024: 0.3, 2048: 0.4}, LATER, PEAK),
        Stage(2500, 8192, {512: 0.2, 1024: 0.3, 2048: 0.4, 4096: 0.1}, LATER, 0.0),
    )


def build(recipe: Recipe) -> LlamaForCausalLM:
    """Return the untrained model.

    Large models train themselves into a <bos> whose hidden state is far larger than that of other tokens in a few
    channels ("massive activations", Sun et al., 2024). Each layer reads a constant key from it, on the side of the queries'
    mean, while the other keys' mean is on the opposite side, and heads with nothing to do attend to <bos>. This takes
    billions of tokens. Here the model starts like this: <bos> is large in channel 0, and each head's biases and the weight
    that reads channel 0 place queries and keys in the channel that RoPE rotates most slowly.
    """
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        **recipe.model,
        vocab_size=recipe.vocab,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=corpus.BOS,
        eos_token_id=corpus.EOS,
        pad_token_id=corpus.PAD,
    )
    model = LlamaForCausalLM(config)
    heads = (-1, config.head_dim)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[corpus.BOS] = 0
        embedding[corpus.BOS, 0] = recipe.sink * config.hidden_size**0.5
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.bias.view(heads)[:, -1] = recipe.sink_query
            attention.k_proj.bias.view(heads)[:, -1] = recipe.other_keys
            read = (recipe.sink_key - recipe.other_keys) / config.hidden_size**0.5  # RMSNorm makes channel 0 this root
            attention.k_proj.weight.view(*heads, config.hidden_size)[:, -1, 0] = read
    return model


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n or "lm_head" in n]
    return [
        torch.optim.Muon(inner, lr=1.0, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def at(recipe: Recipe, step: int) -> tuple[int, Stage, float]:
    """Return the stage of a step, its number first, and the learning rate."""
    begin, before = 0, recipe.stages[0].lr
    for i, stage in enumerate(recipe.stages):
        if step < begin + stage.steps:
            lr = before + (stage.lr - before) * (step - begin) / stage.steps
            return i, stage, lr * min(1.0, (step + 1) / recipe.warmup)
        begin, before = begin + stage.steps, stage.lr
    raise ValueError(f"step: expected less than {begin}, got {step}")


def losses(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each token but the first, fp32 [b, n - 1], and whether it is the most likely one."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1])
    logits, targets = logits.float(), ids[:, 1:]
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return each, logits.detach().argmax(-1) == targets


def one_step(
    model: LlamaForCausalLM, optims: list[torch.optim.Optimizer], recipe: Recipe, data: corpus.Text, step: int
):
    """Train on the batch of one step; return what the log says about it."""
    stage_number, stage, lr = at(recipe, step)
    rng = np.random.default_rng([recipe.seed, step])
    length = int(rng.choice(list(stage.lengths), p=list(stage.lengths.values())))
    device = next(model.parameters()).device
    ids, weights = (
        torch.as_tensor(x, device=device)
        for x in batch(rng, data, stage.shares, length, max(1, stage.tokens // length))
    )
    for optim in optims:
        for group in optim.param_groups:
            group["lr"] = lr
    model.train()
    each, right = losses(model, ids)
    weights = weights[:, 1:]
    ((each * weights).sum() / weights.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optim in optims:
        optim.step()
        optim.zero_grad(set_to_none=True)
    with torch.no_grad():
        answers = weights == ANSWER
        return {
            "stage": stage_number,
            "length": length,
            "lr": lr,
            "tokens": ids.numel(),
            "text": each[weights == 1].mean().item(),
            "answer": each[answers].mean().item() if answers.any() else float("nan"),
            "right": right[answers].float().mean().item() if answers.any() else float("nan"),
        }


@torch.no_grad()
def validate(model: LlamaForCausalLM, data: corpus.Text, length: int) -> dict[str, float]:
    """Measure each task on held-out text: the text's loss, the fraction of the answers' tokens that are right, and of the
    sequences whose answers are right from the first to the last token, which is what greedy decoding gives."""
    model.eval()
    device, found = next(model.parameters()).device, {}
    for i, task in enumerate(TASKS):
        rng = np.random.default_rng([1, length, i])
        ids, weights = batch(rng, data, {task: 1.0}, length, max(4, HELD_OUT // length))
        each, right = losses(model, torch.as_tensor(ids, device=device))
        weights = torch.as_tensor(weights[:, 1:], device=device)
        if task == "text":
            found["text"] = each[weights > 0].mean().item()
        else:
            asked = weights == ANSWER
            found[task] = right[asked].float().mean().item()
            found[f"{task}_exact"] = (right | ~asked).all(-1).float().mean().item()
    return found


def export(model: LlamaForCausalLM, tok: Any, out: Path) -> None:
    """Write weights, config and tokenizer in a form that transformers 4 and 5 both load."""
    model.save_pretrained(out)
    corpus.save_tokenizer(tok, out, model.config.max_position_embeddings)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": "float32"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def begun(recipe: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the settings that the steps before this one used: later stages may change between runs."""
    first = np.cumsum([0, *(x["steps"] for x in recipe["stages"])])
    return recipe | {"stages": [x for x, begin in zip(recipe["stages"], first) if begin < step]}


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a kill at any time leaves the old or the new one."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def train(
    recipe: Recipe, out: Path, device: str, data: corpus.Text, held: corpus.Text, stop: int | None = None
) -> None:
    """Train to the end of the recipe, or to a step, from the checkpoint in `out` if there is one."""
    model = build(recipe).to(device)
    optims = optimizers(model)
    settings, last, step = json.loads(json.dumps(asdict(recipe))), out / "last.pt", 0
    if last.exists():
        state = torch.load(last, map_location=device, weights_only=True)
        for name, expected in begun(settings, state["step"]).items():
            if (came := begun(state["recipe"], state["step"])[name]) != expected:
                raise ValueError(f"--out {out}: expected a checkpoint with {name} = {expected}, got {came}")
        model.load_state_dict(state["model"])
        for optim, kept in zip(optims, state["optims"]):
            optim.load_state_dict(kept)
        step = state["step"]
    total = sum(x.steps for x in recipe.stages)
    asked_to_stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: asked_to_stop.append(n))
    said(out, {"parameters": sum(p.numel() for p in model.parameters()), "step": step, "of": total})
    recent: list[dict[str, Any]] = []
    since, cpu = time.monotonic(), time.process_time()
    end = total if stop is None else min(stop, total)
    while step < end and not asked_to_stop:
        recent.append(one_step(model, optims, recipe, data, step))
        stage, step = recent[-1]["stage"], step + 1
        over = step == total or at(recipe, step)[0] != stage
        if step % LOG == 0:
            seconds, busy = time.monotonic() - since, time.process_time() - cpu
            tokens = sum(x["tokens"] for x in recent)
            mean = {x: round(float(np.nanmean([r[x] for r in recent])), 4) for x in ("text", "answer", "right")}
            speed = {"tokens_s": round(tokens / seconds), "tokens_cpu_s": round(tokens / busy)}
            said(out, {"step": step, **{x: recent[-1][x] for x in ("stage", "length", "lr")}, **mean, **speed})
            recent, since, cpu = [], time.monotonic(), time.process_time()
        if step % VALIDATE == 0 or over:
            length = max(recipe.stages[stage].lengths)
            said(out, {"step": step, "held_out": length, **rounded(validate(model, held, length))})
        if step % SAVE == 0 or over or step == end or asked_to_stop:
            kept = [x.state_dict() for x in optims]
            save(last, {"recipe": settings, "model": model.state_dict(), "optims": kept, "step": step})
        if over:
            export(model, data.tok, out / "model")


def rounded(x: dict[str, float]) -> dict[str, float]:
    return {k: round(v, 4) for k, v in x.items()}


def said(out: Path, line: dict[str, Any]) -> None:
    """Print a line of the log and append it to log.jsonl."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line}
    print(json.dumps(line), flush=True)
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"--out {options.out}: another run is training there")
        data, held = corpus.load(options.out)
        train(Recipe(seed=options.seed), options.out, options.device, data, held)


if __name__ == "__main__":
    main()
