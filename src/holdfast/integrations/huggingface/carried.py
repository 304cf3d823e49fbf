"""Files that are copied with the weights of a published model: configuration, tokenizer, code."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast.errors import BadInput
from holdfast.format import hugging_face as hf
from holdfast.io.hugging_face import read_config
from holdfast.io.small_files import read_file
from holdfast.store.base import Store, replace_file

_ENDINGS = (".json", ".txt", ".model", ".py", ".jinja", ".md", ".tiktoken")


def is_carried(name: str) -> bool:
    """Return whether a file of a published model's folder is copied with its weights."""
    return name.endswith(_ENDINGS) and name != hf.WEIGHTS_INDEX and not name.startswith(".")


def carry(base: Store, out: Store, without: str = "") -> None:
    """Copy the files that go with the weights. without: a key of `config.json` that is left out."""
    for name, data in _carried(base, without):
        replace_file(out, name, data)


def refuse_changed(base: Store, out: Store, without: str = "") -> None:
    """Raise BadInput if `carry` would replace a file by another content."""
    there = set(out.list()) if out.stat() is not None else set()
    for name, data in _carried(base, without):
        if name in there and read_file(out, name, hf.WEIGHTS_INDEX_BYTES) != data:
            raise BadInput(
                f"{out.url} holds a {name} that is not the one of {base.url}.", hint="Give a new folder."
            )


def _carried(base: Store, without: str) -> Iterator[tuple[str, bytes]]:
    for name in base.list():
        data = read_file(base, name, hf.WEIGHTS_INDEX_BYTES) if is_carried(name) else None
        if data is not None and name == hf.CONFIG:
            config = read_config(base) or {}
            if config.pop(without, None) is not None:
                data = msgspec.json.format(msgspec.json.encode(config), indent=2)
        if data is not None:
            yield name, data
