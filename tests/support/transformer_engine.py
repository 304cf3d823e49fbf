"""Transformer Engine's layers with their parameters and no arithmetic, for tests that move weights.

Frameworks name the weights of a model as Transformer Engine's fused layers do (`linear_qkv.layer_norm_weight`,
`experts.linear_fc1.weight3`), and megatron-core's layers over them run on a CPU but for the kernels. Nothing
that is trained or compared by logits may use this.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch


class _Layer(torch.nn.Module):
    """A layer whose tensor-parallel parameters are of this rank's size, as Transformer Engine makes them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Any = None,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        tp_group: Any = None,
        params_dtype: torch.dtype = torch.float32,
        **ignored: Any,
    ) -> None:
        super().__init__()
        self.tp_size, self.use_bias, self.parallel_mode = tp_size, bias, parallel_mode
        self.tp_rank = torch.distributed.get_rank(tp_group) if tp_group is not None else 0
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self._dtype = params_dtype

    def _weight(self, name: str) -> None:
        weight = torch.nn.Parameter(torch.zeros(self.out_features, self.in_features, dtype=self._dtype))
        self._mark(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(name, weight)

    def _bias(self, name: str) -> None:
        bias = (
            torch.nn.Parameter(torch.zeros(self.out_features, dtype=self._dtype)) if self.use_bias else None
        )
        if bias is not None and self.parallel_mode == "column":
            self._mark(bias, 0)
        self.register_parameter(name, bias)

    def _mark(self, weight: Any, axis: int) -> None:
        weight.tensor_model_parallel = self.parallel_mode is not None
        weight.partition_dim, weight.partition_stride = axis, 1

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class Linear(_Layer):
    def __init__(self, in_features: int, out_features: int, **named: Any) -> None:
        super().__init__(in_features, out_features, **named)
        self._weight("weight")
        self._bias("bias")


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, **named: Any) -> None:
        super().__init__(in_features, out_features, **named)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=self._dtype))


class GroupedLinear(_Layer):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **named: Any) -> None:
        super().__init__(in_features, out_features, **named)
        self.num_gemms = num_gemms
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        for number in range(num_gemms):
            self._weight(f"weight{number}")
            self._bias(f"bias{number}")

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int = 0,
        *,
        normalized_shape: int = 0,
        params_dtype: torch.dtype = torch.float32,
        **ignored: Any,
    ) -> None:
        super().__init__()
        hidden_size = hidden_size or normalized_shape  # since megatron-core 0.18
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads: int = 0,
        *args: Any,
        softmax_type: str = "vanilla",
        tp_size: int = 1,
        **named: Any,
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))


LAYERS = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)


def use_layers() -> None:
    """Make `transformer_engine` importable with these layers; everything else in it is empty. For good, in this
    process."""
    from tests.support.stand_ins import stand_in_for

    if "transformer_engine" in sys.modules:
        return
    # The forkserver has imported megatron-core, which has found no Transformer Engine.
    for name in list(sys.modules):
        if name.startswith(("megatron.", "holdfast.megatron", "holdfast._frameworks")):
            del sys.modules[name]
    stand_in_for("transformer-engine")
    for name in ("common.recipe", "pytorch.distributed", "pytorch.ops"):  # found as attributes
        import_module(f"transformer_engine.{name}")
    package, layers = import_module("transformer_engine"), import_module("transformer_engine.pytorch")
    package.__version__ = "1.12.0"  # type: ignore[attr-defined]
    import_module("transformer_engine.pytorch.attention")._SplitAlongDim = torch.autograd.Function  # type: ignore[attr-defined]
    offload = import_module("transformer_engine.pytorch.cpu_offload")
    offload.get_cpu_offload_context = lambda *args, **named: (nullcontext(), None)  # type: ignore[attr-defined]
    for layer in LAYERS:
        setattr(layers, layer.__name__, layer)
