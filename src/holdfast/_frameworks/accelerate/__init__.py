"""Accelerate, which saves FSDP's models and optimizers through torch DCP."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "accelerate",
    distribution="accelerate",
    package="accelerate",
    guards=(
        "accelerate.accelerator:Accelerator.save_state",
        "accelerate.accelerator:Accelerator.load_state",
        "accelerate.utils.fsdp_utils:save_fsdp_model",
        "accelerate.utils.fsdp_utils:load_fsdp_model",
        "accelerate.utils.fsdp_utils:save_fsdp_optimizer",
        "accelerate.utils.fsdp_utils:load_fsdp_optimizer",
    ),
    told_by=("output_dir", "input_dir", "self.save_iteration"),
    paths_differ=True,
    folders={"accelerate.": ("output_dir", "input_dir")},
    uses=("torch-dcp",),
    tested=("1.15.0",),
)
