"""Tables of model families: where they come from, and what is checked when one is read.

A table is a TOML file (docs/model.md). The package has some; others come from `register`, from the folders in
HOLDFAST_MODELS, and from installed packages that name a module with tables as an entry point of the group
`holdfast.models`. In this order: a model type is described by the first table that has it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from holdfast._core.base.options import model_folders
from holdfast._core.layout.tensor import listed, nearest
from holdfast._models.views.rules import Rule, parse
from holdfast.errors import BadInput

GROUP = "holdfast.models"
"""The group of entry points whose modules hold tables."""
PACKAGE = "holdfast"
"""The source of the package's own tables."""
LINKS = ("published", "within", "sizes")
"""Keys of a section that are not entries."""
_FOLDER = files("holdfast._models.views") / "families"
_HOLES = re.compile(r"\{(\w*)\}")
_OURS = {"layer", "expert"}
"""Placeholders of our names."""
_BEHIND = {"after": "layer", "expert_after": "expert"}
"""Further placeholders of published names: the number of a layer or an expert that is behind all others."""

Sections = dict[str, dict[str, str]]


class Table(NamedTuple):
    """A table, with what it takes from those that it extends."""

    name: str
    file: str
    """The file, for errors."""
    source: str
    """Where it comes from: `holdfast`, `register`, HOLDFAST_MODELS, or the entry point."""
    about: str
    model_types: tuple[str, ...]
    engine: tuple[str, ...]
    """The parts of `engines/vllm.toml` that these models consist of; () if unknown. A table that extends this
    one does not take it over: each is tried in the engine."""
    sections: Sections
    contains: str = ""
    """For a model that contains a language model: the key of its configuration; "" for a language model."""
    inside: tuple[dict[str, str], ...] = ()
    """Beginnings of published names, and what they are where a model contains this one: the first of these
    that the folder has applies."""
    outside: Mapping[str, str] = MappingProxyType({})
    """Beginnings of our names in a model that contains this one, and what they are without it."""
    unchanged: Mapping[str, str] = MappingProxyType({})
    """Beginnings of our and published names of tensors that have no other form, such as a vision tower's."""
    further: tuple[str, ...] = ()
    """Beginnings of names, ours or published, of layers that predict further tokens."""
    unused: tuple[str, ...] = ()
    """Published tensors of which nothing of ours is made, such as copies of others; with {after}."""
    layer_types: Mapping[str, str] = MappingProxyType({})
    """Beginnings of our names, with {layer}, of tensors that only layers of one type have, and that type."""
    language_model: str = ""
    """The type of the language model inside, if its configuration names none that has a table."""


class _Place(NamedTuple):
    """A file with a table. beside: the files of its folder, which it may extend."""

    path: Traversable
    beside: Sequence[Traversable]
    source: str


_registered: dict[str, _Place] = {}
"""By resolved path, the files given to `register`."""


