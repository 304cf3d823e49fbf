"""Encode values that JSON can't represent in torch's weights-only format.

torch.save writes them. Our own machine (`pickle_reader`) reads them, with a table of the names that a pickle
may use and the functions that create their values. It builds tensors, the types listed here, and those that
the process allows by `torch.serialization.add_safe_globals`; it refuses everything else. The writer reads its
own output back, so that a value that can't be loaded is refused when it is saved.

A call copies its arguments, and a key is hashed. So their parts are counted, shared parts each time they
occur, and limited to WORTH parts per byte of the pickle.
"""

from __future__ import annotations

import argparse
import codecs
import io
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
import torch

from holdfast._core.base.values import shortened
from holdfast._core.format.archive import Archive, BadArchive
from holdfast._core.format.limits import OBJECT_BYTES
from holdfast._core.format.pickle_reader import BadPickle, Global, PickleReader
from holdfast._core.format.tensor_archive import STORAGES
from holdfast._core.layout.tensor import listed
from holdfast._core.torch_private import rebuilders, typed_storage
from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed

WORTH = 8
"""Parts that a pickle may use per byte of its length; a shared part counts each time."""
SOME = 4_000_000
"""Number of parts that any pickle may use, regardless of its length; counting them takes a second."""
DEPTH = 1000
"""Nesting of containers that are hashed or copied: Python's own recursion limit."""
Callee = Callable[..., object]
Allowed = Callee | tuple[Callee, str]
"""A class or a function that a pickle may call; or (class or function, its name in pickles)."""
_REBUILT = rebuilders()
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_also: list[Allowed] = []
"""Types allowed by active `allowing` blocks, once for each block."""


@contextmanager
def allowing(kinds: Iterable[Allowed]) -> Iterator[None]:
    """Also allow these types in objects until the block ends; in all threads, because a load has several."""
    mine = list(kinds)
    _also.extend(mine)
    try:
        yield
    finally:
        for kind in mine:
            _also.remove(kind)


def allowed() -> dict[str, Callee]:
    """Return the classes and functions that pickles may call in this process, by their names in pickles."""
    kinds = (*torch.serialization.get_safe_globals(), *_also)
    pairs = (kind if isinstance(kind, tuple) else (kind, _path(kind)) for kind in kinds)
    return {path: kind for kind, path in pairs}


def allowed_class(path: str) -> type | None:
    """Return an allowed class by name; also an enumeration for which only the lookup of members is allowed
    (`partial(look_up, kind)`)."""
    kind = allowed().get(path)
    if isinstance(kind, partial) and kind.args:
        kind = kind.args[0]
    return kind if isinstance(kind, type) else None


def _path(kind: Callee) -> str:
    return _named(kind.__module__, kind.__qualname__)


def _named(module: str, name: str) -> str:
    return f"{module}.{name}".replace("numpy.core.", "numpy._core.")  # NumPy 1 and NumPy 2


class _NotAllowed(Exception):
    """A pickle uses names that are not allowed. The message lists them."""


class _NoNumbers(BadPickle):
    """An array is not of numbers."""


