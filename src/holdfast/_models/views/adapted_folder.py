"""The folder of a published model, together with an adapter that is merged into its weights."""

from __future__ import annotations

from typing import cast

from holdfast._core.base.deadline import Deadline
from holdfast._core.store.base import Folder, Reader, Store, bounded, open_at
from holdfast._core.store.local import open_store
from holdfast._models.views.adapter import ADAPTER_WEIGHTS, Adapter
from holdfast.errors import BadInput


class AdaptedFolder:
    """A store of the base model's files that has an adapter, which published models notice."""

    def __init__(self, base: Store, adapter: Adapter, weights: Store) -> None:
        """weights: the folder of the adapter."""
        self.base, self.adapter, self._weights = base, adapter, weights

    def __getattr__(self, name: str) -> object:
        return getattr(self.base, name)

    def open(self, path: str, first: int = 0) -> Reader:
        # The adapter's own tensors are read in a load like others, into a model that PEFT has wrapped.
        return open_at(self._weights if path == ADAPTER_WEIGHTS else self.base, path, first)

    def bounded(self, deadline: Deadline) -> Store:
        """Return the same folder as a store whose calls end by a deadline."""
        return cast(
            Store, AdaptedFolder(bounded(self.base, deadline), self.adapter, bounded(self._weights, deadline))
        )


def merged(base: Folder, adapter: Folder) -> Store:
    """Return the folder of a published model with an adapter (LoRA, as PEFT writes it) merged into it.

    Give it to `holdfast.load`, `holdfast.megatron.load`, `holdfast.same`, `holdfast.open` or
    `holdfast.huggingface.import_` like a folder. The weights are merged as they are read: each rank computes
    only the elements that it reads, in any layout, and holds besides only the adapter's two matrices for the
    tensor. The bits are those of PEFT's `merge_and_unload` on a CPU, of a model in the dtype of the state.
    A state with PEFT's own names (`get_peft_model(...).state_dict()`) gets the base model's weights and the
    adapter's, not merged.

    base: the folder of the published model, or of an import of it. adapter: the folder that PEFT's
        `save_pretrained` wrote, or `export_adapter`.

    Raises BadInput for a folder without an adapter, pickled weights, another method than LoRA or DoRA,
    variants of these, and a base that has an adapter already. A load raises BadInput or ShapeMismatch for an
    adapter of another model.
    """
    store, weights = open_store(base), open_store(adapter)
    if (first := getattr(store, "adapter", None)) is not None:  # its files are those without that adapter
        raise BadInput(
            f"{store.url} has the adapter {first.url} merged into it already, and a folder takes "
            "one adapter.",
            hint="Write the first merge (holdfast.huggingface.import_), and merge the second into that.",
        )
    return cast(Store, AdaptedFolder(store, Adapter(weights), weights))
