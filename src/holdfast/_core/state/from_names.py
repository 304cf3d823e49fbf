"""Build nested values from the names of their parts alone, as torch DCP leaves them.

DCP saves each value of a list of dicts or lists separately: `param_groups` as `param_groups.0.lr` and so on.
The present value resolves ambiguous names: whether a key is a number or text, and whether a dot is part of a
key or separates two. Without a present value, consecutive numeric keys from 0 on become a list.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, MutableMapping
from copy import copy

_DEEPEST = 64
"""Maximum nesting depth of a list."""
_EXTRA_STATE = "_extra_state"
"""What torch calls the value of a module's `get_extra_state` in a `state_dict`."""


def are_of_a_list(paths: list[str], present: list[object]) -> bool:
    """Return whether paths (`0.lr`, `0.betas`, `1.lr`) are those of a list of dicts or lists, the only kind
    of list that DCP splits. Numbers must be consecutive, except for present items without parts."""
    numbers = {path.partition(".")[0] for path in paths}
    depth = max((path.count(".") for path in paths), default=0)
    if not all(map(str.isdecimal, numbers)) or not 1 <= depth <= _DEEPEST:
        return False
    there = {int(number) for number in numbers}
    there |= {index for index, item in enumerate(present) if _has_no_parts(item)}
    return all(index in there for index in range(max(map(int, numbers))))


def joined(parts: Mapping[str, object], present: object) -> object:
    """Build a value from its parts, given by their paths within it.

    present: the value to be replaced, or None. Its items for which DCP stores nothing are kept.
    """
    known = {str(key): (key, value) for key, value in present.items()} if isinstance(present, Mapping) else {}
    below: dict[str, dict[str, object]] = {}
    for path, part in parts.items():
        # max is the longest key: all candidates are prefixes of one path.
        key = max((key for key in parents_of(path, 0) if key in known), default=path.partition(".")[0])
        # A path below that of another part is one key.
        key = path if key in parts and key not in known else key
        below.setdefault(key, {})[path[len(key) + 1 :]] = part
    numbers = {int(key): key for key in below if key.isdecimal()}
    is_numbered = len(numbers) == len(below)
    here = present if isinstance(present, list) else []
    in_order = sorted(numbers) == [*range(len(below))]
    if is_numbered and (here or (in_order and not isinstance(present, Mapping))):
        items = {index: item for index, item in enumerate(here) if _has_no_parts(item)}
        for index, key in numbers.items():
            items[index] = _value(below[key], here[index] if index < len(here) else None)
        return [items[index] for index in sorted(items)]
    made: MutableMapping[object, object] = {}
    if isinstance(present, MutableMapping):
        made = copy(present)  # keeps the class, such as Counter
        made.clear()
    made.update({key: value for key, value in known.values() if _has_no_parts(value)})
    is_numbered &= all(type(key) is int for key, _ in known.values())
    for text, inner in below.items():
        new, value = known.get(text, (int(text) if is_numbered else text, None))
        made[new] = _value(inner, value)
    return made


def listed(value: object, leaves: Container[int]) -> object:
    """Return nested dicts that were made from names, with lists where the keys are the numbers from 0 on.

    leaves: the ids of values, which stay as they are, also if they are such dicts.
    """
    if type(value) is not dict or id(value) in leaves:
        return value
    made = {key: listed(part, leaves) for key, part in value.items()}
    numbers = list(map(str, range(len(made))))
    return [made[number] for number in numbers] if made and made.keys() == set(numbers) else made


def with_extra_states(values: Mapping[str, object]) -> dict[str, object]:
    """Return values by their names in the `state_dict` of a module, where an extra state is one value, also
    if it is a dict: `0._extra_state.scale` becomes a part of `0._extra_state`."""
    made: dict[str, object] = {}
    extra: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        module, found, path = f".{name}".partition(f".{_EXTRA_STATE}.")
        if found:
            extra.setdefault(f"{module}.{_EXTRA_STATE}"[1:], {})[path] = value
        else:
            made[name] = value
    return made | {name: joined(parts, None) for name, parts in extra.items()}


def _value(parts: Mapping[str, object], present: object) -> object:
    return parts[""] if "" in parts else joined(parts, present)


def _has_no_parts(value: object) -> bool:
    """Return whether torch DCP stores nothing for a value: an empty dict, or a container of such values."""
    if isinstance(value, Mapping):
        return all(map(_has_no_parts, value.values()))
    return isinstance(value, list) and bool(value) and all(map(_has_no_parts, value))


def parents_of(name: str, start: int) -> Iterator[str]:
    """Yield the parents of a name that end at position `start` or later, and the name itself."""
    end = name.find(".", start)
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name