class _Objects(PickleReader):
    """Builds the value of an archive of torch.save."""

    def __init__(self, data: bytes) -> None:
        # Members are read as bytearrays, because a storage can use one without a copy.
        view = memoryview(data)
        read: Any = lambda start, length: bytearray(view[start : start + length])  # noqa: E731
        self._archive = Archive(read, 0, len(data))
        super().__init__(bytes(self._archive.load("data.pkl", OBJECT_BYTES)))
        order = f"{self._archive.folder}/byteorder"
        if order in self._archive.members and self._archive.load("byteorder", 10) != b"little":
            raise BadArchive("its numbers are big-endian")
        self._left = SOME + WORTH * len(self._data)
        self._users = allowed()
        self._known = _KNOWN | {
            _path(set): (set, self._set),
            _path(Counter): (Counter, self._counter),
            _OF_TYPE: (_REBUILT[_OF_TYPE], self._of_type),
        }
        self._makers: dict[int, tuple[str, Callee]] = {}
        """By `id` of a resolved name: the name, and the function that creates the value of a call."""
        self._refused: set[str] = set()
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._hashes: dict[int, tuple[object, Counter[int]]] = {}
        """By `id` of a dict: the dict, which keeps the `id` unique, and its number of keys per hash."""

    # Of protocol 4. torch.save uses protocol 2, in which modules have the names of Python 2.
    _empty_set = _add_items = _frozenset = PickleReader._unknown

    def read(self) -> object:
        """Return the value. Raises BadPickle, BadArchive or _NotAllowed."""
        try:
            with torch.device("cpu"):  # whatever the caller's default device is: the bytes are in host memory
                return super().read()
        finally:
            self._storages.clear()  # as `PickleReader.read` does with the values
            self._hashes.clear()
            if self._refused:
                raise _NotAllowed(listed(sorted(self._refused))) from None

    def resolve(self, module: str, name: str) -> object:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = _named(module, name)
        plain = vars(torch).get(name) if module == "torch" else None  # getattr might import
        if isinstance(plain, torch.dtype | torch.qscheme) or (plain is not None and name in STORAGES):
            return plain
        if path in self._known:
            kind, make = self._known[path]
        elif path in self._users and module not in _NEVER:
            kind = make = self._users[path]
        else:
            self._refused.add(path)  # and read on, to report all of them
            return Global(module, name)
        self._makers[id(kind)] = path, make
        return kind

    def call(self, kind: object, args: object) -> object:
        if id(kind) not in self._makers:
            return super().call(kind, args)
        return self._make(*self._makers[id(kind)], args)

    def _new(self, position: int) -> int:
        kind = self._stack[-2]
        if self._is_class(kind):
            self._room -= 1
            args = self._stack.pop()
            self._stack[-1] = self._make(_path(kind), partial(kind.__new__, kind), args)
            return position
        return self._call(position)

    def build(self, target: object, state: object) -> None:
        if self._is_class(type(target)) or isinstance(target, np.ndarray | np.dtype):
            self._make(f"{_path(type(target))}.__setstate__", partial(_set_state, target), (state,))
        else:
            super().build(target, state)

    def _is_class(self, kind: object) -> TypeGuard[type]:
        """Return whether pickles contain instances of this class."""
        return isinstance(kind, type) and (kind in _CLASSES or kind in self._users.values())

    def _make(self, path: str, make: Callee, args: object) -> object:
        if type(args) is not tuple:
            raise BadPickle(f"it calls {path} without arguments")
        self._charge(args)
        try:
            return make(*args)
        except (BadPickle, LoadFailed, MemoryError):
            raise
        except Exception as error:
            reason = _first_line(error)
        raise BadPickle(f"it calls {path} with arguments that are not its own ({reason})")

    def _set(self, items: Iterable[object]) -> set[object]:
        made: dict[object, object] = {}
        self.put(made, [part for item in items for part in (item, None)])
        return set(made)

    def _counter(self, counts: dict[object, int]) -> Counter[object]:
        made: Counter[object] = Counter()
        self.put(made, [*chain.from_iterable(counts.items())])
        return made

    def _of_type(self, kind: object, new_type: object, args: object, state: object) -> object:
        return _REBUILT[_OF_TYPE](lambda *args: self.call(kind, args), new_type, args, state)

    def persistent(self, about: object) -> object:
        """Return a storage, if the archive contains all of it."""
        kinds = (str, type, str, str, int)
        if type(about) is not tuple or len(about) != 5 or not all(map(isinstance, about, kinds)):
            raise BadPickle("it refers to a storage by what is none")
        _, kind, key, _, count = about
        dtype = getattr(torch, STORAGES.get(kind.__name__, "none"), None)
        if dtype is None:
            raise BadPickle(f"it refers to a storage of {_path(kind)}")
        if key not in self._storages:
            member = np.frombuffer(self._archive.load(f"data/{key}", OBJECT_BYTES), "u1")
            self._storages[key] = torch.from_numpy(member).untyped_storage()
        storage = self._storages[key]
        # The storage can't grow, so torch refuses a tensor that exceeds it.
        if not 0 <= count * dtype.itemsize <= storage.nbytes():
            raise BadPickle(f"its storage {key[:200]!r} has {storage.nbytes()} bytes, not {count} elements")
        return typed_storage(storage, dtype)

    def check_key(self, target: object, key: object) -> None:
        """Charge for hashing a key, and for comparing it with the keys of equal hash in its dict."""
        # Before hash(), which recurses in C: deep nesting, refused here, would crash the process.
        self._charge(key)
        try:
            hashed = hash(key)
        except Exception:
            raise BadPickle("a key in it can't be one") from None
        _, counts = self._hashes.setdefault(id(target), (target, Counter()))
        counts[hashed] += 1
        self._spend(counts[hashed])

    def _spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise BadPickle("it says more than its length can pay for, by sharing or nesting its parts")

    def _charge(self, value: object) -> None:
        """Charge for all parts of a value, each time they occur."""
        # Level by level, not by recursion, because the file determines the depth.
        level = [value]
        for _ in range(DEPTH):
            below: list[object] = []
            for item in level:
                parts = [*item, *item.values()] if isinstance(item, dict) else item
                if isinstance(parts, tuple | list | str | bytes):
                    self._spend(len(parts))
                    below.extend(() if isinstance(parts, str | bytes) else parts)
            self._spend(len(level))
            if not below:
                return
            level = below
        raise BadPickle(f"it is nested more than {DEPTH} deep")


def _bytes(content: object = b"", encoding: str = "") -> bytes:
    """Return content. Protocol 2 has bytes only as text in Latin-1; a number would be a size to allocate."""
    if type(content) is str:
        return content.encode("latin-1")
    if type(content) is bytes:
        return content
    raise TypeError("it is no content")


