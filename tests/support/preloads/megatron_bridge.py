"""Megatron-Bridge's conversion of published weights."""

from importlib import import_module

from tests.integrations.megatron.cpu import use_cpu
from tests.support.stand_ins import stand_in_for
from tests.support.transformer_engine import use_layers

use_layers()
use_cpu()
stand_in_for("megatron-bridge weights")
for name in ("", ".models.conversion.param_mapping", ".training.model_load_save"):
    import_module(f"megatron.bridge{name}")
