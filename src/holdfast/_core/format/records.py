"""Records: values of user classes that are only data (enumerations, dataclasses and named tuples).

They are stored as their parts, with the name of their class. Loading executes no code of the class: no
`__init__`, no `__setattr__`, no import. The class must occur in the present value that is replaced, or be
allowed in the process by `torch.serialization.add_safe_globals`; a checkpoint can't choose others.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

_PICKLING: dict[str, tuple[object, ...]] = {
    # The second is what `dataclass(frozen=True, slots=True)` adds.
    "__getstate__": (object.__getstate__, getattr(dataclasses, "_dataclass_getstate", None)),
    "__setstate__": (None, getattr(dataclasses, "_dataclass_setstate", None)),
    "__reduce__": (object.__reduce__,),
    "__reduce_ex__": (object.__reduce_ex__,),
}
"""Methods by which a class customizes pickling, with their values in a class that does not."""


class Record(NamedTuple):
    """The parts of a record, without its class, for comparison and display."""

    kind: str
    """enum, dataclass or namedtuple."""
    path: str
    parts: tuple[tuple[str, object], ...]

    def __repr__(self) -> str:
        name = self.path.rpartition(".")[2]
        if self.kind == "enum":
            return f"{name}.{self.parts[0][0]}"
        return f"{name}({', '.join(f'{part}={value!r}' for part, value in self.parts)})"


class OtherFields(Exception):
    """The fields of a class differ from the stored parts. The message lists them."""


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_record(value: object) -> bool:
    """Return whether a value is a dataclass or a named tuple without any state besides its fields."""
    kind = type(value)
    if isinstance(value, tuple):
        return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and len(value) == len(kind._fields)
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return False
    # A class that customizes its pickling is not a record.
    if any(getattr(kind, name, None) not in plain for name, plain in _PICKLING.items()):
        return False
    return getattr(value, "__dict__", {}).keys() <= {field.name for field in dataclasses.fields(kind)}


def fields_of(value: object) -> list[tuple[str, object]]:
    """Return the fields of a record that are set, in their order."""
    if isinstance(value, tuple):
        return [*zip(type(value)._fields, value, strict=True)]  # type: ignore[attr-defined]
    assert dataclasses.is_dataclass(value)
    return [
        (one.name, getattr(value, one.name)) for one in dataclasses.fields(value) if hasattr(value, one.name)
    ]


def taken_apart(value: object) -> Record | None:
    """Return the parts of an enumeration's member or of a record; None for any other value."""
    path = path_of(type(value))
    if isinstance(value, enum.Enum):
        known = value.name in type(value).__members__  # a combination of flags is not
        return Record("enum", path, ((value.name, None),)) if known else None
    if is_record(value):
        return Record("namedtuple" if isinstance(value, tuple) else "dataclass", path, (*fields_of(value),))
    return None


def put_together(record: Record, kind: type) -> object:
    """Create a value of a class from its parts. Raises OtherFields if the class has other fields."""
    names = [name for name, _ in record.parts]
    if record.kind == "enum" and issubclass(kind, enum.Enum):
        if names[0] not in kind.__members__:
            raise OtherFields(f"{record.path} has no member {names[0]!r}")
        return kind.__members__[names[0]]
    if record.kind == "namedtuple" and issubclass(kind, tuple):
        if names != [*getattr(kind, "_fields", ())]:
            raise OtherFields(f"{record.path} has not the fields {', '.join(names)}")
        return tuple.__new__(kind, [value for _, value in record.parts])
    if record.kind == "dataclass" and dataclasses.is_dataclass(kind):
        fields = {field.name: field for field in dataclasses.fields(kind)}
        missing = [
            name for name, one in fields.items() if name not in names and one.default is dataclasses.MISSING
        ]
        if missing or not fields.keys() >= {*names}:
            raise OtherFields(f"{record.path} has the fields {', '.join(fields)}, and not {', '.join(names)}")
        made = object.__new__(kind)
        for name, value in record.parts:
            object.__setattr__(made, name, value)
        return made
    raise OtherFields(f"{record.path} is no {record.kind} here")


def classes_in(value: object) -> dict[str, type]:
    """Return the classes of the enumerations and records in a value, by their names."""
    found: dict[str, type] = {}
    seen, left = set[int](), [value]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, enum.Enum) or is_record(value):
            found[path_of(type(value))] = type(value)
        if isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif not isinstance(value, enum.Enum) and is_record(value):
            left += [part for _, part in fields_of(value)]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            left += [*value]
    return found
