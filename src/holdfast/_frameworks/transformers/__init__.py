"""The Trainer of transformers, which saves sharded models through Accelerate."""

from holdfast._frameworks.framework import Framework

FRAMEWORK = Framework(
    "transformers",
    distribution="transformers",
    package="transformers",
    guards=(
        "transformers.trainer:Trainer.save_model",
        "transformers.trainer:Trainer._save_checkpoint",
        "transformers.trainer:Trainer._load_from_checkpoint",
        "transformers.trainer:Trainer._load_optimizer_and_scheduler",
    ),
    told_by=("output_dir", "resume_from_checkpoint", "checkpoint", "self.state.global_step"),
    paths_differ=True,
    folders={
        "transformers.trainer:Trainer._save_checkpoint": ("self.args.output_dir",),
        "transformers.trainer:Trainer.save_model": ("output_dir or self.args.output_dir",),
        "transformers.trainer:Trainer._load": ("resume_from_checkpoint", "checkpoint"),
    },
    patches=f"{__name__}.patches",
    uses=("accelerate", "torch-dcp"),
    tested=("5.10.4",),
)
