"""Refuses URLs as the folders of frameworks that write a part of a checkpoint by themselves, with `open`.

Megatron-LM's tracker, Megatron-Bridge's train state, and what trainers write beside the model would go into
a local folder named `s3:`, and the model into the bucket: half of a checkpoint in each place. Others would
write all of it into such a folder of each host. Each framework's description says where its folders are given
(`Framework.folders`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import chain

from holdfast._core.store.schemes import OURS
from holdfast._frameworks.frameworks import FRAMEWORKS
from holdfast.errors import BadInput

_LIGHTNING = ("lightning.", "lightning_fabric.", "pytorch_lightning.")
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
"""The strategies of Lightning that write to paths. It writes what others save by fsspec, to URLs, too."""
_URL = re.compile(rf"({'|'.join(OURS)}):/")
"""Also as pathlib leaves it, with one slash."""


def refuse_urls(place: str, given: Mapping[str, object]) -> None:
    """Raise BadInput if a guarded function would save to a URL, or load from one. given: its arguments, by
    name."""
    for folder in _folders(place, given):
        refuse_url(folder, place.partition(":")[2])


def refuse_url(folder: object, name: str) -> None:
    """Raise BadInput for the URL of an object store, given to a framework's function."""
    text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    found = _URL.match(text) if isinstance(text, str) else None
    if found is not None:
        scheme = found[1]
        raise BadInput(
            f"{name} got a {scheme}:// place, but this framework writes a part of a checkpoint by itself, to "
            f"paths: it would lie in a local folder named '{scheme}:'. Nothing was written.",
            hint="Give a path, or save to the URL by holdfast.save or holdfast.Checkpoints.",
        )


def _folders(place: str, given: Mapping[str, object]) -> Iterator[object]:
    if place.startswith("megatron.training."):
        arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        yield getattr(arguments, "save" if "save" in place else "load", None)
    if place.startswith(_LIGHTNING):
        strategies = (_at(f"self.{one}", given) for one in ("_strategy", "strategy", "trainer.strategy"))
        names = {kind.__name__ for strategy in strategies for kind in type(strategy).__mro__}
        if not names.isdisjoint(_SHARDED):
            yield from (given.get(name) for name in ("path", "filepath", "checkpoint_path"))
    for beginning, paths in chain.from_iterable(framework.folders.items() for framework in FRAMEWORKS):
        for path in paths if place.startswith(beginning) else ():
            yield next((found for one in path.split(" or ") if (found := _at(one, given)) is not None), None)


def _at(path: str, given: Mapping[str, object]) -> object:
    first, *attributes = path.split(".")
    value = given.get(first)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value
