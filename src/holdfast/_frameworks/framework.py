"""What `install` has to know of a framework. Each framework's folder describes it once, as `FRAMEWORK`.

Neither this module nor those descriptions import torch or a framework: `holdfast doctor` and `holdfast run`
read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Framework:
    """A framework, and the functions of it that `install` replaces and guards."""

    name: str
    """Its name in `install(framework=)`."""
    distribution: str
    """Its name on PyPI, for its version; empty if it has none."""
    package: str
    """The package whose import shows that the framework is in use."""
    guards: tuple[str, ...] = ()
    """`module:qualified name` of functions that wait: saves, loads, and the end of asynchronous saves. A name
    that the installed version does not have is no error."""
    told_by: tuple[str, ...] = ()
    """Arguments of the guarded functions, or their attributes, that identify a call: they differ between
    calls, and are the same on all ranks. The first one present is used."""
    paths_differ: bool = False
    """Whether ranks may give a guarded function different paths: it takes rank 0's, or each host has a disk
    of its own. Then paths can't identify a call."""
    folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where its functions, by the beginning of their place, find the folders that it writes to by itself:
    arguments, and attributes of them; after `or`, if the first is None. A URL there is refused."""
    patches: str = ""
    """The module whose `replacements(settings)` yields the functions to be replaced; `install` imports it."""
    uses: tuple[str, ...] = ()
    """Frameworks that it calls; `install` changes them, too."""
    tested: tuple[str, ...] | None = None
    """Versions whose functions the tests call (docs/megatron.md says how). None: `holdfast doctor` does not
    list it, because it is a part of other frameworks."""
