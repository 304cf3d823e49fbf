"""Holdfast: checkpoints that do not hang, for mixture-of-experts training with PyTorch.

    import holdfast

    holdfast.save(state, "run/step-100")      # no collective; durable on return
    holdfast.load(state, "run/step-100")      # in place, any layout, every byte verified

    ckpt = holdfast.Checkpoints("run/", keep=3)
    ckpt.restore(state)                       # newest committed step, or None
    ckpt.save(step, state)

Errors are in `holdfast.errors`, what happens is told to `holdfast.events`, and test tools are
in `holdfast.testing`. Importing holdfast imports nothing else until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.adapters.optimizer import get_state_dict, set_state_dict
    from holdfast.adapters.tensors import PerRank, Shard
    from holdfast.errors import HoldfastError
    from holdfast.flow.async_save import async_save
    from holdfast.flow.checkpoints import Checkpoints
    from holdfast.flow.load import LoadReport, load
    from holdfast.flow.pending import Pending
    from holdfast.flow.preemption import Preemption
    from holdfast.flow.retention import latest
    from holdfast.flow.save import SaveReport, save
    from holdfast.groups.audit import audit
    from holdfast.groups.open import open_groups
    from holdfast.groups.session import session
    from holdfast.groups.warm_up import warm_up
    from holdfast.layout.grid import Grid
    from holdfast.options import Options
    from holdfast.version import __version__ as __version__

_WHERE = {
    "Checkpoints": "holdfast.flow.checkpoints",
    "Grid": "holdfast.layout.grid",
    "HoldfastError": "holdfast.errors",
    "LoadReport": "holdfast.flow.load",
    "Options": "holdfast.options",
    "Pending": "holdfast.flow.pending",
    "PerRank": "holdfast.adapters.tensors",
    "Preemption": "holdfast.flow.preemption",
    "SaveReport": "holdfast.flow.save",
    "Shard": "holdfast.adapters.tensors",
    "__version__": "holdfast.version",
    "async_save": "holdfast.flow.async_save",
    "audit": "holdfast.groups.audit",
    "get_state_dict": "holdfast.adapters.optimizer",
    "latest": "holdfast.flow.retention",
    "load": "holdfast.flow.load",
    "open_groups": "holdfast.groups.open",
    "save": "holdfast.flow.save",
    "session": "holdfast.groups.session",
    "set_state_dict": "holdfast.adapters.optimizer",
    "warm_up": "holdfast.groups.warm_up",
}
_MODULES = ("dcp", "errors", "events", "testing")

__all__ = [
    "Checkpoints",
    "Grid",
    "HoldfastError",
    "LoadReport",
    "Options",
    "Pending",
    "PerRank",
    "Preemption",
    "SaveReport",
    "Shard",
    "async_save",
    "audit",
    "dcp",
    "errors",
    "events",
    "get_state_dict",
    "latest",
    "load",
    "open_groups",
    "save",
    "session",
    "set_state_dict",
    "testing",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
