"""Export of an adapter from a checkpoint of a model that PEFT has wrapped, to a folder that PEFT loads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import closing

import numpy as np
import torch

from holdfast._core.base.values import amount
from holdfast._core.existing.target import checkpoint_at
from holdfast._core.format.container import encode_header
from holdfast._core.format.names import is_weight
from holdfast._core.io.missing_files import reading
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.io.raw_read import slabs
from holdfast._core.io.small_files import read_file
from holdfast._core.layout.box import whole
from holdfast._core.layout.tensor import DTYPES, TENSOR, TensorSpec, counted, listed
from holdfast._core.loading.boxes import Wanted, read_boxes
from holdfast._core.store.base import Folder, storage_errors
from holdfast._core.store.filesystem import make_durably
from holdfast._core.store.local import open_local, open_store
from holdfast._core.store.pins import Pin
from holdfast._models.conversion.folder import put_files
from holdfast._models.huggingface.export import ExportReport
from holdfast._models.huggingface.whole_files import WholeFiles
from holdfast._models.views import hub_format as hf
from holdfast._models.views.adapter import ADAPTER_WEIGHTS, PREFIX, Adapter, file_name
from holdfast._models.views.adapter_config import AdapterConfig, read_adapter_config
from holdfast.errors import BadInput, MissingTensors

_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<which>[AB])(?:\.weight)?")


def export_adapter(
    source: Folder, out: str | os.PathLike[str], *, like: Folder, name: str = "default"
) -> ExportReport:
    """Write the adapter of a model that PEFT has wrapped to a folder that `PeftModel.from_pretrained` loads.

    One process reads it from a checkpoint of the model's state, which ranks may have saved in any layout
    (`holdfast.save(model.state_dict(), ...)`). Elements stay as they are stored.

    source: a checkpoint of Holdfast or torch DCP, or a run folder (its newest step). Of its names, those from
        `base_model.model.` on count; optimizer state is not read.
    out: a folder without an adapter. like: a folder with the adapter's `adapter_config.json`, which is copied
        (`model.peft_config["default"].save_pretrained(like)` writes it). If it holds weights, the names and
        shapes must be the same.
    name: the name of the adapter in the model.

    Raises BadInput for arguments, a method other than LoRA, and a checkpoint without this adapter;
    MissingTensors for parts of it that are missing; NotCommitted, CorruptCheckpoint and StorageError.
    """
    store, configured, target = checkpoint_at(source), open_store(like), open_local(out, "holdfast.export")
    config = read_adapter_config(configured)
    said = read_file(configured, hf.ADAPTER_CONFIG) or b""
    if taken := {hf.ADAPTER_CONFIG, ADAPTER_WEIGHTS} & {*target.list()}:
        raise BadInput(f"{target.url} holds {min(taken)} already.", hint="Export into a new folder.")
    with closing(Pin(store)), open_source(store) as opened:
        names = [one for one in opened.names() if is_weight(one)]
        stored = _by_file_name(names, name, config, store.url)
        specs = {spec.name: spec for spec in opened.select(np.sort(opened.find([*stored.values()]))).specs()}
        tensors = {key: specs[stored[key]] for key in sorted(stored)}
        _check(tensors, config, store.url)
        if configured.stat(ADAPTER_WEIGHTS) is not None:
            _compare(tensors, Adapter(configured), store.url)
        is_new = target.stat() is None
        with storage_errors("Making", target.url):
            make_durably(target.root)
        file, position = WholeFiles(target.root).create(ADAPTER_WEIGHTS), 0
        try:
            header = _header(tensors)
            file.write_at(0, [header])
            for spec in tensors.values():
                for box in slabs(whole(spec.shape), DTYPES[spec.dtype].size):
                    with reading(store, opened.identity):
                        (part,), _ = read_boxes(store, opened, [Wanted(spec, box, spec.dtype)])
                    data = part.reshape(-1).view(torch.uint8).numpy().data
                    file.write_at(len(header) + position, [data])
                    position += len(data)
        except BaseException:
            file.discard()
            if is_new:
                target.remove()
            raise
        file.finish()
        put_files(target, {hf.ADAPTER_CONFIG: said})
        step = opened.about.get("step")
    return ExportReport(target.url, step if isinstance(step, int) else None, len(tensors), position, 1)


def _by_file_name(names: Iterable[str], name: str, config: AdapterConfig, where: str) -> dict[str, str]:
    """Return the stored name of each tensor of the adapter, by its name in the adapter's file."""
    found: dict[str, str] = {}
    for stored in names:
        key = file_name(stored, name, config.bias)
        if key is not None and found.setdefault(key, stored) != stored:
            raise BadInput(
                f"{where} holds both {found[key]!r} and {stored!r}, for one tensor of the adapter."
            )
    if not any(map(_MATRIX.fullmatch, found)):
        raise BadInput(
            f"{where} holds no matrices of an adapter {name!r}: none of its names is as "
            f"'{PREFIX}...lora_A.{name}.weight'.",
            hint="Save the state_dict() of the model that PEFT has wrapped; name= is the adapter's name.",
        )
    return found


