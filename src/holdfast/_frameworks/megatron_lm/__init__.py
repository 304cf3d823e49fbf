"""Megatron-LM's training loop, which saves through megatron-core. It is run from a clone."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "megatron-lm",
    distribution="",
    package="megatron.training",
    guards=(
        "megatron.training.checkpointing:save_checkpoint",
        "megatron.training.checkpointing:load_checkpoint",
        "megatron.training.async_utils:maybe_finalize_async_save",
    ),
    told_by=("iteration",),
    uses=("megatron-core", "torch-dcp"),
)
