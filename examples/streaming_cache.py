"""Run one attention layer over a long stream with bounded memory.

`kvops.Cache` holds the K and V of one layer. `attend` appends new tokens, computes their attention, then evicts.
"""

import torch

import kvops

HEADS, KV_HEADS, HEAD_DIM, BUDGET = 16, 4, 64, 256


def main() -> int:
    torch.manual_seed(0)
    cache = kvops.Cache(kvops.H2O(BUDGET, buffer=16))  # keeps the tokens with the most attention so far
    chunks = [512, 512, *[1] * 100]  # two prefill chunks, then decode steps
    for t in chunks:
        q = torch.randn(1, HEADS, t, HEAD_DIM)
        k, v = torch.randn(2, 1, KV_HEADS, t, HEAD_DIM)
        out = cache.attend(q, k, v)
        assert out.shape == q.shape
        assert len(cache) < BUDGET + 16 or t > 1

    print(f"{cache.seen} tokens seen, {len(cache)} held per head, {cache.nbytes / 2**20:.2f} MiB")
    print("positions of the first kept tokens of head 0:", cache.positions[0, 0, :8].tolist())
    return len(cache)


if __name__ == "__main__":
    main()
