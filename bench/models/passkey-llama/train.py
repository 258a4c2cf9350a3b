"""Train the tiny passkey model (byte-level Llama) from scratch.

  python train.py --out out                  # the whole recipe, CPU or CUDA
  python train.py --out out --start-stage 2 --resume   # repeat a stage from out/last.pt

Each stage is (name, steps, {length: fraction of steps}, p_copy, p_multi, peak lr at its
start, lr at its end, validation sets).  Tokens per step are constant (TOK).
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from eval import accuracy
from make_tokenizer import build as build_tokenizer
from passkey_task import BOS, EOS, PAD, VOCAB, Corpus, batch

TOK = 8192
#          name   steps  lengths                                 p_copy p_multi  lr0     lr1    validation (context, digits)
STAGES = [
    ("A0", 300, {128: 1.0}, 0.7, 0.3, 4e-3, 4e-3, [(96, 16), (128, 16)]),
    ("A1", 300, {256: 1.0}, 0.3, 0.7, 4e-3, 4e-3, [(160, 32), (192, 32)]),
    ("B", 400, {256: 0.2, 512: 0.8}, 0.1, 0.7, 4e-3, 4e-3, [(416, 32), (320, 32)]),
    ("C", 500, {512: 0.3, 1024: 0.7}, 0.05, 0.6, 4e-3, 3.167e-3, [(928, 32), (576, 32)]),
    ("D", 750, {512: 0.1, 1024: 0.35, 2048: 0.45, 4096: 0.1}, 0.0, 0.6, 3.2e-3, 1e-4, [(1024, 32), (2048, 32)]),
]


def make_config():
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.03,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def save_hf(model, out):
    """Weights, config and tokenizer in a form that transformers 4 and 5 both load."""
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    for f, extra in (
        ("config.json", {"rope_theta": 1e6, "torch_dtype": "float32"}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        f = os.path.join(out, f)
        with open(f) as file:
            c = json.load(file)
        c.pop("backend", None)
        with open(f, "w") as file:
            json.dump({**c, **extra}, file, indent=2, sort_keys=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--start-stage", type=int, default=0)
    ap.add_argument("--stop-stage", type=int, default=len(STAGES))
    ap.add_argument("--eval-every", type=int, default=100)
    ap.add_argument("--max-minutes", type=float, default=1e9)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    model = LlamaForCausalLM(make_config()).to(a.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    train, held = Corpus("train"), Corpus("heldout")
    print(f"corpus: {len(train.data) / 1e6:.1f} MB train, {len(held.data) / 1e6:.2f} MB held out", flush=True)
    # Muon for the hidden matrices, AdamW for the embedding and the norm gains
    mats = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    opts = [
        torch.optim.Muon(mats, lr=1.0, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    step, best, best_stage = 0, -1.0, ""
    if a.resume:
        ck = torch.load(os.path.join(a.out, "last.pt"), map_location=a.device, weights_only=True)
        model.load_state_dict(ck["model"])
        for o, s in zip(opts, ck["opts"]):
            o.load_state_dict(s)
        step, best, best_stage = ck["step"], ck["best"], ck.get("best_stage", "")
    t0, seen = time.time(), 0
    for si in range(a.start_stage, a.stop_stage):
        name, steps, lens, p_copy, p_multi, lr0, lr1, val_sets = STAGES[si]
        rng = np.random.default_rng([a.seed, si])
        run = {}
        if name != best_stage:  # the metric changes with the stage
            best, best_stage = -1.0, name
        tl = time.time()
        for i in range(steps):
            T = int(rng.choice(list(lens), p=list(lens.values())))
            x, w = batch(rng, train, T, TOK // T, p_copy, p_multi)
            x, w = torch.as_tensor(x, device=a.device), torch.as_tensor(w, device=a.device)
            lr = (lr0 + (lr1 - lr0) * i / steps) * min(1.0, (step + 1) / 60)
            for o in opts:
                for g in o.param_groups:
                    g["lr"] = lr
            with torch.autocast(a.device, torch.bfloat16):
                h = model.model(input_ids=x, use_cache=False).last_hidden_state
                logits = model.lm_head(h[:, :-1])
            ce = F.cross_entropy(logits.float().reshape(-1, VOCAB), x[:, 1:].reshape(-1), reduction="none")
            wt = w[:, 1:].reshape(-1)
            loss = (ce * wt).sum() / wt.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for o in opts:
                o.step()
                o.zero_grad(set_to_none=True)
            step += 1
            seen += x.numel()
            with torch.no_grad():
                m, mt = wt >= 1.0, (wt > 0) & (wt < 1)
                run.setdefault("ans", []).append(ce[m].mean().item())
                run.setdefault("text", []).append(ce[mt].mean().item())
            if step % 20 == 0:
                print(
                    f"{name} step {step} T={T} lr {lr:.1e} answer {np.mean(run['ans']):.3f} "
                    f"text {np.mean(run['text']):.3f}  {20 * TOK / (time.time() - tl):.0f} tok/s  "
                    f"{(time.time() - t0) / 60:.1f} min",
                    flush=True,
                )
                run, tl = {}, time.time()
            over = (time.time() - t0) / 60 > a.max_minutes
            if step % a.eval_every == 0 or i == steps - 1 or over:
                model.eval()
                accs = [accuracy(model, held, n, k, [0.05, 0.35, 0.65, 0.95], 8, seed=1).mean() for n, k in val_sets]
                model.train()
                val = float(np.mean(accs))
                print(
                    f"   val {name} step {step}: greedy digit accuracy " + " ".join(f"{v:.3f}" for v in accs),
                    flush=True,
                )
                if val >= best:
                    best = val
                    save_hf(model, a.out)
                torch.save(
                    {
                        "model": model.state_dict(),
                        "opts": [o.state_dict() for o in opts],
                        "step": step,
                        "best": best,
                        "best_stage": best_stage,
                    },
                    os.path.join(a.out, "last.pt"),
                )
                tl = time.time()
            if over:
                return


if __name__ == "__main__":
    main()
