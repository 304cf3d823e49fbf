"""mcore-bridge's conversion of published weights, which is ms-swift's."""

from importlib import import_module

from tests.frameworks.megatron.cpu import use_cpu
from tests.support.stand_ins import stand_in_for
from tests.support.transformer_engine import use_layers

use_layers()
use_cpu()
stand_in_for("mcore-bridge")
import_module("peft").__version__ = "0.19.0"
import_module("mcore_bridge")
