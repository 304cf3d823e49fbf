"""torchtitan, which saves through torch DCP. Users import a manager for it from `holdfast.torchtitan`."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "torchtitan",
    distribution="torchtitan",
    package="torchtitan",
    guards=(
        "torchtitan.components.checkpointer.base:BaseCheckpointManager.save",
        "torchtitan.components.checkpointer.base:BaseCheckpointManager.load",
        # before 0.3
        "torchtitan.components.checkpoint:CheckpointManager.save",
        "torchtitan.components.checkpoint:CheckpointManager.load",
    ),
    told_by=("curr_step", "step"),
    uses=("torch-dcp",),
    tested=("0.3.0",),
)
