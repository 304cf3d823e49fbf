"""The conversions of published weights by mbridge and Megatron-Bridge."""

import importlib.util
from importlib import import_module

from tests.frameworks.megatron.cpu import use_cpu
from tests.support.stand_ins import stand_in_for
from tests.support.transformer_engine import use_layers

use_layers()
use_cpu()
stand_in_for("megatron-bridge weights")
for name in ("mbridge", "mbridge.utils.post_creation_callbacks"):
    import_module(name)
if importlib.util.find_spec("megatron.bridge") is not None:
    for name in ("", ".models.conversion.param_mapping", ".training.model_load_save"):
        import_module(f"megatron.bridge{name}")