def _check(tensors: Mapping[str, TensorSpec], config: AdapterConfig, where: str) -> None:
    """Raise MissingTensors for half an adapter, BadInput for matrices that the configuration does not fit."""
    for key, spec in tensors.items():
        match = _MATRIX.fullmatch(key)
        if spec.kind != TENSOR or spec.dtype not in hf.TAG_OF_CODE:
            raise BadInput(f"{where} holds {key!r} in a form that no adapter has.", details={"tensor": key})
        if match is None:
            continue
        first, other = (("A", "B"), ("B", "A"))[match["which"] == "B"]
        partner = key.replace(
            f"lora_{match['embedding'] or ''}{first}", f"lora_{match['embedding'] or ''}{other}"
        )
        missing = [partner] if partner not in tensors else []
        magnitude = f"{match['module']}.lora_magnitude_vector"
        missing += [magnitude] if config.use_dora and magnitude not in tensors else []
        if missing:
            raise MissingTensors(
                f"{where} holds {key!r} and not {missing[0]!r}: the adapter is not all there.",
                details={"missing": missing},
            )
        rank, side = config.rank(match["module"].removeprefix(PREFIX)), first == "B"
        # Of parameters, whose patterns have other names, a matrix has the ranks of all experts.
        if not config.parameters and (len(spec.shape) != 2 or spec.shape[side] != rank):
            raise BadInput(
                f"{where} holds {key!r} with shape {list(spec.shape)}, and {config.where} says that its rank "
                f"is {rank}.",
                hint="like= is a folder with the configuration of this adapter.",
                details={"tensor": key},
            )


def _compare(tensors: Mapping[str, TensorSpec], like: Adapter, where: str) -> None:
    """Raise MissingTensors or BadInput if the adapter of the folder `like` has other names or shapes."""
    theirs = {name: place.shape for name in like.weights.names() if (place := like.weights.place(name))}
    missing = sorted(theirs.keys() - tensors.keys())
    # PEFT also saves a copy of the base model's embedding beside an adapter of it.
    if missing := [one for one in missing if ".base_layer." not in one]:
        raise MissingTensors(
            f"{where} has nothing for {amount(len(missing), 'tensor')} of {like.url}: {counted(missing)}.",
            details={"missing": missing[:100]},
        )
    other = [key for key, spec in tensors.items() if theirs.get(key) != spec.shape]
    if other:
        raise BadInput(
            f"{where} holds {listed(other)}, which {like.url} holds with another shape or not at all.",
            hint="like= is a folder with the configuration of this adapter; it needs no weights.",
        )


def _header(tensors: Mapping[str, TensorSpec]) -> bytes:
    rows, start = [], 0
    for key, spec in tensors.items():
        stop = start + whole(spec.shape).volume * DTYPES[spec.dtype].size
        rows.append((key, hf.TAG_OF_CODE[spec.dtype], spec.shape, start, stop))
        start = stop
    return encode_header(rows, {"format": "pt"})
