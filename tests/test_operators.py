"""What holds for every operator of the schema, by its calls in calls.py: graphs, repeats, rows at any address."""

import dataclasses
import functools

import pytest
import torch

import kit
from calls import CALLS, OPERATORS_CALLS, Inputs, direct, inputs
from test_schema import OPERATORS, SCHEMAS

pytestmark = kit.every_device
every_operator = pytest.mark.parametrize("op", OPERATORS)
every_call = pytest.mark.parametrize("name", OPERATORS_CALLS)
SMALL = dict(n=80, d=16, dv=8)


@functools.cache
def made(**options) -> Inputs:
    return inputs(0, **options)


def fresh(**options) -> Inputs:
    return made(**options).map(lambda x: kit.on_device(x.clone()))


def calls_of(op: str) -> list[str]:
    return [name for name in OPERATORS_CALLS if name.split(",")[0] == op]


@every_operator
def test_every_argument_is_given(op):
    """Each overload has calls, and each of its arguments is given in one of them, as another than its default."""
    given = set()
    for name in calls_of(op):
        overload, arguments = direct(name, fresh(**SMALL))
        defaults = {x.name: x.default_value for x in overload._schema.arguments if x.has_default_value()}
        given |= {(overload._name, x) for x, value in arguments.items() if value != defaults.get(x, ...)}
    schemas = {f"{x.name}.{x.overload_name}".rstrip("."): x for x in SCHEMAS if x.name == f"kvops::{op}"}
    assert given == {(name, x.name) for name, schema in schemas.items() for x in schema.arguments}


# Graphs. Of simulated kernels they are those of the CPU.


def without_nan(x: Inputs) -> Inputs:
    """Of which no result is NaN, as opcheck takes that for a difference."""
    finite = {name: getattr(x, name).nan_to_num(0, 1, -1) for name in ("scores", "segments", "means")}
    clusters = torch.arange(x.n, dtype=torch.int32).remainder(x.means.shape[2]).expand_as(x.assignment)
    whole = dict(starts=torch.zeros_like(x.starts), lengths=torch.full_like(x.lengths, x.n))
    return dataclasses.replace(x, **finite, **whole, assignment=clusters)


@kit.only("cpu", "cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_call
def test_opcheck(name, dtype):
    overload, arguments = direct(name, without_nan(fresh(**SMALL, dtype=dtype)))
    torch.library.opcheck(overload, (), arguments)


@kit.only("cpu", "cuda")
@every_operator
def test_compile(op):
    calls = [CALLS[name] for name in calls_of(op)]

    @torch.compile(fullgraph=True)
    def compiled(x):
        return [y + 1 for call in calls for y in call(x)]

    torch.compiler.reset()
    for layout in ("bhnd", "bnhd"):
        x, y = (fresh(**SMALL) for _ in range(2))
        for z in (x, y):
            z.q, z.k, z.v = (kit.laid_out(rows, layout) for rows in (z.q, z.k, z.v))
        with torch.no_grad():
            expected = [z + 1 for call in calls for z in call(x)]
            assert kit.same(compiled(y), expected) and kit.same(y.tensors(), x.tensors())
