"""A published model, by whatever file holds its tensors: its configuration, and its view."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Self

from holdfast._core.io.small_files import read_file
from holdfast._core.io.source import ForeignSource
from holdfast._core.layout.tensor import Dims
from holdfast._core.store.base import Store
from holdfast._models.views import hub_format as hf
from holdfast._models.views.family import (
    View,
    as_published,
    is_known,
    is_tied,
    language_model,
    output_and_embedding,
    view_of,
)
from holdfast._models.views.packed_form import PackedForm, packed_form
from holdfast._models.views.quantized import BYTES, IN_8_BITS, PACKED, is_read, is_scale, scales_of
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from holdfast._models.views.adapter import Adapter, Change

_PACKED = ("qweight", f"weight{PACKED}")
"""Names that replace `weight` in a quantized module: by GPTQ and AWQ; by compressed-tensors."""


QUANTIZATION = "quantization_config"
"""Key of a configuration."""


class PublishedModel(ForeignSource):
    """A published model, complete or in part, and its configuration. Its subclasses are sources of loads."""

    where: str
    merges = 1
    """How often the adapter is merged into the weights, if there is one."""

    is_wrapped = False
    """Does a load ask for the adapter's own tensors, by the names of a model that PEFT has wrapped?"""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.adapter: Adapter | None = getattr(store, "adapter", None)
        """Merged into the weights as they are read."""

    @abstractmethod
    def place(self, name: str) -> hf.Place | None:
        """Return the position, dtype and shape of a tensor; None if there is none of that name."""

    @abstractmethod
    def read_rows(self, name: str, rows: tuple[int, int] | None = None) -> bytes:
        """Return the bytes of a small tensor, or of the `(first, count)` of its rows along the last axis.
        Thread-safe."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors."""

    @cached_property
    def config(self) -> dict[str, object]:
        """Content of `config.json`; empty if there is none."""
        return read_config(self._store) or {}

    @cached_property
    def changes(self) -> Mapping[str, Sequence[Change]]:
        """The published tensors that the adapter changes, and how. BadInput or ShapeMismatch if it is of
        another model."""
        return self.adapter.changes(self) if self.adapter is not None and self.merges else {}

    def merging(self, times: int) -> Self:
        """Return the same model with its adapter merged so often."""
        other = copy(self)
        other.__dict__.pop("changes", None)
        other.merges = times
        return other

    @cached_property
    def view(self) -> View:
        """The model in the names and shapes of megatron-core. BadInput if the model is unknown."""
        return view_of(self.config, f"{self._store.url}/{hf.CONFIG}", self.has, shape=self.shape)

    def view_for(self, name: str) -> View:
        """Return the view that has one of our names: of a model without a table, it has few. BadInput if no
        table contains the model."""
        if self.view_if_known is None:
            view = as_published(self.config, f"{self._store.url}/{hf.CONFIG}", self.has)
            if view.knows(name):
                return view
        return self.view

    def shape(self, name: str) -> Dims | None:
        """Return the shape of a tensor, of its elements if they are packed; None if there is none of that
        name."""
        packed, place = self.packed(name), self.place(name)
        if packed is not None:
            return packed.shape
        return None if place is None else place.shape

    def packed(self, name: str) -> PackedForm | None:
        """Return how the elements of a tensor are packed along its rows; None if they are not."""
        return packed_form(name, self.place, self.quantization)

    @property
    def quantization(self) -> object:
        return quantization_of(self.config)

    @property
    def tied(self) -> tuple[str, str] | None:
        """The output layer and the embedding, if both are stored, and the configuration ties them."""
        names = output_and_embedding(self.config, self.has)
        return names if is_tied(self.config) and all(map(self.has, names)) else None

    @property
    def view_if_known(self) -> View | None:
        """The view; None if no table contains the model, or it has no configuration."""
        return self.view if is_known(language_model(self.config)) else None

    def is_weight(self, name: str) -> bool:
        if self.adapter is not None and self.is_wrapped and name in self.adapter.trained:
            return False
        return not is_scale(name, self._is_quantized) and not hf.is_constant(name)

    def _is_quantized(self, name: str) -> bool:
        place = self.place(name)
        if place is None:
            return self.has(name + PACKED)
        return place.code == IN_8_BITS or (place.code in BYTES and scales_of(name, self.has) is not None)

    def unnamed(self, names: Iterable[str]) -> list[str]:
        """Return which of these published weights the model's table does not name; none without a table, or
        if they are in a quantized form that Holdfast does not read.

        Of a model that has no table itself, and contains a known language model, only names of that count.
        """
        view = self.view_if_known
        if view is None or not is_read(self.quantization):
            return []
        inner = view.outer is None and language_model(self.config) is not self.config
        return [
            name
            for name in names
            if self.is_weight(name)
            and not view.names(name)
            and (not inner or view.is_of_language_model(name))
        ]

    def refuse_quantized(self, name: str) -> None:
        """Raise BadInput if the folder has a weight only in a quantized form that Holdfast does not read."""
        module = name.removesuffix("weight")
        packed = next((module + ending for ending in _PACKED if self.has(module + ending)), "")
        if self.packed(name) is not None:
            return
        said = self.quantization
        method = said.get("quant_method") if isinstance(said, dict) else None
        if packed or (not is_read(said) and self.has(name)):
            raise BadInput(
                f"{self.where} holds {packed or name!r} quantized by {method or 'GPTQ or AWQ'}, which "
                f"Holdfast does not read.",
                hint="Give the folder of the model before it was quantized; its README mostly names it "
                "(base_model).",
                details={"tensor": name, "quantized": method or ""},
            )


def quantization_of(config: Mapping[str, object]) -> object:
    """Return what a configuration says of quantized weights, or that of its language model (Kimi K2.5); None
    if both say nothing."""
    return (config if QUANTIZATION in config else language_model(config)).get(QUANTIZATION)


def read_config(store: Store) -> dict[str, object] | None:
    """Return the content of a folder's `config.json`; None if there is none."""
    data = read_file(store, hf.CONFIG, hf.CONFIG_BYTES)
    return None if data is None else hf.decode(data, dict[str, object], f"{store.url}/{hf.CONFIG}")
