"""Functions of other packages replaced by ours, now or when their module is imported, and put back.

A function is found where it is defined. Modules that have bound it by `from ... import` are found through
`sys.modules` and get the new one, too; whatever else still holds the old one (a closure, a `partial`, an
instance) is reported, because nothing can replace it there.
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
"""Makes what replaces a function from that function."""
F = TypeVar("F")


@dataclass(frozen=True)
class Replacement:
    """One function of another package, and what takes its place."""

    module: str
    """The module that defines it."""
    name: str
    """Its name there; of a method with its class, `DistributedOptimizer.load_state_dict`."""
    part: str
    """What it belongs to; parts can be switched off (`install`)."""
    make: Make
    optional: bool = False
    """Some versions do not have it, and nothing is missed then."""
    adds: bool = False
    """It is a name that the package calls if it is there, and does not define itself."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Replaced:
    """What became of a replacement in this process."""

    replacement: Replacement
    target: object
    """The module or class whose attribute it is."""
    attribute: str
    before: object
    """What stood in the target itself; `_ABSENT` if it came from a base class or was not there."""
    original: object
    new: object
    bound: list[str] = field(default_factory=list)
    """Other modules in which the name was bound, and is replaced."""
    holders: list[str] = field(default_factory=list)
    """Who still holds the original."""


_ABSENT = object()
ORIGINAL = "holdfast_original"
"""The attribute of a replacement that holds what it replaced."""


class Patches:
    """The replacements of one `install`. Modules that are not imported yet are patched when they are."""

    def __init__(self) -> None:
        self.done: list[Replaced] = []
        self.missing: list[Replacement] = []
        """Their module is there and has no such name."""
        self._wanted: dict[str, list[Replacement]] = {}
        self._active = True
        # Reentrant: making a replacement may import another module that is waited for.
        self._lock = threading.RLock()

    def begin(self, replacements: Iterable[Replacement]) -> None:
        """Replace what is imported already; the rest follows at its import."""
        for replacement in replacements:
            self._wanted.setdefault(replacement.module, []).append(replacement)
        for module in self._wanted:
            # A module that is there already is handed over at once. A hook stays for good: see `_active`.
            wrapt.register_post_import_hook(self._on_import, module)
        # Only for what was imported before: modules to come bind the new functions by themselves.
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
            # The hook of an installation that was taken back.
            if not self._active:
                return
            known = {id(done.replacement) for done in self.done}
            for replacement in self._wanted.get(module.__name__, ()):
                if id(replacement) in known:
                    continue  # the module is imported anew (importlib.reload)
                try:
                    self._replace(module, replacement)
                except Exception as error:  # an import of theirs must not fail because of us
                    self.missing.append(replacement)
                    log.warning("%s could not be replaced: %s: %s", replacement, type(error).__name__, error)

    def _replace(self, module: types.ModuleType, replacement: Replacement) -> None:
        *path, attribute = replacement.name.split(".")
        target: object = module
        for part in path:
            target = getattr(target, part, None)
        # Statically: getattr would bind a classmethod, and `_made` has to see that it is one.
        raw = inspect.getattr_static(target, attribute, None) if target is not None else None
        if target is None or (raw is None and not replacement.adds):
            if not replacement.optional:
                self.missing.append(replacement)
            return
        if replacement.adds and raw is not None:
            return  # this version has one itself
        # A method of a base class is put into the derived one; undoing it must not leave it there.
        before = vars(target).get(attribute, _ABSENT)
        new = _made(raw, replacement.make)
        setattr(target, attribute, new)
        done = Replaced(replacement, target, attribute, before, raw, new)
        self.done.append(done)

    def undo(self) -> None:
        """Put back what was replaced, also where the new function was bound since."""
        with self._lock:
            self._active = False
            # Backwards, because two replacements may have had the same name.
            for done in reversed(self.done):
                if done.before is _ABSENT:
                    delattr(done.target, done.attribute)
                else:
                    setattr(done.target, done.attribute, done.before)
            _rebind([(done.new, done.original) for done in self.done if done.original is not None])
            self.done.clear()


