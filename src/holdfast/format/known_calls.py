"""Calls that torch allows and that do harm with arguments which no writer gives them.

NumPy takes what a dtype is told of itself on trust, and ends the process; and a number alone makes a buffer,
a storage or a tensor of that many bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.format.pickle_reader import BadPickle, Global, Record

_TEXT = (str, bytes)
# torch.save pickles by protocol 2, which has no opcode for bytes: pickle writes a call of `_codecs.encode`
# there, and one of `bytes` for empty ones.
_BYTES = ("_codecs.encode", "__builtin__.bytes", "builtins.bytes")


def check_call(kind: Global, args: tuple[object, ...]) -> None:
    """Refuse a call that no writer writes."""
    known = _never if _is_memory(kind) else _CALLS.get((kind.module, kind.name))
    if known is not None and not known(args):
        raise BadPickle(f"it calls {kind} with arguments that are not its own")


def check_state(target: Record, state: object) -> None:
    """Refuse a state that no writer writes."""
    known = _STATES.get((target.kind.module, target.kind.name))
    if known is not None and not known(state):
        raise BadPickle(f"it gives what {target.kind} makes a state that is not its own")


def _is_memory(kind: Global) -> bool:
    """Is it a class of tensors, storages, arrays or dtypes? They are referred to, and made by functions."""
    torch_class = kind.module.partition(".")[0] == "torch" and kind.name.endswith(("Tensor", "Storage"))
    return torch_class or kind.module == "numpy.dtypes" or (kind.module, kind.name) == ("numpy", "ndarray")


def _never(args: tuple[object, ...]) -> bool:
    return False


def _content(args: tuple[object, ...]) -> bool:
    """Of bytes: what they hold, not how many there are."""
    return not any(type(value) is int for value in args)


def _is(value: object, *names: str) -> bool:
    """Is it a call of one of these, or a reference to one?"""
    kind = value.kind if isinstance(value, Record) else value
    return isinstance(kind, Global) and repr(kind) in names


def _whole(values: object) -> bool:
    return type(values) is tuple and all(type(value) is int and value >= 0 for value in values)


def _dtype(args: tuple[object, ...]) -> bool:
    if len(args) != 3:
        return False
    code, *flags = args  # as `numpy.dtype.__reduce__` gives them: "f4", align=False, copy=True
    return isinstance(code, str | bytes) and len(code) <= 16 and flags in ([False, True], [0, 1])


def _dtype_state(state: object) -> bool:
    """Of a plain number: no fields, no parts."""
    # Version, byte order, subarray, names, fields, size, alignment, flags. NumPy takes the last three on
    # trust.
    return (
        type(state) is tuple
        and len(state) == 8
        and state[0] == 3
        and type(state[1]) in _TEXT
        and state[2:] == (None, None, None, -1, -1, 0)
    )


def _reconstruct(args: tuple[object, ...]) -> bool:
    """An empty array, which gets its content as its state."""
    return len(args) == 3 and isinstance(args[0], Global) and args[1] == (0,)


def _array_state(state: object) -> bool:
    # Version, shape, dtype, is it in Fortran's order, content. NumPy itself compares content and shape.
    return (
        type(state) is tuple
        and len(state) == 5
        and _whole(state[1])
        and _is(state[2], "numpy.dtype")
        and (type(state[4]) in _TEXT or _is(state[4], *_BYTES))
    )


def _attributes(state: object) -> bool:
    return type(state) is dict and all(type(key) is str for key, _ in state.values())


def _scalar(args: tuple[object, ...]) -> bool:
    return (
        len(args) == 2
        and _is(args[0], "numpy.dtype")
        and (type(args[1]) in _TEXT or _is(args[1], "_codecs.encode"))
    )


_CALLS: dict[tuple[str, str], Callable[[tuple[object, ...]], bool]] = {
    ("numpy", "dtype"): _dtype,
    **{(module, name): _content for module in ("__builtin__", "builtins") for name in ("bytes", "bytearray")},
    # NumPy 2 writes `_core` where NumPy 1 wrote `core`, and reads both.
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
}
_STATES: dict[tuple[str, str], Callable[[object], bool]] = {
    ("argparse", "Namespace"): _attributes,
    ("numpy", "dtype"): _dtype_state,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array_state for core in ("core", "_core")},
}
