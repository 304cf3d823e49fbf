"""The two sides of `same`: a checkpoint, a published model, or the fingerprints of a live state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import msgspec
import numpy as np
import torch

from holdfast._core.base.values import Message
from holdfast._core.existing.comparing import check_files
from holdfast._core.existing.target import checkpoint_at
from holdfast._core.format.columns import Columns
from holdfast._core.format.fingerprint import text_of
from holdfast._core.format.index import Index
from holdfast._core.format.names import is_weight
from holdfast._core.io.missing_files import reading
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.io.slice import Slice
from holdfast._core.io.source import Source
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import CODE_OF, DTYPES, OBJECT, TENSOR, TensorSpec
from holdfast._core.loading.boxes import Wanted, read_boxes
from holdfast._core.ready import ready
from holdfast._core.store.base import Folder, Store
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import Pin
from holdfast._models.equality.fingerprints import Fingerprint
from holdfast._models.equality.parts import EngineFingerprint, EnginePart
from holdfast._models.equality.rounding import Rounded
from holdfast._models.views import hub_format as hf
from holdfast._models.views.hugging_face import weights_file
from holdfast._models.views.packed_form import PackedForm
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.quantized import unpacked_name
from holdfast._models.views.sources import IndexedModel
from holdfast.errors import BadInput, NotCommitted

_VALUE = re.compile(r"[0-9a-f]{32}")
FolderOrFingerprints = Folder | Mapping[str, Fingerprint] | Message


class LiveSide:
    """A live state, known only by its fingerprints."""

    published = None

    def __init__(self, known: Mapping[str, Fingerprint]) -> None:
        self.where = "the live state"
        self.used: set[str] = set()
        self.prefix = ""
        self._known = known
        self._stored_name: dict[str, str] = {}

    def packed(self) -> dict[str, PackedForm]:
        return {}

    def refuse_quantized(self, names: Iterable[str]) -> None:
        """Do nothing: a state has no other forms of its tensors."""

    def objects(self) -> list[str]:
        return []

    def unpack(self, forms: Mapping[str, PackedForm]) -> None:
        """Do nothing: a state has no packed tensors."""

    def leave_out(self, prefix: str) -> None:
        """Leave out a prefix of names from now on."""
        self.prefix = prefix
        self._stored_name = {name.removeprefix(prefix): name for name in self._known}
        self._known = {name.removeprefix(prefix): one for name, one in self._known.items()}

    def stored_name(self, name: str) -> str:
        """Return a name with the prefix that was left out; also of a tensor that is not there."""
        return self._stored_name.get(name, self.prefix + name)

    def weights(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(name, CODE_OF[one.dtype], one.shape) for name, one in self._known.items()}

    def fingerprints(self) -> dict[str, str]:
        return {name: one.value for name, one in self._known.items()}

    def rounded(self, name: str, code: int) -> Rounded | None:
        """Return the fingerprint of a tensor in a less exact dtype, if known."""
        return self._known[name].rounded.get(DTYPES[code].name)

    @property
    def is_engine(self) -> bool:
        return any(isinstance(one, EngineFingerprint) for one in self._known.values())

    def parts(self, name: str) -> tuple[EnginePart, ...]:
        """Return the parts of a tensor by rank; () if the state is not an engine's."""
        known = self._known.get(name)
        return known.parts if isinstance(known, EngineFingerprint) else ()


@dataclass
class FolderSide:
    """A checkpoint, or a published model."""

    store: Store
    source: Source
    used: set[str] = field(default_factory=set)
    """Names of stored tensors that were read at least partly."""
    prefix: str = ""
    """What stored names begin with, and names of this side do not."""
    _stored_name: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        adapter = self.published.adapter if self.published is not None else None
        return self.store.url if adapter is None else f"{self.store.url} with {adapter.url}"

    @property
    def published(self) -> PublishedModel | None:
        return self.source if isinstance(self.source, PublishedModel) else None

    @cached_property
    def _columns(self) -> Columns:
        # With the scales of a published model, because elements mean nothing without them.
        names = [name for name in self.source.names() if is_weight(name) and not hf.is_constant(name)]
        return self.source.select(np.sort(self.source.find(names)))

    def weights(self) -> dict[str, TensorSpec]:
        """Return the specs of all weights, by name."""
        if not self._specs:
            raise BadInput(f"{self.store.url} holds no weights.")
        return self._specs

    @cached_property
    def _specs(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self._columns.specs() if spec.kind == TENSOR}

    def objects(self) -> list[str]:
        """Return the names of what is stored as an object."""
        return [spec.name for spec in self._columns.specs() if spec.kind == OBJECT]

    def packed(self) -> dict[str, PackedForm]:
        """Return how elements are packed, by the names of their tensors."""
        if (model := self.published) is None:
            return {}
        forms = {name: model.packed(name) for name in map(unpacked_name, self._specs)}
        return {name: form for name, form in forms.items() if form is not None}

    def refuse_quantized(self, names: Iterable[str]) -> None:
        """Raise BadInput if one of these is here in a quantized form that is not read: that is neither there,
        to be compared, nor missing."""
        if (model := self.published) is not None:
            for name in names:
                model.refuse_quantized(name)

    def unpack(self, forms: Mapping[str, PackedForm]) -> None:
        """From now on, have these tensors unpacked and multiplied by their scales."""
        for name, form in forms.items():
            for part in (form.stored.name, form.scales.name, f"{name}_shape"):
                self._specs.pop(part, None)
            self._specs[name] = TensorSpec(name, CODE_OF["float32"], form.shape)

    def leave_out(self, prefix: str) -> None:
        """Leave out a prefix of names from now on."""
        self.prefix = prefix
        self._stored_name = {name.removeprefix(prefix): name for name in self._specs}
        self._specs = {
            name: self._specs[stored]._replace(name=name) for name, stored in self._stored_name.items()
        }

    def stored_name(self, name: str) -> str:
        """Return a name with the prefix that was left out; also of a tensor that is not there."""
        return self._stored_name.get(name, self.prefix + name)

    def fingerprints(self) -> dict[str, str]:
        """Return the stored fingerprints by name."""
        index = self.source.index if isinstance(self.source, IndexedModel) else self.source
        known = index.fingerprints() if isinstance(index, Index) else {}
        if known:
            columns = self._columns
            used = np.unique(columns.file).tolist()
            files = [(columns.file_names[file], int(columns.file_size[file])) for file in used]
            check_files(self.store, files, embedded=True)
        changed = self.published.changes if self.published is not None else {}
        return {
            name.removeprefix(self.prefix): text_of(sums)
            for name, sums in known.items()
            if name not in changed
        }

    def merging(self, times: int) -> FolderSide:
        """Return the same published model with its adapter merged so often."""
        assert self.published is not None
        return FolderSide(self.store, cast(Source, self.published.merging(times)))

    def read(self, spec: TensorSpec, box: Box, dtype: int) -> torch.Tensor:
        spec = spec._replace(name=self.stored_name(spec.name))
        with reading(self.store, self.source.identity):
            (tensor,), used = read_boxes(self.store, self.source, [Wanted(spec, box, dtype)])
        self.used |= used | {unpacked_name(name) for name in used}
        return tensor


