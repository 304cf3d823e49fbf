"""Models as Hugging Face publishes them: `from holdfast import huggingface`.

A published folder loads by `holdfast.load` and `holdfast.megatron.load`, in any layout. `export` makes such a
folder of a checkpoint, `import_` a checkpoint of such a folder, `fetch` copies the part of either that some
ranks need, `mapping_of` says what a tensor is made of, `families` which models are known.
"""

from holdfast._integrations.huggingface.export import export_huggingface as export
from holdfast._integrations.huggingface.families import families, mapping_of
from holdfast._integrations.huggingface.fetch import fetch
from holdfast._integrations.huggingface.importing import import_huggingface as import_

__all__ = ["export", "families", "fetch", "import_", "mapping_of"]
