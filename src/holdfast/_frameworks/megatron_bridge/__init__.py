"""Megatron-Bridge: its saves and loads, which go through megatron-core, its published weights, and a manager.

Users import the manager from `holdfast.megatron.bridge`.
"""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "megatron-bridge",
    distribution="megatron-bridge",
    package="megatron.bridge",
    guards=(
        "megatron.bridge.training.checkpointing:save_checkpoint",
        "megatron.bridge.training.checkpointing:load_checkpoint",
        "megatron.bridge.training.checkpointing:maybe_finalize_async_save",
        "megatron.bridge.training.checkpointing:save_fsdp_dtensor_checkpoint",
        "megatron.bridge.training.checkpointing:load_fsdp_dtensor_checkpoint",
        "megatron.bridge.training.model_load_save:save_megatron_model",
        "megatron.bridge.training.model_load_save:load_megatron_model",
    ),
    told_by=("iteration", "state.train_state.step", "checkpoint_path", "path"),
    folders={
        "megatron.bridge.": (
            "state.cfg.checkpoint.save",
            "state.cfg.checkpoint.load",
            "cfg.checkpoint.save",
            "ckpt_cfg.save",
            "path",
            "checkpoint_path",
        )
    },
    patches=f"{__name__}.patches",
    uses=("megatron-core", "torch-dcp"),
    tested=("0.3.1", "0.6.2"),
)
