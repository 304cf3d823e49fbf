"""Holdfast: checkpoints that do not hang, for mixture-of-experts training with PyTorch.

    import holdfast

    holdfast.save(state, "run/step-100")      # no collective; durable on return
    holdfast.load(state, "run/step-100")      # in place, any layout, every byte verified

    ckpt = holdfast.Checkpoints("run/", keep=3)
    ckpt.restore(state)                       # newest committed step, or None
    ckpt.save(step, state)

    holdfast.install()                        # the frameworks of this process do the same, unchanged

    holdfast.same("run/step-100", "run/step-200")  # the same weights? any layouts, any formats

Integrations are `holdfast.dcp`, `holdfast.huggingface`, `holdfast.megatron` and `holdfast.megatron_fsdp`.
Errors are in `holdfast.errors`, what happens is told to `holdfast.events`, and test tools are in
`holdfast.testing`.
Importing holdfast imports nothing else until a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.background.async_save import async_save
    from holdfast.background.pending import Pending
    from holdfast.errors import HoldfastError
    from holdfast.groups.audit.audit import audit
    from holdfast.groups.lifecycle.open import open_groups
    from holdfast.groups.lifecycle.warm_up import warm_up
    from holdfast.groups.session.session import session
    from holdfast.integrations.guard import guarded
    from holdfast.integrations.install import install, installed, uninstall
    from holdfast.layout.grid import Grid
    from holdfast.loading.job import LoadReport, load
    from holdfast.maintenance.fingerprints import fingerprint
    from holdfast.maintenance.same import same
    from holdfast.options import Options
    from holdfast.run.checkpoints import Checkpoints
    from holdfast.run.preemption import Preemption
    from holdfast.saving.job import SaveReport, save
    from holdfast.state.optimizer import get_state_dict, set_state_dict
    from holdfast.state.tensors import PerRank, Shard
    from holdfast.store.latest import latest
    from holdfast.version import __version__ as __version__

_WHERE = {
    "Checkpoints": "holdfast.run.checkpoints",
    "Grid": "holdfast.layout.grid",
    "HoldfastError": "holdfast.errors",
    "LoadReport": "holdfast.loading.job",
    "Options": "holdfast.options",
    "Pending": "holdfast.background.pending",
    "PerRank": "holdfast.state.tensors",
    "Preemption": "holdfast.run.preemption",
    "SaveReport": "holdfast.saving.job",
    "Shard": "holdfast.state.tensors",
    "__version__": "holdfast.version",
    "async_save": "holdfast.background.async_save",
    "audit": "holdfast.groups.audit.audit",
    "fingerprint": "holdfast.maintenance.fingerprints",
    "get_state_dict": "holdfast.state.optimizer",
    "guarded": "holdfast.integrations.guard",
    "install": "holdfast.integrations.install",
    "installed": "holdfast.integrations.install",
    "latest": "holdfast.store.latest",
    "load": "holdfast.loading.job",
    "open_groups": "holdfast.groups.lifecycle.open",
    "same": "holdfast.maintenance.same",
    "save": "holdfast.saving.job",
    "session": "holdfast.groups.session.session",
    "set_state_dict": "holdfast.state.optimizer",
    "uninstall": "holdfast.integrations.install",
    "warm_up": "holdfast.groups.lifecycle.warm_up",
}
_MODULES = ("dcp", "errors", "events", "huggingface", "megatron", "megatron_fsdp", "testing")
"""Those of Megatron are not in `__all__`: they need megatron-core, and `from holdfast import *` must not."""

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
        value = getattr(import_module(_WHERE[name]), name)
        # Python asks `__getattr__` only for what is not there, so a name is looked up once.
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
