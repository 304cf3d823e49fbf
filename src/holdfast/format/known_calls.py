"""Check the arguments of calls in a pickle that torch allows, but that do harm with forged arguments.

NumPy does not check the state that a dtype is given, and a wrong one crashes the process. A single number as
argument allocates a buffer, a storage or a tensor of that many bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.format.pickle_reader import BadPickle, Global, Record

_TEXT = (str, bytes)
# torch.save uses pickle protocol 2, which has no opcode for bytes. There pickle writes a call of
# `_codecs.encode`, or of `bytes` if they are empty.
_BYTES = ("_codecs.encode", "__builtin__.bytes", "builtins.bytes")


def check_call(kind: Global, args: tuple[object, ...]) -> None:
    """Raise BadPickle if no writer produces such a call."""
    known = _never if _is_memory(kind) else _CALLS.get((kind.module, kind.name))
    if known is not None and not known(args):
        raise BadPickle(f"it calls {kind} with arguments that are not its own")


def check_state(target: Record, state: object) -> None:
    """Raise BadPickle if no writer produces such a state."""
    known = _STATES.get((target.kind.module, target.kind.name))
    if known is not None and not known(state):
        raise BadPickle(f"it gives what {target.kind} makes a state that is not its own")


def _is_memory(kind: Global) -> bool:
    """Return whether this is a class of tensors, storages, arrays or dtypes: pickles refer to it, never call
    it."""
    torch_class = kind.module.partition(".")[0] == "torch" and kind.name.endswith(("Tensor", "Storage"))
    return torch_class or kind.module == "numpy.dtypes" or (kind.module, kind.name) == ("numpy", "ndarray")


def _never(args: tuple[object, ...]) -> bool:
    return False


def _content(args: tuple[object, ...]) -> bool:
    """Return whether the arguments of `bytes` are content, not a size to allocate."""
    return not any(type(value) is int for value in args)


def _is(value: object, *names: str) -> bool:
    """Return whether a value is a call of one of `names`, or a reference to it."""
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
    """Return whether this is the state of a numeric dtype, without fields or subarrays."""
    # Version, byte order, subarray, names, fields, size, alignment, flags. NumPy does not check the last
    # three.
    return (
        type(state) is tuple
        and len(state) == 8
        and state[0] == 3
        and type(state[1]) in _TEXT
        and state[2:] == (None, None, None, -1, -1, 0)
    )


def _reconstruct(args: tuple[object, ...]) -> bool:
    """Return whether the call makes an empty array, which gets its content as its state."""
    return len(args) == 3 and isinstance(args[0], Global) and args[1] == (0,)


def _array_state(state: object) -> bool:
    # Version, shape, dtype, is Fortran order, content. NumPy itself compares content and shape.
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
