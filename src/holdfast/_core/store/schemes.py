"""Stores by the scheme of a URL: our own, and those of installed packages.

A package offers a store by an entry point of the group `holdfast.stores`: its name is the scheme, and its
object is called with the URL and returns a `holdfast.interfaces.Store`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, cast

from holdfast._core.base.values import told
from holdfast._core.store.base import Store
from holdfast.errors import HoldfastError, StorageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "holdfast.stores"
# By name, so that they are imported when they are used. Without a look at entry points, because the writer
# process sees no metadata of packages.
OURS = dict.fromkeys(("s3", "gs", "az"), "holdfast._core.store.objects:open_objects")


VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "AZURITE_")
"""How the names of environment variables begin that our own stores read."""


def environment() -> dict[str, str]:
    """Return the variables that our own stores read: addresses, regions and credentials."""
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


def set_environment(variables: dict[str, str]) -> None:
    """Give this process the variables of another one."""
    for name in environment().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _offered() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and only other packages' stores need it

    return {point.name: point for point in entry_points(group=GROUP)}


def takes(scheme: str) -> bool:
    """Return whether there is a store for this scheme, and what it needs is installed."""
    if scheme not in OURS:
        return scheme in _offered()
    with suppress(ImportError):
        return bool(import_module("obstore"))
    return False


def store_at(scheme: str, url: str) -> Store:
    """Return the store at a URL. Raises StorageError if none takes this scheme."""
    if scheme in OURS:
        module, _, name = OURS[scheme].partition(":")
        return cast("Callable[[str], Store]", getattr(import_module(module), name))(url)
    offered = _offered()
    if scheme not in offered:
        # Not the whole URL, which may hold a password.
        known = ", ".join(f"{name}://" for name in sorted({*OURS, *offered}))
        raise StorageError(
            f"There is no store for {scheme}:// places here; there are {known} and plain paths.",
            hint=f"A package can offer one, by an entry point of the group {GROUP}.",
        )
    try:
        return cast("Store", offered[scheme].load()(url))
    except HoldfastError:
        raise
    except Exception as error:
        raise StorageError(
            f"The store for {scheme}:// places, {offered[scheme].value}, could not be opened: {told(error)}"
        ) from error
