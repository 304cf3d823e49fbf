"""Lightning's Fabric and Trainer, which save sharded models through torch DCP."""

from holdfast._frameworks.framework import Framework


def _described(
    distribution: str, package: str, fabric: str, trainer: str, tested: tuple[str, ...]
) -> Framework:
    """Describe Lightning. fabric, trainer: packages, whose names depend on the distribution."""
    return Framework(
        distribution,
        distribution=distribution,
        package=package,
        guards=(
            f"{fabric}.fabric:Fabric.save",
            f"{fabric}.fabric:Fabric.load",
            f"{fabric}.fabric:Fabric.load_raw",
            f"{trainer}.trainer.trainer:Trainer.save_checkpoint",
            f"{trainer}.trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start",
        ),
        told_by=("checkpoint_path", "path", "filepath"),
        paths_differ=True,
        uses=("torch-dcp",),
        tested=tested,
    )


FRAMEWORK = _described("lightning", "lightning", "lightning.fabric", "lightning.pytorch", ("2.6.6",))
PYTORCH_LIGHTNING = _described(
    "pytorch-lightning", "pytorch_lightning", "lightning_fabric", "pytorch_lightning", ()
)