def _dtype(code: str, align: object, copy: object) -> np.dtype[np.generic]:
    dtype = np.dtype(code, copy=True)  # a new one, which is given a state
    if dtype.kind not in "biufc":
        raise _NoNumbers(f"it has a NumPy array of {dtype} in it")
    return dtype


def _scalar(dtype: np.dtype[np.generic], content: bytes) -> object:
    return np.frombuffer(content, dtype).reshape(())[()]


def _set_state(target: object, state: Any) -> None:
    """Give an instance its state, as pickle does."""
    # NumPy does not check a dtype's size, alignment and flags, nor the signs of a shape; wrong ones crash.
    if isinstance(target, np.dtype) and (state[0], *state[2:]) != (3, None, None, None, -1, -1, 0):
        raise ValueError("no dtype of numbers has this state")
    if isinstance(target, np.ndarray) and min(state[1], default=0) < 0:
        raise ValueError("no array has this shape")
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        if set(map(type, attributes)) != {str}:
            raise ValueError("an attribute has no name")
        vars(target).update(attributes)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _sparse(layout: torch.layout, parts: tuple[Any, ...]) -> torch.Tensor:
    """Make a sparse tensor. Its indices are checked, unlike by torch's own function."""
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts[:3], is_coalesced=parts[3], check_invariants=True)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=True)


def _on_cpu(make: Callee, *args: object) -> object:
    """Make a tensor whose last arguments are a device and requires_grad."""
    return make(*args[:-2], "cpu", args[-1])


def _never(*args: object) -> None:
    raise TypeError("pickles refer to it, and never call it")


_NEVER = ("sys", "os", "posix", "nt")
"""Modules whose functions are never called, even if allowed; as in torch."""
_CLASSES = (argparse.Namespace, OrderedDict)
"""Classes whose instances may be in pickles, besides those that the process allows."""
_numpy = import_module("numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core")
_MADE: dict[Callee, Callee] = {
    **dict.fromkeys((np.ndarray, np.float64, np.float32, np.int64, np.int32, np.bool_), _never),
    **dict.fromkeys((argparse.Namespace, torch.Tensor, torch.nn.Parameter, torch.UntypedStorage), _never),
    codecs.encode: _bytes,
    bytes: _bytes,
    bytearray: lambda *content: bytearray(_bytes(*content)),
    complex: complex,
    OrderedDict: lambda: OrderedDict(),
    np.dtype: _dtype,
    _numpy.multiarray._reconstruct: lambda *_: np.empty(0, "b"),  # its state is the array
    _numpy.multiarray.scalar: _scalar,
    torch.Size: torch.Size,
    torch.device: torch.device,
}
"""Classes and functions that a pickle may name, each with the function that creates the value of a call."""
_OTHERWISE: dict[str, Callee] = {"torch._utils._rebuild_sparse_tensor": _sparse} | {
    path: partial(_on_cpu, _REBUILT[path])
    for path in (
        "torch._utils._rebuild_wrapper_subclass",
        "torch._utils._rebuild_device_tensor_from_numpy",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    )
}
"""Replacements for functions of torch in calls."""
_KNOWN = {_path(kind): (kind, make) for kind, make in _MADE.items()} | {
    path: (kind, _OTHERWISE.get(path, kind)) for path, kind in _REBUILT.items()
}


def _first_line(error: Exception) -> str:
    return shortened(str(error).partition("\n")[0]).rstrip(".")


def encode(value: object, name: str) -> bytes:
    """Return torch's bytes of a value, after loading them back as a check."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _Objects(buffer.getvalue()).read()
    except _NoNumbers as error:
        raise BadInput(
            f"{name!r}{str(error).removeprefix('it')}; only arrays of numbers can be stored so that loading "
            "executes nothing.",
            hint="Store array.tolist() instead.",
        ) from None
    except Exception as error:
        raise BadInput(
            f"{name!r} is a {_path(type(value))}, which can't be stored so that loading executes nothing "
            f"({_first_line(error)}).",
            hint="Store its state_dict, a dict or a tensor instead, or allow its type with "
            "torch.serialization.add_safe_globals.",
        ) from None
    return buffer.getvalue()


def decode(data: bytes, name: str) -> object:
    """Return the value."""
    try:
        return _Objects(data).read()
    except _NotAllowed as error:
        raise LoadFailed(
            f"The object {name!r} was not loaded, because it asks for types outside the allow-list: {error}.",
            hint="If you trust them, allow them with torch.serialization.add_safe_globals; or leave it out "
            "of the load.",
        ) from None
    except LoadFailed:
        raise
    except Exception as error:
        reason = _first_line(error) or "there is not enough memory for what it says"
        raise CorruptCheckpoint(
            f"The object {name!r} was not loaded, because it is damaged: {reason}."
        ) from None