def _made(raw: object, make: Make) -> object:
    """The replacement of what stands in a module or class; a static or class method stays one."""
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(make(raw.__func__))
    new = make(raw)  # type: ignore[arg-type]
    setattr(new, ORIGINAL, raw)
    return new


def original_of(function: F) -> F:
    """What a function replaced, or the function itself."""
    while hasattr(function, ORIGINAL):
        function = getattr(function, ORIGINAL)
    return function


def _rebind(pairs: list[tuple[object, object]]) -> list[tuple[object, str]]:
    """Replace, in every module, each first of a pair by its second; what was replaced, and where."""
    new_of = {id(old): (old, new) for old, new in pairs}
    found: list[tuple[object, str]] = []
    # Copies, of this and of each namespace: another thread may import into them meanwhile.
    modules: dict[str, object] = dict(sys.modules)  # some packages put other objects there
    for name, module in modules.items():
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            new = value
            while id(new) in new_of:  # one replacement may have replaced another
                new = new_of[id(new)][1]
            if new is not value:
                setattr(module, key, new)
                found.append((value, f"{name}.{key}"))
    return found


def _find_holders(late: list[Replaced]) -> None:
    """Say who holds an original where it can't be replaced: closures, partials, attributes of instances.

    Each `gc.get_referrers` looks at all objects of the process, so it is asked once for all originals, and
    again only for the few holders that can't be told by themselves.
    """
    originals = {id(done.original): done for done in late if isinstance(done.original, types.FunctionType)}
    # What holds an original on our side: this bookkeeping, and each replacement with its closure.
    ours = {id(late), *map(id, late), *(id(vars(done)) for done in late)}
    for done in late:
        new = done.new.__func__ if isinstance(done.new, staticmethod | classmethod) else done.new
        ours |= {id(new), id(vars(new)), *map(id, getattr(new, "__closure__", None) or ())}
    for holder in gc.get_referrers(*(done.original for done in originals.values())):
        said = None if id(holder) in ours else _describe_holder(holder)
        for held in gc.get_referents(holder) if said is not None else ():
            if id(held) in originals and said is not None:
                originals[id(held)].holders.append(said)
    for done in late:
        if done.holders:
            log.warning(
                "%s was bound before install(), and %s still calls the original. Call install() before that.",
                done.replacement,
                ", ".join(sorted(set(done.holders))),
            )


def _describe_holder(holder: object) -> str | None:
    """What holds a function, in some words; None for what a replacement or the interpreter holds."""
    if isinstance(holder, functools.partial):
        return "a functools.partial"
    if isinstance(holder, types.MethodType):
        return f"a bound method of {type(holder.__self__).__qualname__}"
    if isinstance(holder, types.CellType):
        closures = [closure for closure in gc.get_referrers(holder) if isinstance(closure, tuple)]
        owners = gc.get_referrers(*closures) if closures else []
        functions = [owner for owner in owners if isinstance(owner, types.FunctionType)]
        # A replacement of an earlier install, or of ours that another one replaced, is no stranger.
        strangers = [function for function in functions if not hasattr(function, ORIGINAL)]
        return f"the closure {strangers[0].__module__}.{strangers[0].__qualname__}" if strangers else None
    if isinstance(holder, dict) and "__name__" not in holder and "__module__" not in holder:
        for owner in gc.get_referrers(holder):
            if getattr(owner, "__dict__", None) is holder and not isinstance(owner, types.FunctionType):
                return _instance(owner)
    # Since 3.11 an instance may hold its attributes itself, without a dict.
    plain = isinstance(holder, _NO_INSTANCES) or not type(holder).__dictoffset__
    return None if plain else _instance(holder)


_NO_INSTANCES = (dict, tuple, list, set, type, types.ModuleType, types.FunctionType, types.FrameType)


def _instance(owner: object) -> str:
    return f"an instance of {type(owner).__module__}.{type(owner).__qualname__}"
