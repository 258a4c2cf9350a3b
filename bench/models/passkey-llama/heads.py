"""Measure what the attention heads do: sink mass, previous-token heads, retrieval (induction) heads.

python heads.py --model . --ctx 512
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from passkey_task import QUESTION, Corpus, encode, eval_batch

ap = argparse.ArgumentParser()
ap.add_argument("--model", default=".")
ap.add_argument("--ctx", type=int, default=512)
ap.add_argument("--n", type=int, default=8)
a = ap.parse_args()
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(a.model, attn_implementation="eager", dtype=torch.float32).eval()
rng = np.random.default_rng(5)
k = 32
ctx, keys = eval_batch(rng, Corpus("heldout"), a.ctx, k, np.linspace(0.1, 0.9, a.n))
x = np.stack([np.concatenate([c, encode(QUESTION + d)]) for c, d in zip(ctx, keys)])
start = [bytes(np.minimum(c, 255).astype(np.uint8)).index(d.encode()) for c, d in zip(ctx, keys)]
with torch.no_grad():
    att = model(torch.as_tensor(x), output_attentions=True).attentions  # per layer [B,H,T,T]
T = x.shape[1]
q0 = T - k - 1  # this query predicts digit 0
print(
    "layer head | mass on <bos> (text queries)  best offset (mass) | answer queries: mass on the right digit, on <bos>"
)
for L, A in enumerate(att):
    for h in range(A.shape[1]):
        P = A[:, h]
        sink = P[:, 64 : a.ctx, 0].mean().item()
        offs = [torch.stack([p.diagonal(-o)[64:].mean() for p in P]).mean().item() for o in range(9)]
        o = int(np.argmax(offs))
        hit = np.mean([P[b, q0 + j, start[b] + j].item() for b in range(a.n) for j in range(1, k)])
        asink = P[:, q0 + 1 : q0 + k, 0].mean().item()
        print(
            f"{L:5d} {h:4d} | {sink:8.3f}                      {-o:4d} ({offs[o]:.2f})            | {hit:.3f}  {asink:.3f}"
        )
