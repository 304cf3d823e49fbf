"""Replacing functions of other packages by ours, now or when their module is imported, and putting them back.

A function is replaced where it is defined. Modules that have bound it by `from ... import` are found through
`sys.modules` and get the new one, too. Other objects that still hold the old one (a closure, a `partial`, an
instance) are reported, because it can't be replaced there.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import wrapt

log = logging.getLogger("holdfast")
Make = Callable[[Callable[..., object]], Callable[..., object]]
"""Takes the original function, and returns its replacement."""
F = TypeVar("F")


@dataclass(frozen=True)
class Replacement:
    """One function of another package, and how to make its replacement."""

    module: str
    """The module that defines it."""
    name: str
    """Its name there; for a method with the class, as in `DistributedOptimizer.load_state_dict`."""
    part: str
    """The part of `install` that it belongs to; parts can be switched off."""
    make: Make
    optional: bool = False
    """Some versions do not have it; then it is not reported as missing."""
    adds: bool = False
    """The package calls this name if it exists, and does not define it itself."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Replaced:
    """A replacement that was made in this process."""

    replacement: Replacement
    target: object
    """The module or class whose attribute it is."""
    attribute: str
    before: object
    """The value in the target itself; `_ABSENT` if it came from a base class or did not exist."""
    original: object
    new: object
    bound: list[str] = field(default_factory=list)
    """Other modules that had bound the function, as `module.name`; it is replaced there, too."""
    holders: list[str] = field(default_factory=list)
    """Objects that still hold the original."""


_ABSENT = object()
ORIGINAL = "holdfast_original"
"""The attribute of a replacement that holds the original."""


class Patches:
    """The replacements of one `install`. Modules that are not imported yet are patched at their import."""

    def __init__(self) -> None:
        self.done: list[Replaced] = []
        self.missing: list[Replacement] = []
        """Replacements whose module is imported and has no such name."""
        self._wanted: dict[str, list[Replacement]] = {}
        self._active = True
        # Reentrant: making a replacement may import another module that is waited for.
        self._lock = threading.RLock()

    def begin(self, replacements: Iterable[Replacement]) -> None:
        """Replace functions of imported modules now, and of others at their import."""
        for replacement in replacements:
            self._wanted.setdefault(replacement.module, []).append(replacement)
        for module in self._wanted:
            # For an imported module the hook runs at once. Hooks can't be removed: see `_active`.
            wrapt.register_post_import_hook(self._on_import, module)
        # Only for modules that were imported before: later ones bind the new functions by themselves.
        late = [done for done in self.done if done.original is not None]
        if late:
            by_original = {id(done.original): done for done in late}
            for original, place in _rebind([(done.original, done.new) for done in late]):
                by_original[id(original)].bound.append(place)
            _find_holders(late)

    @property
    def waiting(self) -> list[str]:
        """Modules that are not imported yet."""
        return [module for module in self._wanted if module not in sys.modules]

    def _on_import(self, module: types.ModuleType) -> None:
        with self._lock:
            # This hook belongs to an installation that was undone.
            if not self._active:
                return
            known = {id(done.replacement) for done in self.done}
            for replacement in self._wanted.get(module.__name__, ()):
                if id(replacement) in known:
                    continue  # the module is imported again (importlib.reload)
                try:
                    self._replace(module, replacement)
                except Exception as error:  # a framework's import must not fail because of Holdfast
                    self.missing.append(replacement)
                    log.warning("%s could not be replaced: %s: %s", replacement, type(error).__name__, error)

    def _replace(self, module: types.ModuleType, replacement: Replacement) -> None:
        *path, attribute = replacement.name.split(".")
        target: object = module
        for part in path:
            target = getattr(target, part, None)
        # Statically, because getattr would bind a classmethod, and `_made` must see that it is one.
        raw = inspect.getattr_static(target, attribute, None) if target is not None else None
        if target is None or (raw is None and not replacement.adds):
            if not replacement.optional:
                self.missing.append(replacement)
            return
        if replacement.adds and raw is not None:
            return  # this version defines it itself
        # A method of a base class is replaced in the derived class; `undo` must remove it there.
        before = vars(target).get(attribute, _ABSENT)
        new = _made(raw, replacement.make)
        setattr(target, attribute, new)
        done = Replaced(replacement, target, attribute, before, raw, new)
        self.done.append(done)

    def undo(self) -> None:
        """Put the originals back, also in modules that have bound a new function since."""
        with self._lock:
            self._active = False
            # In reverse order, because two replacements may have the same name.
            for done in reversed(self.done):
                if done.before is _ABSENT:
                    delattr(done.target, done.attribute)
                else:
                    setattr(done.target, done.attribute, done.before)
            _rebind([(done.new, done.original) for done in self.done if done.original is not None])
            self.done.clear()


