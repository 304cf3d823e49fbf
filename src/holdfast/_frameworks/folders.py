"""Refuses URLs as the folders of frameworks that write a part of a checkpoint by themselves, with `open`.

Megatron-LM's tracker and Megatron-Bridge's train state would go into a local folder named `s3:`, and the
model into the bucket: half of a checkpoint in each place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping

from holdfast._core.store.schemes import OURS
from holdfast.errors import BadInput

_ARGUMENTS = {
    "megatron.bridge": (
        "state.cfg.checkpoint.save",
        "state.cfg.checkpoint.load",
        "cfg.checkpoint.save",
        "ckpt_cfg.save",
        "path",
        "checkpoint_path",
    )
}
"""Where guarded functions of a package find their folders: arguments, and attributes of them."""


def refuse_urls(place: str, given: Mapping[str, object]) -> None:
    """Raise BadInput if a guarded function would save to a URL, or load from one. given: its arguments, by
    name."""
    for folder in _folders(place, given):
        refuse_url(folder, place.partition(":")[2])


def refuse_url(folder: object, name: str) -> None:
    """Raise BadInput for the URL of an object store, given to a framework's function."""
    text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    scheme = text.partition("://")[0] if isinstance(text, str) and "://" in text else ""
    if scheme in OURS:
        raise BadInput(
            f"{name} got a {scheme}:// place, but this framework writes a part of a checkpoint by itself, to "
            f"paths: it would lie in a local folder named '{scheme}:'. Nothing was written.",
            hint="Give a path, or save to the URL by holdfast.save or holdfast.Checkpoints.",
        )


def _folders(place: str, given: Mapping[str, object]) -> Iterator[object]:
    if place.startswith("megatron.training."):
        arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        yield getattr(arguments, "save" if "save" in place else "load", None)
    for package, paths in _ARGUMENTS.items():
        for path in paths if place.startswith(f"{package}.") else ():
            first, *attributes = path.split(".")
            value = given.get(first)
            for attribute in attributes:
                value = getattr(value, attribute, None)
            yield value
