"""`load(verify_integrity=True)`: checks the files of a stock megatron-core checkpoint by `integrity.json`.

Since 0.18, stock can save the SHA-256 of each file; its load has rank 0 read all of them and broadcasts the
result. Here each participant reads a share of the files, and all raise the same error if any finds damage. A
Holdfast checkpoint does not need this: a load verifies every byte that it reads.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing, suppress

from holdfast._core.base.threads import within
from holdfast._core.format.names import INDEX, INTEGRITY, METADATA
from holdfast._core.io.small_files import read_file
from holdfast._core.layout.tensor import listed
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.operation import agree
from holdfast._core.store.base import Store
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError

_PIECE = 16 << 20
"""Bytes per read."""


def check_integrity(store: Store, call: Call) -> None:
    """Raise CorruptCheckpoint on all participants if a file of a stock checkpoint has changed, and BadInput
    if that can't be checked because it was saved without `verify_integrity=True`."""
    found: dict[str, str] = {}

    def look() -> None:
        if store.stat(INDEX) is None:
            found.update(_differences(store, call))

    try:
        within(call.deadline.left(), f"reading the files of {store.url} for verify_integrity", look)
    except HoldfastError as error:  # share it with the other ranks, which raise it, too
        found = {"": str(error)}
    place = f"{store.url}|integrity"
    title = f"comparison of {store.url} with its {INTEGRITY}"
    everyones = agree(title, place, lambda by_rank: _merged(by_rank), call, found)
    unknown = everyones.pop("", None)
    if everyones:
        raise CorruptCheckpoint(
            f"{len(everyones)} files in {store.url} are not what {INTEGRITY} says: "
            f"{listed([f'{name} ({why})' for name, why in sorted(everyones.items())])}.",
            hint="Load another checkpoint.",
        )
    if unknown is not None:
        raise BadInput(f"verify_integrity=True: {unknown}")


def _merged(by_rank: dict[int, dict[str, str]]) -> dict[str, str]:
    return {name: why for _, found in sorted(by_rank.items()) for name, why in found.items()}


def _differences(store: Store, call: Call) -> dict[str, str]:
    """Return the problems in this rank's share of the files, by name; under "": why no check is possible."""
    data = read_file(store, INTEGRITY)
    if data is None:
        return {"": f"{store.url} has no {INTEGRITY}. It was saved without verify_integrity=True."}
    manifest: object = None
    with suppress(ValueError, RecursionError):
        manifest = json.loads(data)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not isinstance(manifest, dict) or manifest.get("algorithm") != "sha256":
        return {"": f"{INTEGRITY} in {store.url} is no list of SHA-256 digests."}
    there = [name for name in store.list() if name.endswith(".distcp") or name == METADATA]
    # An unlisted file that a load reads is a problem, too.
    names = sorted({*map(str, files), *there})
    wrong = {}
    for name in names[call.participants.index(call.rank) :: len(call.participants)]:
        if name not in files:
            wrong[name] = "it is not listed"
        elif (actual := _digest(store, name)) != files[name]:
            wrong[name] = "it is missing" if actual is None else "its SHA-256 is another one"
    return wrong


def _digest(store: Store, name: str) -> str | None:
    """Return the SHA-256 of a file, in hex; None if it does not exist."""
    if store.stat(name) is None:
        return None
    made = hashlib.sha256()
    with closing(store.open(name)) as reader:
        for start in range(0, reader.size, _PIECE):
            made.update(reader.read(start, min(_PIECE, reader.size - start)))
    return made.hexdigest()
