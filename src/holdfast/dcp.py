"""torch.distributed.checkpoint with other insides: `import holdfast.dcp as dcp` is the switch.

`save`, `load` and `async_save` are ours. Every other public name is torch's own.
"""

from typing import TYPE_CHECKING, Any

from holdfast._integrations.dcp import async_save, load, save

if TYPE_CHECKING:
    from holdfast._integrations.dcp_reader import HoldfastReader

__all__ = ["HoldfastReader", "async_save", "load", "save"]


def __getattr__(name: str) -> Any:
    if name == "HoldfastReader":
        from holdfast._integrations.dcp_reader import HoldfastReader

        return HoldfastReader
    if name.startswith("_"):
        raise AttributeError(f"module 'holdfast.dcp' has no attribute {name!r}")
    import torch.distributed.checkpoint as theirs

    return getattr(theirs, name)
