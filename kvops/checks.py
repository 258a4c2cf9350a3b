"""Checks of arguments that are no tensors. All of them name the function, the argument, what was expected and what came."""


def check_int(op: str, name: str, value: int, low: int) -> None:
    """`value` is an int (a bool is not) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__} {value!r}")
    if value < low:
        raise ValueError(f"{op}: {name} must be at least {low}, got {value}")
