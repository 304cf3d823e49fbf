"""What goes with the weights of a published model: configuration, tokenizer, code."""

from __future__ import annotations

import msgspec

from holdfast.format import hugging_face as hf
from holdfast.io.hugging_face import read_config
from holdfast.io.small_files import read_file
from holdfast.store.base import Store, replace_file

_ENDINGS = (".json", ".txt", ".model", ".py", ".jinja", ".md", ".tiktoken")


def is_carried(name: str) -> bool:
    """Is a file of a published model's folder copied with its weights?"""
    return name.endswith(_ENDINGS) and name != hf.WEIGHTS_INDEX and not name.startswith(".")


def carry(base: Store, out: Store, without: str = "") -> None:
    """Copy what goes with the weights from one folder to another. without: a key of `config.json` that is
    left out."""
    for name in base.list():
        data = read_file(base, name, hf.WEIGHTS_INDEX_BYTES) if is_carried(name) else None
        if data is not None and name == hf.CONFIG:
            config = read_config(base) or {}
            if config.pop(without, None) is not None:
                data = msgspec.json.format(msgspec.json.encode(config), indent=2)
        if data is not None:
            replace_file(out, name, data)