def _made(raw: object, make: Make) -> object:
    """Make the replacement of a function; a static or class method stays one."""
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(make(raw.__func__))
    new = make(raw)  # type: ignore[arg-type]
    setattr(new, ORIGINAL, raw)
    return new


def original_of(function: F) -> F:
    """Return the original of a replaced function, or the function itself."""
    while hasattr(function, ORIGINAL):
        function = getattr(function, ORIGINAL)
    return function


def _rebind(pairs: list[tuple[object, object]]) -> list[tuple[object, str]]:
    """Replace old by new in all modules, for each pair; return each replaced value and its place."""
    new_of = {id(old): (old, new) for old, new in pairs}
    replaced: list[tuple[object, str]] = []
    # Copies of this dict and of each namespace, because another thread may import meanwhile.
    modules: dict[str, object] = dict(sys.modules)  # some packages put other objects there
    for name, module in modules.items():
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            new = value
            while id(new) in new_of:  # a replacement may itself be replaced
                new = new_of[id(new)][1]
            if new is not value:
                setattr(module, key, new)
                replaced.append((value, f"{name}.{key}"))
    return replaced


def _find_holders(late: list[Replaced]) -> None:
    """Warn of objects that hold an original and can't be changed: closures, partials, instances.

    Each `gc.get_referrers` looks at all objects of the process, so it is called once for all originals, and
    again only for the few holders that can't be described by themselves.
    """
    originals = {id(done.original): done for done in late if isinstance(done.original, types.FunctionType)}
    # Holders that are ours: these records, and each replacement with its closure.
    ours = {id(late), *map(id, late), *(id(vars(done)) for done in late)}
    for done in late:
        new = done.new.__func__ if isinstance(done.new, staticmethod | classmethod) else done.new
        ours |= {id(new), id(vars(new)), *map(id, getattr(new, "__closure__", None) or ())}
    for holder in gc.get_referrers(*(done.original for done in originals.values())):
        description = None if id(holder) in ours else _describe_holder(holder)
        for referent in gc.get_referents(holder) if description is not None else ():
            if id(referent) in originals and description is not None:
                originals[id(referent)].holders.append(description)
    for done in late:
        if done.holders:
            log.warning(
                "%s was bound before install(), and %s still calls the original. Call install() before that.",
                done.replacement,
                ", ".join(sorted(set(done.holders))),
            )


def _describe_holder(holder: object) -> str | None:
    """Describe the holder of a function; None for a holder of ours or of the interpreter."""
    if isinstance(holder, functools.partial):
        return "a functools.partial"
    if isinstance(holder, types.MethodType):
        return f"a bound method of {type(holder.__self__).__qualname__}"
    if isinstance(holder, types.CellType):
        closures = [closure for closure in gc.get_referrers(holder) if isinstance(closure, tuple)]
        owners = gc.get_referrers(*closures) if closures else []
        functions = [owner for owner in owners if isinstance(owner, types.FunctionType)]
        # Replacements of an earlier install, or those that another one has replaced, are ours.
        strangers = [function for function in functions if not hasattr(function, ORIGINAL)]
        return f"the closure {strangers[0].__module__}.{strangers[0].__qualname__}" if strangers else None
    if isinstance(holder, dict) and "__name__" not in holder and "__module__" not in holder:
        for owner in gc.get_referrers(holder):
            if getattr(owner, "__dict__", None) is holder and not isinstance(owner, types.FunctionType):
                return _instance(owner)
    # Since Python 3.11 an instance may hold its attributes itself, without a dict.
    plain = isinstance(holder, _NO_INSTANCES) or not type(holder).__dictoffset__
    return None if plain else _instance(holder)


_NO_INSTANCES = (dict, tuple, list, set, type, types.ModuleType, types.FunctionType, types.FrameType)


def _instance(owner: object) -> str:
    return f"an instance of {type(owner).__module__}.{type(owner).__qualname__}"
