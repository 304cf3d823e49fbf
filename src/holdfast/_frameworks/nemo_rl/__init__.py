"""NeMo RL, which saves through Megatron-Bridge or torch DCP."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "nemo-rl",
    distribution="nemo-rl",
    package="nemo_rl",
    guards=(
        "nemo_rl.models.megatron.community_import:import_model_from_hf_name",
        "nemo_rl.utils.native_checkpoint:save_checkpoint",
        "nemo_rl.utils.native_checkpoint:load_checkpoint",
    ),
    told_by=("weights_path",),
    folders={"nemo_rl.utils.native_checkpoint:": ("weights_path", "optimizer_path", "tokenizer_path")},
    uses=("megatron-core", "megatron-bridge", "torch-dcp"),
    tested=(),
)
