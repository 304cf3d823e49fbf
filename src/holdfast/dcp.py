"""A drop-in replacement for torch.distributed.checkpoint: `import holdfast.dcp as dcp`.

`save`, `load`, `async_save`, and the deprecated `save_state_dict` and `load_state_dict`, are Holdfast's.
Every other public name is torch's own. Importing this module also makes torch's FileSystemReader read
Holdfast folders.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holdfast._frameworks.torch_dcp.calls import async_save, load, load_state_dict, save, save_state_dict
from holdfast._frameworks.torch_dcp.reader import HoldfastReader, readable_by_torch

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

    if not hasattr(theirs, name) and find_spec(f"{theirs.__name__}.{name}") is not None:
        return import_module(f"{theirs.__name__}.{name}")  # torch's package imports only some of its modules
    # torch does not export the argument and return types of `async_save` from the package.
    return getattr(state_dict_saver if name.startswith("Async") else theirs, name)
