"""torchtune, which saves asynchronous and distributed checkpoints through torch DCP."""

from holdfast._frameworks.framework import Framework

_FILES = "torchtune.training.checkpointing"
FRAMEWORK = Framework(
    "torchtune",
    distribution="torchtune",
    package="torchtune",
    guards=(
        f"{_FILES}._checkpointer:DistributedCheckpointer.save_checkpoint",
        f"{_FILES}._checkpointer:DistributedCheckpointer.load_checkpoint",
        f"{_FILES}._checkpoint_client:CheckpointClient.save_checkpoint",
        f"{_FILES}._checkpoint_client:CheckpointClient.load_distributed_checkpoint",
    ),
    told_by=("epoch", "checkpoint_path"),
    folders={
        "torchtune.": (
            "self._output_dir",
            "self._checkpoint_dir",
            "checkpoint_path",
            "self._cfg.checkpointer.output_dir",
        )
    },
    patches=f"{__name__}.patches",
    uses=("torch-dcp",),
    tested=("0.6.1",),
)
