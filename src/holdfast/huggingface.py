"""Models as Hugging Face publishes them: `from holdfast import huggingface`.

A published folder loads by `holdfast.load` and `holdfast.megatron.load`, in any layout. `export` makes such a
folder of a checkpoint, `import_` a checkpoint of such a folder, `fetch` copies the part of either that some
ranks need, `explain` says what a tensor is made of, `families` which models are known.
"""

from holdfast.integrations.huggingface.explain import explain, families
from holdfast.integrations.huggingface.export import export_huggingface as export
from holdfast.integrations.huggingface.importing import import_huggingface as import_
from holdfast.maintenance.fetch import fetch

__all__ = ["explain", "export", "families", "fetch", "import_"]
