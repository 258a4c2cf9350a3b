"""Passkey accuracy by context length x depth, optionally with KV-cache eviction.

The context is prefilled alone. Then EVICT (if given) cuts the cache. Then the
question is fed (with its true, uncompressed positions) and the digits are decoded
greedily.  Accuracy = fraction of the k digits that are right, position by position.

  python eval.py --model . --lengths 512,1024,2048 --digits 32
  python eval.py --model . --lengths 1024 --methods full,streaming@0.5,keydiff@0.5
"""

import argparse
import json
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from passkey_task import QUESTION, Corpus, encode, eval_batch


# ---- eviction: f(layer, keys[B,H,T,D], values, n_keep, gen) -> kept indices [B,H,n_keep] ----
def streaming(layer, keys, values, n_keep, gen, sink=4):
    B, H, T, _ = keys.shape
    idx = torch.cat([torch.arange(sink), torch.arange(T - (n_keep - sink), T)])
    return idx.expand(B, H, n_keep)


def random_(layer, keys, values, n_keep, gen):
    B, H, T, _ = keys.shape
    return torch.rand(B, H, T, generator=gen).topk(n_keep, -1).indices


def keydiff(layer, keys, values, n_keep, gen, normed=False):
    k = keys.float()
    anchor = (torch.nn.functional.normalize(k, dim=-1) if normed else k).mean(2, keepdim=True)
    return (-torch.cosine_similarity(k, anchor, dim=-1)).topk(n_keep, -1).indices


def keydiff_normed(*a):
    return keydiff(*a, normed=True)


def knorm(layer, keys, values, n_keep, gen):
    return (-keys.float().norm(dim=-1)).topk(n_keep, -1).indices


def recent(*a):
    return streaming(*a, sink=0)


def lagkv(layer, keys, values, n_keep, gen, sink=4, lag=64):
    """A rough LagKV after the idea of the paper, only to check that this model separates
    it from the other methods: partition p is scored by the spread over channels of its keys and
    values after min-max scaling with partition p+1; ranks inside each partition; the sink,
    the last full partition and the remainder are kept (lagkv64 = partitions of 64 tokens)."""
    B, H, T, D = keys.shape
    n = (T - sink) // lag
    score = torch.full((B, H, T), 2.0)
    if n >= 2:

        def part(x):
            x = x[:, :, sink : sink + n * lag].float().reshape(B, H, n, lag, D)
            lo, hi = x[:, :, 1:].amin(-2, True), x[:, :, 1:].amax(-2, True)
            return ((x[:, :, :-1] - lo) / (hi - lo + 1e-6)).std(-1).softmax(-1)

        rank = (part(keys) + part(values)).argsort(-1).argsort(-1) / lag
        score[:, :, sink : sink + (n - 1) * lag] = rank.reshape(B, H, -1)
    return score.topk(n_keep, -1).indices


METHODS = {
    "recent": recent,
    **{f"lagkv{n}": (lambda *a, n=n: lagkv(*a, lag=n)) for n in (64, 128, 256)},
    "streaming": streaming,
    "random": random_,
    "keydiff": keydiff,
    "keydiff-normed": keydiff_normed,
    "knorm": knorm,
}


def evict_cache(cache, method, ratio, gen):
    for i, layer in enumerate(cache.layers):
        K, V = layer.keys, layer.values
        n_keep = max(8, round(K.shape[2] * ratio))
        idx = method(i, K, V, n_keep, gen).to(K.device).sort(-1).values
        idx = idx.unsqueeze(-1).expand(-1, -1, -1, K.shape[-1])
        layer.keys, layer.values = K.gather(2, idx).contiguous(), V.gather(2, idx).contiguous()


@torch.no_grad()
def greedy(model, ctx, n_new, hook=None):
    """ctx [B,T] -> digits decoded after the question; hook(cache) runs after the prefill."""
    dev = next(model.parameters()).device
    x = torch.as_tensor(ctx, device=dev)
    B, T = x.shape
    cache = DynamicCache(config=model.config)
    # the logits of the context are not needed: run the backbone only
    model.model(input_ids=x, past_key_values=cache, use_cache=True)
    if hook is not None:
        hook(cache)
    q = torch.as_tensor(encode(QUESTION), device=dev).expand(B, -1)
    pos, out = T, []
    for _ in range(n_new):
        p = torch.arange(pos, pos + q.shape[1], device=dev).expand(B, -1)
        o = model(input_ids=q, past_key_values=cache, position_ids=p, use_cache=True, logits_to_keep=1)
        pos += q.shape[1]
        q = o.logits[:, -1].argmax(-1, keepdim=True)
        out.append(q)
    return torch.cat(out, 1).cpu().numpy()


def accuracy(model, corpus, n_ctx, k, depths, n_per_depth, method=None, ratio=1.0, seed=0, bs=16):
    """-> array [len(depths), n_per_depth] of digit accuracies."""
    rng = np.random.default_rng([seed, n_ctx, k])
    gen = torch.Generator().manual_seed(seed)
    hook = None if method is None else (lambda c: evict_cache(c, METHODS[method], ratio, gen))
    flat = [d for d in depths for _ in range(n_per_depth)]
    ctx, keys = eval_batch(rng, corpus, n_ctx, k, flat)
    acc = []
    for i in range(0, len(flat), bs):
        got = greedy(model, ctx[i : i + bs], k, hook)
        acc += [np.mean([a == b for a, b in zip(encode(d), g)]) for d, g in zip(keys[i : i + bs], got)]
    return np.array(acc).reshape(len(depths), n_per_depth)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default=".")
    ap.add_argument("--lengths", default="512,1024,2048")
    ap.add_argument("--digits", type=int, default=32)
    ap.add_argument("--n-per-depth", type=int, default=4)
    ap.add_argument("--n-depths", type=int, default=11)
    ap.add_argument("--methods", default="full")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--json", default="")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype)).to(a.device).eval()
    corpus = Corpus("heldout")
    depths = [i / (a.n_depths - 1) for i in range(a.n_depths)]
    print("  ctx  method           keep  mean | by depth " + " ".join(f"{int(d * 100):4d}%" for d in depths))
    rows = []
    for n in map(int, a.lengths.split(",")):
        for m in a.methods.split(","):
            name, _, r = m.partition("@")
            r = float(r or 1)
            t = time.time()
            acc = accuracy(
                model, corpus, n, a.digits, depths, a.n_per_depth, None if name == "full" else name, r, a.seed
            )
            print(
                f"{n:5d}  {name:14s} {r:6.4g} {100 * acc.mean():5.1f} |          "
                + " ".join(f"{100 * v:5.1f}" for v in acc.mean(1))
                + f"   ({time.time() - t:.0f}s)",
                flush=True,
            )
            rows.append(
                {
                    "ctx": n,
                    "method": name,
                    "keep": r,
                    "digits": a.digits,
                    "mean": float(acc.mean()),
                    "exact": float((acc == 1).mean()),
                    "by_depth": acc.mean(1).tolist(),
                }
            )
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
