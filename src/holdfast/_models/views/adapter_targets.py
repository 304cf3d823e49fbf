"""Modules of a published model that an adapter should have matrices for, and has not. No torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from holdfast._core.base.values import amount
from holdfast._core.layout.tensor import counted
from holdfast._models.views.adapter_config import AdapterConfig
from holdfast._models.views.published_model import PublishedModel

log = logging.getLogger("holdfast")

_WEIGHT = ".weight"
_NUMBER = re.compile(r"\d+")


def tell_left_out(url: str, config: AdapterConfig, base: PublishedModel, changed: Collection[str]) -> bool:
    """Log a warning about such modules. Return whether there are any. url: of the adapter."""
    left = _left_out(config, base, changed)
    if left:
        log.warning(
            "The adapter %s has no matrices for %s of %s that its target_modules name: %s. Their weights "
            "stay as they are there.",
            url,
            amount(len(left), "module"),
            base.where,
            counted(left),
        )
    return bool(left)


def _left_out(config: AdapterConfig, base: PublishedModel, changed: Collection[str]) -> list[str]:
    """Return the modules that the configuration names and whose weights do not change, though those of the
    same place in another layer do: an adapter of some ranks' layers only is like this.

    changed: the names of the published tensors that change. Modules that PEFT does not wrap, such as experts
    that transformers keeps in one tensor, change in no layer, so they do not count; nor do layers that
    predict further tokens, which transformers does not have.
    """
    view = base.view_if_known
    if view is None:  # its last layers may be such layers
        return []
    places = {_NUMBER.sub("*", name) for name in changed if name.endswith(_WEIGHT)}
    return [
        name.removesuffix(_WEIGHT)
        for name in base.names()
        if name.endswith(_WEIGHT)
        and name not in changed
        and _NUMBER.sub("*", name) in places
        and config.names(name.removesuffix(_WEIGHT))
        and not view.predicts_further(name)
    ]
