"""torch.distributed.checkpoint with other insides: `import holdfast.dcp as dcp` is the switch.

`save`, `load`, `async_save`, and the deprecated `save_state_dict` and `load_state_dict`, are ours. Every
other public name is torch's own. From this import on, torch's own reader also reads Holdfast folders.
"""

from typing import TYPE_CHECKING, Any

from holdfast._integrations.dcp import async_save, load, load_state_dict, save, save_state_dict
from holdfast._integrations.dcp_reader import HoldfastReader, readable_by_torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "HoldfastReader",
    "async_save",
    "load",
    "load_state_dict",
    "save",
    "save_state_dict",
]
readable_by_torch()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'holdfast.dcp' has no attribute {name!r}")
    import torch.distributed.checkpoint as theirs
    from torch.distributed.checkpoint import state_dict_saver

    # What `async_save` takes and returns has no name in the package.
    return getattr(state_dict_saver if name.startswith("Async") else theirs, name)
