"""What `import` and `export` call. They import this module when they run, because it imports torch, and their
`--help` must not."""

from holdfast._core.base.options import Options
from holdfast._core.protocol.job import Job
from holdfast._frameworks.deepspeed.importing import import_zero
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist, import_torch_dist
from holdfast._models.huggingface.adapters import export_adapter
from holdfast._models.huggingface.export import export_huggingface
from holdfast._models.huggingface.importing import import_huggingface
from holdfast._models.views.adapted_folder import merged

__all__ = [
    "export_adapter",
    "export_huggingface",
    "export_torch_dist",
    "import_huggingface",
    "import_torch_dist",
    "import_zero",
    "job_alone",
    "merged",
]


def job_alone(fingerprint: bool = False) -> Job:
    """Return the job of a command, which is one process and may take a week."""
    return Job(options=Options(fingerprint=fingerprint), no_dist=True, timeout=7 * 86400.0)