Side = LiveSide | FolderSide


def leads(side: Side, other: Side) -> bool:
    """Return whether a side that was given second is compared by its own names."""
    # A live state leads, because it determines what is read.
    if isinstance(side, LiveSide) or isinstance(other, LiveSide):
        return not isinstance(other, LiveSide)
    # Fused tensors don't have the names of what is published by parts, so the side that may have them leads.
    if other.published is None or side.published is None:
        return other.published is not None and side.published is None
    return _fused(side, other) > _fused(other, side)


def _fused(side: FolderSide, other: FolderSide) -> int:
    """Count the tensors of a published model that another one has by parts."""
    view, theirs = other.published.view_if_known if other.published is not None else None, other.weights()
    return 0 if view is None else sum(name not in theirs and view.knows(name) for name in side.weights())


def _fingerprints(place: Mapping[str, object]) -> Mapping[str, Fingerprint]:
    """Return fingerprints, which may be those of another process, decoded from JSON."""
    if all(isinstance(one, Fingerprint) for one in place.values()):
        return cast("Mapping[str, Fingerprint]", place)
    is_engines = any(isinstance(one, Mapping) and "parts" in one for one in place.values())
    kind: type[Fingerprint] = EngineFingerprint if is_engines else Fingerprint
    try:
        found: dict[str, Fingerprint] = msgspec.convert(place, ready(dict[str, kind]))  # type: ignore[valid-type]
    except msgspec.ValidationError:
        raise BadInput("A state is compared by what fingerprint(state) says of it.") from None
    for name, one in found.items():
        if not _is_valid(one):
            raise BadInput(
                f"The fingerprint of {name!r} can't be that of a tensor, by its dtype, shape or value.",
                hint="A state is compared by what fingerprint(state) says of it, unchanged.",
                details={"tensor": name},
            )
    return found


def _is_valid(known: Fingerprint) -> bool:
    """Return whether fingerprints of another process can be those of a tensor. Others equal nothing, which
    would be told as a difference."""
    is_engines = isinstance(known, EngineFingerprint)  # whose value is empty if its ranks differ
    values = [known.value, *(one.value for one in known.rounded.values())]
    return (
        {known.dtype, *known.rounded} <= CODE_OF.keys()
        and min(known.shape, default=0) >= 0
        and all(_VALUE.fullmatch(value) or (is_engines and not value) for value in values)
    )


def open_sides(a: FolderOrFingerprints, b: FolderOrFingerprints, opened: ExitStack) -> tuple[Side, Side]:
    """Open both places. Tensors that they do not hold packed in the same way are unpacked."""
    first, second = _open_side(a, opened), _open_side(b, opened)
    if isinstance(first, LiveSide) and isinstance(second, LiveSide):
        _tell_apart(first, second)
    forms = first.packed(), second.packed()
    for side, own, theirs in ((first, *forms), (second, *forms[::-1])):
        kinds = {name: form.kind for name, form in theirs.items()}
        side.unpack({name: form for name, form in own.items() if kinds.get(name) != form.kind})
    return first, second


def _tell_apart(first: LiveSide, second: LiveSide) -> None:
    """Give two live states names of their own, as they are given: both have no place."""
    if first.is_engine != second.is_engine:
        (first if first.is_engine else second).where = "the engine"
    else:
        first.where, second.where = "the first live state", "the second live state"


def _open_side(place: FolderOrFingerprints, opened: ExitStack) -> Side:
    if isinstance(place, Mapping):
        return LiveSide(_fingerprints(place))
    if hasattr(place, "state_dict"):
        raise BadInput("A state is compared by what fingerprint(state) says of it.")
    if isinstance(place, bytes) or (isinstance(place, str) and place.startswith('{"')):
        raise BadInput("Fingerprints as JSON are compared when they are decoded: json.loads(text).")
    store: Store = open_store(place)
    if weights_file(store) is None:
        with suppress(NotCommitted):
            store = checkpoint_at(place)  # of a run folder the newest step
    opened.enter_context(closing(Pin(store)))
    source = opened.enter_context(open_source(store))
    if isinstance(source, Slice):
        raise BadInput(
            f"{store.url} is what was fetched for {source.fetched_for}, a part of the weights.",
            hint="Compare the folder that it was fetched from.",
        )
    return FolderSide(store, source)
