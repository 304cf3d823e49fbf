"""The folder that a conversion writes: additional files, such as configuration, tokenizer and code of a
model, and leftovers of an interrupted call.

Names of data files contain a label of the conversion, by which a repeated call recognises them. It starts
again, and at its end deletes the files of interrupted calls. No index can refer to these: the index, which
comes last, is put in place only if there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from holdfast._core.base.values import amount
from holdfast._core.existing.comparing import check_files
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.index import Index
from holdfast._core.format.names import DATA
from holdfast._core.io.small_files import read_file
from holdfast._core.store.base import FOLDERS, Store, replace_file
from holdfast._core.store.publishing import HIDDEN
from holdfast._models.views import hub_format as hf
from holdfast._models.views.published_model import read_config
from holdfast.errors import BadInput, HoldfastError

log = logging.getLogger("holdfast")


def read_files(base: Store, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of the files that exist."""
    contents = ((name, read_file(base, name, hf.WEIGHTS_INDEX_BYTES)) for name in names)
    return {name: data for name, data in contents if data is not None}


def carried(base: Store, change: Callable[[dict[str, object]], dict[str, object]] = dict) -> dict[str, bytes]:
    """Return the files that belong to a model besides its weights. change: converts the configuration."""
    files = read_files(base, filter(hf.is_carried, base.list()))
    config = read_config(base) or {}
    if (changed := change(config)) != config and hf.CONFIG in files:
        files[hf.CONFIG] = msgspec.json.format(msgspec.json.encode(changed), indent=2)
    return files


def put_files(out: Store, files: Mapping[str, bytes]) -> None:
    """Put these files in place."""
    for name, data in files.items():
        replace_file(out, name, data)


def put_missing(out: Store, files: Mapping[str, bytes]) -> None:
    """Put those of these files in place that are not there."""
    put_files(out, {name: data for name, data in files.items() if out.stat(name) is None})


def check_finished(out: Store, index: Index, what: str) -> None:
    """Raise CorruptCheckpoint if data files of a finished conversion are no longer there, or not whole.

    what: the conversion, such as "import". Their bytes are not read: whoever loads them verifies them.
    """
    sizes = index.column("file_size").tolist()
    check_files(
        out,
        zip(index.file_names(), sizes, strict=True),
        embedded=True,
        so=f"is what this {what} wrote, and damaged since",
        hint=f"Remove the folder, and {what} again.",
    )


def refuse_changed(out: Store, files: Mapping[str, bytes]) -> None:
    """Raise BadInput if `put_files` would replace a file by another content."""
    for name, data in files.items():
        if read_file(out, name, hf.WEIGHTS_INDEX_BYTES) not in (None, data):
            raise BadInput(
                f"{out.url} holds another {name} than this call writes.", hint="Give a new folder."
            )


def label_of(*what: object) -> str:
    """Return a short digest of the values."""
    return hex_digest(digest(repr(what).encode()))


def left_in(out: Store, is_mine: Callable[[str], bool], known: Collection[str], what: str) -> list[str]:
    """Return the leftovers of an interrupted call. Raises BadInput if the folder holds anything else.

    is_mine: whether a path is that of such a file. known: names of files of the call that are complete.
    """
    entry = out.stat()
    if entry is not None and entry.kind not in FOLDERS:
        raise BadInput(f"{out.url} is a file; {what} goes into a new folder.")
    paths = [name for name in out.list() if name != f"{DATA}/"] + [
        f"{DATA}/{name}" for name in out.list(DATA)
    ]
    left = list(filter(is_mine, paths))
    others = [path for path in paths if not (is_mine(path) or path in known or path.startswith(HIDDEN))]
    if others:
        raise BadInput(
            f"{out.url} holds {others[0]!r}; {what} goes into a new folder.",
            hint="Or into that of the same call, with the same arguments, that was interrupted.",
        )
    return left


def delete(out: Store, paths: Sequence[str]) -> None:
    """Delete leftovers of interrupted calls; log a warning about those that storage does not delete."""
    errors = list[HoldfastError]()
    for path in paths:
        try:
            out.delete(path)
        except HoldfastError as error:
            errors.append(error)
    if errors:
        log.warning(
            "%s left by an interrupted call in %s could not be deleted: %s The same call again tries again.",
            amount(len(errors), "file"),
            out.url,
            errors[0].message,
        )
