"""verl, whose checkpoint managers save through megatron-core or torch DCP."""

from holdfast._frameworks.framework import Framework

_MANAGERS = "verl.utils.checkpoint"
_ENGINES = "verl.workers.engine"
FRAMEWORK = Framework(
    "verl",
    distribution="verl",
    package="verl",
    guards=(
        f"{_MANAGERS}.megatron_checkpoint_manager:MegatronCheckpointManager.save_checkpoint",
        f"{_MANAGERS}.megatron_checkpoint_manager:MegatronCheckpointManager.load_checkpoint",
        f"{_MANAGERS}.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
        f"{_MANAGERS}.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint",
        f"{_ENGINES}.megatron.transformer_impl:MegatronEngine.save_checkpoint",
        f"{_ENGINES}.megatron.transformer_impl:MegatronEngine.load_checkpoint",
        f"{_ENGINES}.fsdp.transformer_impl:FSDPEngine.save_checkpoint",
        f"{_ENGINES}.fsdp.transformer_impl:FSDPEngine.load_checkpoint",
    ),
    told_by=("global_step", "local_path"),
    folders={"verl.": ("local_path",)},
    patches=f"{__name__}.patches",
    uses=("megatron-core", "megatron-bridge", "mbridge", "torch-dcp"),
    tested=("0.9.1",),
)
