"""Output tensors: their memory must not overlap the inputs, and they must not be negated views."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kit
import kvops
from kit import same
from kvops import ops

pytestmark = kit.every_device

D = 4  # a row of 16 bytes
PIECES = 120  # rows in the buffer that holds all tensors


def places(x: Tensor) -> list[int]:
    """Return the address of each 4 bytes of x, repeated as often as x contains them."""
    at = torch.tensor([x.data_ptr() // 4])
    for size, stride in zip(x.shape, x.stride()):
        at = (at.unsqueeze(-1) + torch.arange(size) * (stride * x.element_size() // 4)).flatten()
    return (at.unsqueeze(-1) + torch.arange(x.element_size() // 4)).flatten().tolist()


@st.composite
def strided(draw, shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Draw offset and strides, in pieces, of a view with these outer dims that fits a buffer of `most` pieces."""
    strides, room = [0] * len(shape), most - 1
    for i in draw(st.permutations(range(len(shape)))):
        strides[i] = draw(st.integers(0, room // max(1, shape[i] - 1)))
        room -= strides[i] * (shape[i] - 1)
    return draw(st.integers(0, room)), *strides


@st.composite
def slices(draw, shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Draw the same for slices with steps, in any order of dims: most of them do not overlap themselves."""
    strides, step = [0] * len(shape), draw(st.integers(1, 3))
    for i in draw(st.permutations(range(len(shape)))):
        strides[i] = step
        step = step * shape[i] + draw(st.integers(0, 2))
    room = most - 1 - sum(s * (n - 1) for s, n in zip(strides, shape))
    return (draw(st.integers(0, room)), *strides) if room >= 0 else draw(strided(shape, most))


def is_unique(x: list[int]) -> bool:
    return len(set(x)) == len(x)


@kit.examples(150)
@given(data=st.data())
def test_exactly_what_overlaps_is_refused(data):
    b, heads, n, m = (data.draw(st.integers(1, most), label=name) for name, most in zip("bhnm", (2, 3, 5, 4)))
    memory = torch.zeros(PIECES * D)

    def view(rows: int, name: str) -> Tensor:
        layout = data.draw(st.one_of(strided((b, heads, rows), PIECES), slices((b, heads, rows), PIECES)), label=name)
        first, *strides = (x * D for x in layout)
        return memory.as_strided((b, heads, rows, D), (*strides, 1), first)

    k, v, k_out, v_out = view(n, "k"), view(n, "v"), view(m, "k_out"), view(m, "v_out")
    first, *strides = data.draw(strided((b, heads, m), PIECES * 2), label="indices")
    indices = memory.view(torch.int64).as_strided((b, heads, m), strides, first)  # all 0
    read, written = (set(sum(map(places, x), [])) for x in ((k, v, indices), (k_out, v_out)))
    if is_unique(places(k_out) + places(v_out)) and not read & written:
        ops.gather_kv(k, v, indices, out=(k_out, v_out))
    else:
        with kit.refuses("gather_kv: (k|v)_out is written to and must"):
            ops.gather_kv(k, v, indices, out=(k_out, v_out))


def test_interleaved_layouts_are_served():
    """K, V, their outputs and the indices are interleaved in one buffer, without overlap."""
    b, n, heads, d = 2, 12, 3, 8
    indices = torch.arange(0, n, 2).expand(b, heads, -1)
    tokens = kit.randn(b, n, 4, heads, d)  # token by token
    k, v, k_out, v_out = (tokens[:, :, i].transpose(1, 2) for i in range(4))
    expected = ops.gather_kv(k, v, indices)
    ops.gather_kv(k, v, indices, out=(k_out[:, :, :6], v_out[:, :, 6:]))
    assert same((k_out[:, :, :6], v_out[:, :, 6:]), expected)
    ops.compact_kv_(k, v, indices)
    assert same((k[:, :, :6], v[:, :, :6]), expected)

    wide = kit.randn(b, heads, n, 3 * d)  # head by head, rows of K and V adjacent and of different width
    k, v, rest = wide[..., :d], wide[..., d : 2 * d + 4], wide[..., 2 * d + 4 :]
    own = torch.cat((indices, indices), -1).contiguous()  # [b, heads, 12], stored in the rest of each row
    rest.view(torch.int64)[..., 0] = own
    ops.compact_kv_(k, v, rest.view(torch.int64)[:, :, :6, 0])
    assert torch.equal(rest.view(torch.int64)[..., 0], own)

    even_and_odd = kit.randn(b, heads, 2 * n, d)
    k, v = even_and_odd[:, :, ::2], even_and_odd[:, :, 1::2]
    expected = ops.gather_kv(k, v, indices)
    ops.compact_kv_(k, v, indices)
    assert same((k[:, :, :6], v[:, :, :6]), expected)


def test_the_search_has_an_end():
    """Strides without a common divisor: the overlap check must not enumerate the rows."""
    shape, memory = (40, 41, 43, D), torch.empty(3_000_000)
    k = memory.as_strided(shape, (D * 10007, D * 5003, D * 2503, 1))
    out = memory.as_strided(shape, (D * 10009, D * 5009, D * 2521, 1), 2)
    with kit.refuses("k_out is written to and must"):
        ops.gather_kv(k, k, torch.zeros(40, 41, 43, dtype=torch.int64), out=(out, torch.empty(shape)))


def test_indices_are_not_overwritten():
    k, v = kit.kv(1, 2, 40, 16)
    indices = torch.arange(0, 40, 4).expand(1, 2, -1).contiguous()
    expected = ops.gather_kv(k, v, indices)
    memory = torch.zeros(1, 2, 40, 16)
    own = memory.view(torch.int64)[:, :, :10, 3]
    own.copy_(indices)
    before = memory.clone()
    with kit.refuses("gather_kv: k_out is written to and must share no memory with indices"):
        ops.gather_kv(k, v, own, out=(memory[:, :, :10], torch.empty(1, 2, 10, 16)))
    with kit.refuses("gather_kv: v_out is written to and must share no memory with indices"):
        ops.gather_kv(k, v, own, out=(torch.empty(1, 2, 10, 16), memory[:, :, 5:15]))
    with kit.refuses("compact_kv_: v is written to and must share no memory with indices"):
        ops.compact_kv_(k, memory, own)
    assert torch.equal(memory, before)
    ops.gather_kv(k, v, own, out=(memory[:, :, 10:20], memory[:, :, 20:30]))  # adjacent memory is allowed
    assert same((memory[:, :, 10:20], memory[:, :, 20:30]), expected)


def test_expanded_inputs_are_compared_too():
    """All heads read one head's keys, and the output overlaps these."""
    memory = kit.randn(1, 3, 20, 16)
    one = memory[:, 1:2].expand(-1, 3, -1, -1)
    indices = torch.arange(5).expand(1, 3, -1)
    cos, sin = torch.ones(20, 8), torch.zeros(20, 8)
    _, v = kit.kv(1, 3, 20, 16)
    with kit.refuses("v_out is written to and must share no memory with k"):
        ops.gather_kv(one, v, indices, out=(torch.empty(1, 3, 5, 16), memory[:, :, 4:9]))
    with kit.refuses("out is written to and must share no memory with k"):
        ops.rope_at_slots(one, cos, sin, out=memory)
    rows = memory[:, 0]
    with kit.refuses("out is written to and must share no memory with cos"):
        ops.rope_at_slots(v, rows[:, :1, :8].expand(1, 20, 8), sin, out=memory)


def negated(x: Tensor) -> Tensor:
    """Return a view that torch negates on reading."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


@kit.only("cpu")
def test_negated_views_are_read_but_not_written_to():
    k, v = kit.kv(1, 2, 20, 16)
    indices = torch.arange(0, 20, 4).expand(1, 2, -1)
    plan = kvops.lacache_plan(20, num_layers=4, budget=12, span=2, overlap=1, sinks=1)
    angles = torch.zeros(20, 8), torch.ones(20, 8)
    out = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16)
    ladder_out = torch.zeros(1, 2, len(plan), 16), torch.zeros(1, 2, len(plan), 16)
    assert same(ops.gather_kv(negated(k), negated(v), indices), ops.gather_kv(k, v, indices))
    for name, call in {
        "compact_kv_": lambda k, v: ops.compact_kv_(k, v, indices),
        "gather_kv": lambda k, v: ops.gather_kv(torch.zeros_like(k), v, indices, out=(k[:, :, :5], out[1])),
        "gather_kv.out": lambda k, v: torch.ops.kvops.gather_kv.out(k, v, indices, k_out=out[0], v_out=out[1]),
        "ladder_compact_": lambda k, v: ops.ladder_compact_([k, v], [v + 0, k + 0], plan=plan, layer=[0, 1]),
        "ladder_gather": lambda k, v: ops.ladder_gather(k, v, plan=plan, layer=0, out=ladder_out),
        "rope_at_slots": lambda k, v: ops.rope_at_slots(k, *angles, out=k),
        "rope_at_slots.out": lambda k, v: ops.rope_at_slots(v + 0, *angles, out=k),
    }.items():
        for first, second in ((negated(k), v.clone()), (k.clone(), negated(v)), (negated(k), negated(v))):
            if name.startswith("rope") and not first.is_neg():
                continue
            with kit.refuses(name.split(".")[0], "must not be negated views"):
                call(first, second)
            assert torch.equal(first, k) and torch.equal(second, v)
    assert not any(x.any() for x in out + ladder_out)
    conjugated = torch.complex(k, v).conj()
    for first, second in ((conjugated, v), (k, conjugated)):
        before = first.clone(), second.clone()
        with kit.refuses("conjugate inputs", "compact_kv_", kind=RuntimeError):  # torch's own message, for lists
            ops.compact_kv_(first, second, indices)
        assert torch.equal(first, before[0]) and torch.equal(second, before[1])
