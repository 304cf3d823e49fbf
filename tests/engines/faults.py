"""What goes wrong when an engine's weights are set: each changes the parameters of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Tensors = Mapping[str, torch.Tensor]


class Fault(NamedTuple):
    name: str
    change: Callable[[torch.Tensor], None]
    ending: str
    """Of the parameter's name."""
    inside: str = ""
    """What the name also has."""

    def find(self, tensors: Tensors) -> str | None:
        """Return the last parameter of this kind; None if the model has none."""
        names = [name for name in tensors if name.endswith(self.ending) and self.inside in name]
        return names[-1] if names else None


def swap_experts(w: torch.Tensor) -> None:
    w[[0, -1]] = w[[-1, 0]].clone()


def lose_expert(w: torch.Tensor) -> None:
    w[0] = 0


def repeat_expert(w: torch.Tensor) -> None:
    w[-1] = w[0]


def swap_gate_and_up(w: torch.Tensor) -> None:
    axis = w.ndim - 2
    half = w.shape[axis] // 2
    w.copy_(torch.cat([w.narrow(axis, half, half), w.narrow(axis, 0, half)], axis))


def reverse_rows(w: torch.Tensor) -> None:
    w[0] = w[0].flip(0)


def make_stale(w: torch.Tensor) -> None:
    w.mul_(1.01)


def change_last_row(w: torch.Tensor) -> None:
    w[-1] *= 1.5


def shift_rows(w: torch.Tensor) -> None:
    w.copy_(w.roll(1, 0))


def add_again(w: torch.Tensor) -> None:
    delta = torch.outer(torch.ones(w.shape[0]), torch.linspace(0.01, 0.02, w.shape[1])).to(w.dtype)
    w.add_(delta)


def randomize(w: torch.Tensor) -> None:
    w.normal_(0, 0.3, generator=torch.Generator().manual_seed(7))


def set_one(w: torch.Tensor) -> None:
    w.reshape(-1)[0] = 1


FAULTS = [
    Fault("experts swapped", swap_experts, "w13_weight"),
    Fault("the last expert is the first", repeat_expert, "w2_weight"),
    Fault("expert lost", lose_expert, "w13_weight"),
    Fault("gate and up swapped in experts", swap_gate_and_up, "w13_weight"),
    Fault("gate and up swapped", swap_gate_and_up, "gate_up_proj.weight"),
    Fault("w2 reversed", reverse_rows, "w2_weight"),
    Fault("stale layer", make_stale, "o_proj.weight"),
    Fault("a norm left out", make_stale, "input_layernorm.weight"),
    Fault("router differs", make_stale, "mlp.gate.weight"),
    Fault("router differs", make_stale, "mlp.router.weight"),
    Fault("a value head differs", change_last_row, "qkv_proj.weight"),
    Fault("rows of the vocabulary shifted", shift_rows, "lm_head.weight"),
    Fault("an adapter merged twice", add_again, "qkv_proj.weight"),
    Fault("a tower left random", randomize, "attn.qkv.weight", "visual."),
    Fault("a convolution left random", randomize, "conv1d.weight"),
    Fault("a bias added twice", set_one, "w2_bias"),
    Fault("latent projection stale", make_stale, "kv_b_proj.weight"),
    Fault("correction of the router stale", make_stale, "e_score_correction_bias"),
]
