"""torch.distributed.checkpoint's calls, with their signatures: `import holdfast.dcp as dcp` is the switch."""

from holdfast._integrations.dcp import async_save, load, save

__all__ = ["async_save", "load", "save"]
