"""A checkpoint manager for torchtitan, since 0.3: `checkpoint=CheckpointManager.Config(enable=True)`.

torchtitan's own manager does the work: intervals, retention, which step to load, Hugging Face's format. Its
saves and loads go through Holdfast, and its waits have deadlines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from holdfast._core.protocol.job import Job
from holdfast._frameworks.install import install, is_installed

if TYPE_CHECKING:  # types are checked without torchtitan

    @dataclass(kw_only=True, slots=True)
    class TorchtitanConfig:
        enable: bool = False

    class TorchtitanManager:
        Config: TypeAlias = TorchtitanConfig

        def __init__(self, config: TorchtitanConfig, **components: object) -> None: ...

else:
    from torchtitan.components.checkpointer import CheckpointManager as TorchtitanManager


class CheckpointManager(TorchtitanManager):
    """torchtitan's `CheckpointManager` over Holdfast. The constructor calls `install()`, unless the process
    has done so."""

    job: Job | None = None
    """As for `install`. A subclass may set one; an earlier call of `install` keeps its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanManager.Config):
        """torchtitan's settings. It builds the class around it."""

    def __init__(self, config: Config, **components: object) -> None:
        # An earlier `install()`, with other deadlines, participants or guards, stays.
        if not is_installed():
            install("torchtitan", job=self.job)
        super().__init__(config, **components)
