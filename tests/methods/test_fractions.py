"""Fractions of tokens: floor(fraction * n), with the fraction as it is written in decimal."""

from fractions import Fraction

import pytest
import torch

import kvops
from kvops.methods.budgets import fraction_of


def exact(fraction, n):
    return int(Fraction(str(fraction)) * n)


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_decimals_are_exact(digits):
    sizes = torch.cat(
        (torch.arange(1, 200), 2 ** torch.arange(8, 31), 2 ** torch.arange(8, 31) - 1, 10 ** torch.arange(2, 9))
    )
    steps = range(1, 10**digits, 1 if digits < 3 else 7)
    for i in steps:
        fraction = i / 10**digits
        expected = [exact(fraction, n) for n in sizes.tolist()]
        assert [fraction_of(fraction, n) for n in sizes.tolist()] == expected
        assert fraction_of(fraction, sizes.int()).tolist() == expected


def test_other_fractions_are_what_they_round_to():
    assert [fraction_of(1 / 3, n) for n in (3, 300, 301, 302, 303)] == [1, 100, 100, 100, 101]
    assert fraction_of(1.0, 2**31 - 1) == 2**31 - 1 and fraction_of(0.0, 100) == 0
    below = 0.29 * (1 - 1e-12)  # written otherwise than 0.29
    assert fraction_of(below, 100) == 28


K, V = torch.randn(2, 1, 1, 100, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("percent", range(1, 100))
def test_a_budget_keeps_its_fraction(percent):
    ratio = percent / 100
    assert kvops.keydiff_compress(K, V, ratio).k.shape[2] == percent
    starts = torch.tensor([0, 0], dtype=torch.int32)
    rows = kvops.keydiff_compress(K.expand(2, -1, -1, -1), V.expand(2, -1, -1, -1), ratio, starts=starts)
    assert rows.lengths.tolist() == [percent, percent]


def test_lagkv_keeps_its_ratio_of_a_partition():
    k, v = torch.randn(2, 1, 1, 3200, 16)
    for ratio in (0.29, 0.57, 0.58):
        assert kvops.lagkv_compress(k, v, 1600, ratio, sinks=0).k.shape[2] - 1600 == exact(ratio, 1600)
        assert kvops.LagKV(lag=1600, ratio=ratio, sinks=0).held(3200, 3200) - 1600 == exact(ratio, 1600)


def test_other_settings_are_such_fractions():
    policy = kvops.KeyDiff(100, recent=0.29, buffer=0.57)
    assert policy.buffer_tokens(100) == 57
    newest = policy.compress(K, V).indices[0, 0]
    assert set(range(71, 100)) <= set(newest.tolist())
