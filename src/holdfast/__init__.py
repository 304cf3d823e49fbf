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
Importing holdfast imports nothing else until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast._background.async_save import async_save
    from holdfast._background.pending import Pending
    from holdfast._groups.audit.audit import audit
    from holdfast._groups.lifecycle.open import open_groups
    from holdfast._groups.lifecycle.warm_up import warm_up
    from holdfast._integrations.guard import guarded
    from holdfast._integrations.install import install, installed, uninstall
    from holdfast._integrations.session import session
    from holdfast._layout.grid import Grid
    from holdfast._loading.load import load
    from holdfast._loading.request import LoadReport
    from holdfast._loading.stored_checkpoint import open as open  # noqa: A004
    from holdfast._maintenance.fingerprints import fingerprint
    from holdfast._maintenance.same import same
    from holdfast._options import Options
    from holdfast._protocol.job import Job
    from holdfast._run.checkpoints import Checkpoints
    from holdfast._run.preemption import Preemption
    from holdfast._run.train_state import TrainState
    from holdfast._saving.job import SaveReport, save
    from holdfast._state.optimizer import get_state_dict, set_state_dict
    from holdfast._state.tensors import PerRank, Shard
    from holdfast._store.run_folder import latest
    from holdfast._version import __version__ as __version__

_WHERE = {
    "Checkpoints": "holdfast._run.checkpoints",
    "Grid": "holdfast._layout.grid",
    "Job": "holdfast._protocol.job",
    "LoadReport": "holdfast._loading.request",
    "Options": "holdfast._options",
    "Pending": "holdfast._background.pending",
    "PerRank": "holdfast._state.tensors",
    "Preemption": "holdfast._run.preemption",
    "SaveReport": "holdfast._saving.job",
    "Shard": "holdfast._state.tensors",
    "TrainState": "holdfast._run.train_state",
    "__version__": "holdfast._version",
    "async_save": "holdfast._background.async_save",
    "audit": "holdfast._groups.audit.audit",
    "fingerprint": "holdfast._maintenance.fingerprints",
    "get_state_dict": "holdfast._state.optimizer",
    "guarded": "holdfast._integrations.guard",
    "install": "holdfast._integrations.install",
    "installed": "holdfast._integrations.install",
    "latest": "holdfast._store.run_folder",
    "load": "holdfast._loading.load",
    "open": "holdfast._loading.stored_checkpoint",
    "open_groups": "holdfast._groups.lifecycle.open",
    "same": "holdfast._maintenance.same",
    "save": "holdfast._saving.job",
    "session": "holdfast._integrations.session",
    "set_state_dict": "holdfast._state.optimizer",
    "uninstall": "holdfast._integrations.install",
    "warm_up": "holdfast._groups.lifecycle.warm_up",
}
_MODULES = ("dcp", "errors", "events", "huggingface", "interfaces", "megatron", "megatron_fsdp", "testing")
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


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from holdfast._collector import collector_paused

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
