"""ms-swift's Megatron trainers, which save through megatron-core."""

from holdfast._frameworks.framework import Framework

_FUNCTIONS = "swift.megatron.utils.megatron_lm_utils"
FRAMEWORK = Framework(
    "ms-swift",
    distribution="ms-swift",
    package="swift.megatron",
    guards=(
        f"{_FUNCTIONS}:save_mcore_checkpoint",
        f"{_FUNCTIONS}:load_mcore_checkpoint",
        f"{_FUNCTIONS}:maybe_finalize_async_save",
        "swift.megatron.trainers.base:BaseMegatronTrainer.save_checkpoint",
    ),
    told_by=("iteration", "self.state.iteration", "output_dir"),
    folders={
        "swift.megatron.trainers.": ("self.args.output_dir",),
        f"{_FUNCTIONS}:save": ("output_dir or args.output_dir",),
    },
    uses=("megatron-core", "mcore-bridge", "torch-dcp"),
    tested=("4.6.0",),
)
