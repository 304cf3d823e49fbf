"""As `bridges`, with Mamba mixers that can be built: their norm has its weight, and there are no kernels."""

from importlib import import_module

from tests.support.stand_ins import stand_in
from tests.support.transformer_engine import RMSNorm

stand_in(("mamba_ssm",))
import_module("mamba_ssm.ops.triton.layernorm_gated").RMSNorm = RMSNorm  # type: ignore[attr-defined]
import_module("tests.support.preloads.bridges")
