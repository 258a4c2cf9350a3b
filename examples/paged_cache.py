"""Evict in the pages of a server: requests join, decode and leave, and free pages go back to the pool.

`kvops.PagedCache` is a reference for engines that have a pool and block tables of their own. docs/engines.md shows how
to call the operators on the memory of such an engine.
"""

import torch

import kvops

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 2, 8, 2, 64, 16


def model(step) -> None:
    """Stand in for a model: random queries, keys and values for each layer."""
    b, t = step.positions.shape
    for layer in range(LAYERS):
        q, k, v = (torch.randn(b, heads, t, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        step.attend(layer, q, k, v)


def main() -> tuple[int, int]:
    policy = kvops.KeyDiff(64, buffer=PAGE)  # evict whenever a page beyond the budget is full
    cache = kvops.PagedCache(policy, 64, num_layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE)
    long, short = cache.join(prompt=400), cache.join(prompt=30)

    with cache.step([long, short], [400, 30]) as step:
        model(step)
    print(f"after the prompts: {cache.held(long)} and {cache.held(short)} slots held, {cache.free} pages free")
    for _ in range(40):
        with cache.step([long, short]) as step:
            model(step)
    # A scheduler knows how many slots a request holds from its length alone.
    assert cache.held(long) == policy.held(440, prompt=400)
    print(f"after 40 tokens: {cache.held(long)} and {cache.held(short)} slots held, {cache.free} pages free")
    cache.leave(long)
    cache.leave(short)
    return cache.free, 64


if __name__ == "__main__":
    main()
