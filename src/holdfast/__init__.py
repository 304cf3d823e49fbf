"""Holdfast: checkpoints and process groups that do not hang, for any training with PyTorch.

    import holdfast

    holdfast.save(state, "run/step-100")      # no collective; durable on return
    holdfast.load(state, "run/step-100")      # in place, any layout, every byte verified
    holdfast.open("run/step-100")["w"][3:5]   # any part of any tensor, without a state

    ckpt = holdfast.Checkpoints("run/", keep=3)
    ckpt.restore(state)                       # newest committed step, or None
    ckpt.save(step, state)

    holdfast.install()                        # the frameworks of this process do the same, unchanged

    holdfast.same("run/step-100", "run/step-200")  # the same weights? any layouts, any formats

Integrations are `holdfast.dcp`, `holdfast.huggingface`, `holdfast.megatron` and `holdfast.megatron_fsdp`.
Errors are in `holdfast.errors`, event callbacks in `holdfast.events`, interfaces for your own storage and
message store in `holdfast.interfaces`, and test tools in `holdfast.testing`.
Importing holdfast imports next to nothing until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast._core.base.collector import collector_paused
from holdfast._core.io import register_format as _register_format

if TYPE_CHECKING:
    from holdfast._core.background.async_save import async_save
    from holdfast._core.background.pending import Pending
    from holdfast._core.base.options import Options
    from holdfast._core.io import Opener
    from holdfast._core.layout.grid import Grid
    from holdfast._core.loading.load import load
    from holdfast._core.loading.request import LoadReport
    from holdfast._core.loading.stored_checkpoint import open as open  # noqa: A004
    from holdfast._core.protocol.job import Job
    from holdfast._core.run.checkpoints import Checkpoints
    from holdfast._core.run.preemption import Preemption
    from holdfast._core.run.train_state import TrainState
    from holdfast._core.saving.job import SaveReport, save
    from holdfast._core.state.optimizer import get_state_dict, set_state_dict
    from holdfast._core.state.tensors import PerRank, Shard
    from holdfast._core.store.run_folder import latest
    from holdfast._frameworks.guard import guarded
    from holdfast._frameworks.install import install, installed, uninstall
    from holdfast._frameworks.session import session
    from holdfast._groups.audit.audit import audit
    from holdfast._groups.lifecycle.open import open_groups
    from holdfast._groups.lifecycle.warm_up import warm_up
    from holdfast._models.equality.fingerprints import fingerprint
    from holdfast._models.equality.same import same
    from holdfast._version import __version__ as __version__

_WHERE = {
    "Checkpoints": "holdfast._core.run.checkpoints",
    "Grid": "holdfast._core.layout.grid",
    "Job": "holdfast._core.protocol.job",
    "LoadReport": "holdfast._core.loading.request",
    "Options": "holdfast._core.base.options",
    "Pending": "holdfast._core.background.pending",
    "PerRank": "holdfast._core.state.tensors",
    "Preemption": "holdfast._core.run.preemption",
    "SaveReport": "holdfast._core.saving.job",
    "Shard": "holdfast._core.state.tensors",
    "TrainState": "holdfast._core.run.train_state",
    "__version__": "holdfast._version",
    "async_save": "holdfast._core.background.async_save",
    "audit": "holdfast._groups.audit.audit",
    "fingerprint": "holdfast._models.equality.fingerprints",
    "get_state_dict": "holdfast._core.state.optimizer",
    "guarded": "holdfast._frameworks.guard",
    "install": "holdfast._frameworks.install",
    "installed": "holdfast._frameworks.install",
    "latest": "holdfast._core.store.run_folder",
    "load": "holdfast._core.loading.load",
    "open": "holdfast._core.loading.stored_checkpoint",
    "open_groups": "holdfast._groups.lifecycle.open",
    "same": "holdfast._models.equality.same",
    "save": "holdfast._core.saving.job",
    "session": "holdfast._frameworks.session",
    "set_state_dict": "holdfast._core.state.optimizer",
    "uninstall": "holdfast._frameworks.install",
    "warm_up": "holdfast._groups.lifecycle.warm_up",
}
_MODULES = (
    "dcp",
    "engine",
    "errors",
    "events",
    "huggingface",
    "interfaces",
    "megatron",
    "megatron_fsdp",
    "testing",
)
"""Submodules that load on first use. Some are left out of `__all__`: the Megatron modules need megatron-core,
which `from holdfast import *` must not import. `open` is left out because it would hide the builtin."""

__all__ = [
    "Checkpoints",
    "Grid",
    "Job",
    "LoadReport",
    "Options",
    "Pending",
    "PerRank",
    "Preemption",
    "SaveReport",
    "Shard",
    "TrainState",
    "async_save",
    "audit",
    "dcp",
    "errors",
    "events",
    "fingerprint",
    "get_state_dict",
    "guarded",
    "install",
    "installed",
    "latest",
    "load",
    "open_groups",
    "same",
    "save",
    "session",
    "set_state_dict",
    "testing",
    "uninstall",
    "warm_up",
]


def _published_models() -> Opener:
    # Here: only a folder without a Holdfast checkpoint needs it.
    from holdfast._models.views.sources import open_published

    return open_published


_register_format(_published_models)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        # Imports free nothing; with torch loaded, one garbage collection doubles their time.
        with collector_paused():
            value = getattr(import_module(_WHERE[name]), name)
        # Python calls `__getattr__` only for missing attributes, so each name is looked up once.
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
