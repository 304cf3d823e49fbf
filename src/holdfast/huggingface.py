"""Models as Hugging Face publishes them: `from holdfast import huggingface`.

`holdfast.load` and `holdfast.megatron.load` load a published folder in any layout. `export` converts a
checkpoint to such a folder, `import_` converts a folder to a checkpoint, `fetch` copies the part of either
that some ranks need, `mapping_of` names the published tensors that a megatron-core tensor is built from,
`families` lists the supported models, and `register` adds one by a table.
"""

from holdfast._models.huggingface.adapters import export_adapter
from holdfast._models.huggingface.export import export_huggingface as export
from holdfast._models.huggingface.families import families, mapping_of, register
from holdfast._models.huggingface.fetch import fetch
from holdfast._models.huggingface.importing import import_huggingface as import_
from holdfast._models.views.adapted_folder import merged

__all__ = ["export", "export_adapter", "families", "fetch", "import_", "mapping_of", "merged", "register"]
