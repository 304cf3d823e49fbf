"""Patches functions of other packages, now or when their module is imported, and restores them.

A function is replaced where it is defined. Modules that have bound it by `from ... import` are found through
`sys.modules` and get the new one, too. Other objects that bound the old one before (a closure, a `partial`,
an instance) still call it: so `install()` should be called first.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import wrapt

log = logging.getLogger("holdfast")
MakeReplacement = Callable[[Callable[..., object]], Callable[..., object]]
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
    make: MakeReplacement
    optional: bool = False
    """Some versions do not have it; then it is not reported as missing."""
    adds: bool = False
    """The package does not define this name, but calls it if it exists. Set `optional`, too."""
    imported: bool = False
    """The module imports this name from elsewhere; it is replaced in this module alone."""
    takes: Callable[[], Collection[str]] | None = None
    """Returns the arguments that the replacement handles; calls with others are refused or left to the
    original. None: all are passed on to the original."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class AppliedReplacement:
    """A replacement that was made in this process."""

    replacement: Replacement
    target: object
    """The module or class whose attribute it is."""
    attribute: str
    before: object
    """The value in the target itself; `_ABSENT` if it came from a base class or did not exist."""
    original: object
    """What other modules may have bound; None if these are to keep it."""
    new: object


_ABSENT = object()
ORIGINAL = "holdfast_original"
"""The attribute of a replacement that holds the original."""


class Patches:
    """The replacements of one `install`. Modules that are not imported yet are patched at their import."""

    def __init__(self) -> None:
        self.done: list[AppliedReplacement] = []
        self.missing: list[Replacement] = []
        """Replacements whose module is imported and has no such name."""
        self._wanted: dict[str, list[Replacement]] = {}
        self._active = True
        # Reentrant: making a replacement may import another module that has replacements.
        self._lock = threading.RLock()

    def begin(self, replacements: Iterable[Replacement]) -> None:
        """Replace functions of imported modules now, and of others at their import.

        Call `rebind` once all patches have begun.
        """
        for replacement in replacements:
            self._wanted.setdefault(replacement.module, []).append(replacement)
        for module in self._wanted:
            # For an imported module the hook runs at once. Hooks can't be removed: see `_active`.
            wrapt.register_post_import_hook(self._on_import, module)

    @property
    def waiting(self) -> list[str]:
        return [module for module in self._wanted if module not in sys.modules]

    def _on_import(self, module: types.ModuleType) -> None:
        with self._lock:
            # The installation of this hook was undone.
            if not self._active:
                return
            for replacement in self._wanted.get(module.__name__, ()):
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
        # This version lacks the function, or already defines the one to be added.
        if target is None or (raw is None) != replacement.adds:
            if not replacement.optional:
                self.missing.append(replacement)
            return
        # A method of a base class is replaced in the derived class; `undo` must remove it there.
        before = vars(target).get(attribute, _ABSENT)
        new = _made(raw, replacement.make)
        setattr(target, attribute, new)
        original = None if replacement.imported else raw
        self.done.append(AppliedReplacement(replacement, target, attribute, before, original, new))

    def put_back(self) -> list[tuple[object, object]]:
        """Restore the originals where they are defined. Return the (old, new) pairs to rebind elsewhere."""
        with self._lock:
            self._active = False
            # In reverse order, because two replacements may have the same name.
            for done in reversed(self.done):
                if done.before is _ABSENT:
                    delattr(done.target, done.attribute)
                else:
                    setattr(done.target, done.attribute, done.before)
            pairs = [(done.new, done.original) for done in self.done if done.original is not None]
            self.done.clear()
            return pairs


def _made(raw: object, make: MakeReplacement) -> object:
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


def undo(patches: Sequence[Patches]) -> None:
    """Restore the originals, also in modules that have bound a replacement since."""
    # In reverse order, because one replacement may wrap another, as a guard wraps a replaced save.
    _rebind([pair for one in reversed(patches) for pair in one.put_back()])


def rebind(patches: Iterable[Patches]) -> None:
    """Replace functions also in modules that have already bound them; later imports bind the new ones."""
    _rebind([(done.original, done.new) for one in patches for done in one.done if done.original is not None])


def _rebind(pairs: list[tuple[object, object]]) -> None:
    """Replace old by new in all modules, for each pair."""
    new_of = {id(old): new for old, new in pairs}
    # Copies of this dict and of each namespace, because another thread may import meanwhile.
    modules: dict[str, object] = dict(sys.modules)  # some packages put other objects there
    for module in modules.values() if pairs else ():
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            new = value
            while id(new) in new_of:  # a replacement may itself be replaced
                new = new_of[id(new)]
            if new is not value:
                setattr(module, key, new)
