"""mbridge's conversion of published weights."""

from importlib import import_module

from tests.integrations.megatron.cpu import use_cpu
from tests.support.transformer_engine import use_layers

use_layers()
use_cpu()
for name in ("mbridge", "mbridge.utils.post_creation_callbacks"):
    import_module(name)
