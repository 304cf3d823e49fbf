"""An Adam that keeps its state as Transformer Engine's FusedAdam does, on the CPU, with PyTorch's arithmetic.

It counts steps in the parameter group, from its first step on, and only in groups that have parameters;
moments, and master weights if it has them, are in the state of each parameter; both are read and set through
`get_unscaled_state` and `set_scaled_state`. megatron-core takes other ways where it has such an optimizer,
all of which run here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.use_decoupled_grad = use_decoupled_grad
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self.dtypes["master_param"] = master_weight_dtype

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        for name in self.dtypes:
            start = param.detach() if name == "master_param" else torch.zeros_like(param)
            self.set_scaled_state(param, name, start.float())

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """The memory itself where that is float32, else a copy."""
        found: torch.Tensor = self.state[param][name]
        return found.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert value.dtype == torch.float32
        if name not in self.state[param]:
            self.state[param][name] = torch.empty_like(param, dtype=self.dtypes[name], requires_grad=False)
        self.state[param][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        order = [param for group in self.param_groups for param in group["params"]]
        for number, values in found["state"].items():
            found["state"][number] = {name: self.get_unscaled_state(order[number], name) for name in values}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        order = [param for group in self.param_groups for param in group["params"]]
        for number, values in state_dict["state"].items():
            self.state[order[number]] = {}  # PyTorch has given it the dtype of the parameter
            for name, value in values.items():
                self.set_scaled_state(order[number], name, value.float())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)
                self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
        if grad is None:
            return
        grad, (beta1, beta2), step = grad.float(), group["betas"], group["step"]
        values = {name: self.get_unscaled_state(param, name) for name in self.dtypes}
        weight = values.get("master_param", param)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        values["exp_avg"].lerp_(grad, 1 - beta1)
        values["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (values["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.addcdiv_(values["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))
        for name, value in values.items():
            self.set_scaled_state(param, name, value)
        if weight is not param:
            param.copy_(weight)


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Inside, `transformer_engine.pytorch.optimizers` has it, for OptimizerConfig to look at."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        yield


def use_fused_adam() -> None:
    """What megatron-core sets where it can import Transformer Engine's optimizers. For good, in this
    process."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = FusedAdam, True
    distrib_optimizer.USING_TE_OPTIMIZER = True
    optimizer.is_te_min_version = lambda *args, **named: False  # older than `store_param_remainders`