def register(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Read a table, check it, and use it for its model types from now on; return these."""
    if not isinstance(path, str | os.PathLike) or not (place := Path(path)).is_file():
        raise BadInput(f"{path} is no file.", hint="Give the TOML file of a table: docs/model.md.")
    place = place.resolve()
    registered = _Place(place, _tables_in(place.parent), "register")
    table = _read(registered)
    if not table.model_types:
        raise BadInput(
            f"{place} has no model_types.",
            hint='Write model_types = ["..."], as config.json names the model.',
        )
    for other in _registered.values():
        if other.path != place and (twice := {*table.model_types} & {*_read(other).model_types}):
            raise _described_twice(str(other.path), table.file, twice.pop())
    _registered[str(place)] = registered
    by_model_type.cache_clear()
    return table.model_types


@cache
def by_model_type() -> dict[str, Table]:
    """Return the table of each model type."""
    found: dict[str, Table] = {}
    outside = (_registered.values(), _in_folders(), _of_packages())
    for read in (*(map(_read, places) for places in outside), _own().values()):
        mine: dict[str, Table] = {}
        for table in read:
            for kind in table.model_types:
                if kind in mine:
                    raise _described_twice(mine[kind].file, table.file, kind)
                mine[kind] = table
        found = mine | found
    return found


def decoder() -> Table:
    """Return the table that the package's others extend, for models that no table describes."""
    return _packaged("decoder")


def as_published() -> Table:
    """Return a table for models that no table describes, whose names stay as they are."""
    return _packaged("as_published")._replace(unchanged=MappingProxyType({}))


def _described_twice(one: str, other: str, kind: str) -> BadInput:
    return BadInput(
        f"{one} and {other} both describe the model type {kind!r}.", hint="Remove it from one of them."
    )


def _tables_in(folder: Traversable) -> list[Traversable]:
    return sorted(
        (path for path in folder.iterdir() if path.name.endswith(".toml")), key=lambda one: one.name
    )


def _all_in(folder: Traversable, source: str) -> list[_Place]:
    paths = _tables_in(folder)
    return [_Place(path, paths, source) for path in paths]


@cache
def _own() -> dict[str, Table]:
    """Return the package's tables, by name."""
    return {name: _packaged(name) for name in _names(_tables_in(_FOLDER))}


@cache
def _packaged(name: str) -> Table:
    return _read(_Place(_FOLDER / f"{name}.toml", (), PACKAGE))


def _names(paths: Iterable[Traversable]) -> dict[str, Traversable]:
    return {path.name.removesuffix(".toml"): path for path in paths}


def _in_folders() -> list[_Place]:
    places: list[_Place] = []
    for name in model_folders():
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise BadInput(f"HOLDFAST_MODELS in the environment names {name!r}, which is no folder.")
        places += _all_in(folder, f"HOLDFAST_MODELS={name}")
    return places


def _of_packages() -> list[_Place]:
    places: list[_Place] = []
    for point in entry_points(group=GROUP):
        where = f"the entry point {point.name!r} of the group {GROUP!r}"
        try:
            folder = files(point.module)
        except (ImportError, TypeError) as error:
            raise BadInput(
                f"{where} names the module {point.module!r}, which has no files: {error}.",
                hint="Install its package again, or uninstall it.",
            ) from None
        places += _all_in(folder, f"{GROUP}: {point.name}")
    return places


# -- one file ----------------------------------------------------------------------------------------------


def _read(place: _Place, through: tuple[str, ...] = ()) -> Table:
    """Read and check a file, and those that it extends. through: the files that extend it."""
    return _TableReader(place, through).table()


class _TableReader:
    """Reads one table. Its errors name the file and, as far as it can be found, the line."""

    def __init__(self, place: _Place, through: tuple[str, ...]) -> None:
        self._place = place
        self._file = f"families/{place.path.name}" if place.source == PACKAGE else str(place.path)
        self._through = (*through, str(place.path))
        try:
            text = place.path.read_text(encoding="utf-8")
            self._values: dict[str, object] = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(
                f"{self._file} is no TOML: {error}.", hint="Keys with dots or braces need quotes."
            ) from None
        self._lines = text.split("\n")

    def table(self) -> Table:
        values = dict(self._values)
        types = self._texts("model_types", values.pop("model_types", []))
        about = self._text("about", values.pop("about", ""))
        engine = self._texts("engine", values.pop("engine", []))
        extends = values.pop("extends", [])
        names = [extends] if isinstance(extends, str) else self._texts("extends", extends)
        bases = [self._base(name) for name in names]
        links = [read(self, key, values.pop(key)) if key in values else () for key, read in _LINKS.items()]
        for base in reversed(bases):
            links = [mine or theirs for mine, theirs in zip(links, base[-len(_LINKS) :], strict=True)]
        mine = {key: self._section(key, rules) for key, rules in values.items()}
        sections: Sections = {}
        for more in [*(base.sections for base in bases), mine]:
            for key, rules in more.items():
                sections[key] = {**sections.get(key, {}), **rules}
        name = self._place.path.name.removesuffix(".toml")
        empty = Table._field_defaults.values()
        links = [link or default for link, default in zip(links, empty, strict=True)]
        table = Table._make([name, self._file, self._place.source, about, types, engine, sections, *links])
        # The package's own are checked by a test, and not by every process.
        for key, rules in mine.items() if self._place.source != PACKAGE else ():
            self._check(key, rules, table)
        return table

    def _base(self, name: str) -> Table:
        """Read a table that this one extends: of its own folder, or else of the package."""
        beside = _names(self._place.beside)
        found = beside.get(name)
        if found is not None and str(found) != str(self._place.path):
            if str(found) in self._through:
                raise self._error("extends", f"{name!r} extends this table itself", "Remove one of the two.")
            return _read(self._place._replace(path=found), self._through)
        packaged = _names(_tables_in(_FOLDER))
        if name not in packaged:
            near = nearest(name, [*beside, *packaged])
            raise self._error(
                "extends", f"there is no table {name!r}", f"The nearest is {near!r}." if near else ""
            )
        return _packaged(name)

    def _section(self, key: str, rules: object) -> dict[str, str]:
        if not isinstance(rules, dict):
            near = nearest(key, (*_TOP, *_LINKS))
            raise self._error(
                key,
                f"{key!r} is no key of a table",
                f"The nearest is {near!r}." if near else f"These are {', '.join((*_TOP, *_LINKS))}.",
            )
        if not key.endswith("*"):
            raise self._error(key, f"the section {key!r} does not end with *", f'Write ["{key}*"].')
        return self._pairs(key, rules)

    def _check(self, section: str, rules: Mapping[str, str], table: Table) -> None:
        """Check the entries of a section, which this table may have in common with those that it extends."""
        whole = table.sections[section]
        if (within := rules.get("within")) is not None and within not in table.sections:
            near = nearest(within, table.sections)
            hint = f"The nearest is {near!r}." if near else ""
            raise self._error("within", f"there is no section {within!r}", hint, section)
        prefix = whole.get("published", "*")
        if not prefix.endswith("*"):
            raise self._error(
                "published", f"{prefix!r} does not end with *", f"Write {prefix + '*'!r}.", section
            )
        for key, rule in rules.items():
            if key not in LINKS:
                where = f"{self._at(key, section)}, {key!r}"
                parsed = parse(rule, where)
                # A table that only others extend may leave the prefix to them.
                if table.model_types or "published" in whole:
                    self._check_holes(section[:-1] + key, prefix, parsed, where, table.further)

    def _check_holes(self, ours: str, prefix: str, rule: Rule, where: str, further: Sequence[str]) -> None:
        """Raise BadInput for placeholders that can't be filled in, and for entries by which all layers or
        experts would be one published tensor."""
        mine = set(_HOLES.findall(ours))
        if not mine <= _OURS:
            raise BadInput(
                f"{where}: {ours!r} has {_braced(mine - _OURS)}.", hint="Write {layer} or {expert}."
            )
        alternatives = [rule] if rule.otherwise is None else [rule, rule.otherwise]
        for one in alternatives:
            for name in one.names:
                theirs = set(_HOLES.findall(prefix + name))
                theirs = {_BEHIND.get(hole, hole) for hole in theirs}
                if not theirs <= mine:
                    raise BadInput(
                        f"{where}: {name!r} has {_braced(theirs - mine)}, and our name has not.",
                        hint="Write it into both names, or into neither.",
                    )
                lost = mine - theirs
                if one.way.startswith("of_experts"):  # all experts of a layer in one tensor
                    lost -= {"expert"}
                if ours.startswith(tuple(further)):  # there may be one such layer
                    lost -= {"layer"}
                if lost:
                    raise BadInput(
                        f"{where}: our name has {_braced(lost)}, and {name!r} has not: all of them would be "
                        "this one tensor.",
                        hint="Write it into the published name, or into the section's published prefix.",
                    )

    # -- values ------------------------------------------------------------------------------------

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self._error(key, f"{key!r} is no text", f'Write {key} = "...".')
        return value

    def _texts(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._error(key, f"{key!r} is no list of texts", f'Write {key} = ["..."].')
        return tuple(value)

    def _pairs(self, key: str, value: object) -> dict[str, str]:
        if not isinstance(value, dict):
            raise self._error(key, f"{key!r} is no table of texts", f'Write {key} = {{ "..." = "..." }}.')
        for name, text in value.items():
            if not isinstance(text, str):
                raise self._error(name, f"{name!r} is no text", f'Write "{name}" = "...".', key)
        return value

    def _list_of_pairs(self, key: str, value: object) -> tuple[dict[str, str], ...]:
        if not isinstance(value, list):
            raise self._error(key, f"{key!r} is no list", f'Write {key} = [{{ "..." = "..." }}].')
        return tuple(self._pairs(key, one) for one in value)

    def _error(self, key: str, sentence: str, hint: str, section: str = "") -> BadInput:
        return BadInput(f"{self._at(key, section)}: {sentence}.", hint=hint)

    def _at(self, key: str, section: str = "") -> str:
        """Return the file and the line of a key; tomllib tells no lines."""
        start = self._line(f'["{section}"]', 0) if section else 0
        line = self._line(f'"{key}"', start) or self._line(key, start) or self._line(f'["{key}"]', start)
        return f"{self._file}, line {line}" if line else self._file

    def _line(self, first: str, start: int) -> int:
        """Return the number of the first line after `start` that begins so; 0 if there is none."""
        found = (
            number for number, line in enumerate(self._lines[start:], start + 1) if line.startswith(first)
        )
        return next(found, 0)


_TOP = ("about", "model_types", "engine", "extends")
_LINKS: dict[str, Callable[[_TableReader, str, object], object]] = {
    "contains": _TableReader._text,
    "inside": _TableReader._list_of_pairs,
    "outside": _TableReader._pairs,
    "unchanged": _TableReader._pairs,
    "further": _TableReader._texts,
    "unused": _TableReader._texts,
    "layer_types": _TableReader._pairs,
    "language_model": _TableReader._text,
}
"""Keys of a table besides _TOP and its sections, and what reads their values: fields of `Table`."""


def _braced(holes: Iterable[str]) -> str:
    return listed([f"{{{hole}}}" for hole in sorted(holes)], str)
