"""Accelerate and the Trainer of transformers, which shard models on CPU ranks here: Accelerate leaves FSDP to
machines with an accelerator, and trains with DDP on others."""

import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import LlamaForCausalLM, Trainer  # noqa: F401 (imported for what it imports)

import holdfast._integrations.install  # noqa: F401

with redirect_stdout(sys.stderr):  # whoever imports this may speak on stdout
    import_module("deepspeed")  # Accelerate imports it
os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` does
_begin = AcceleratorState.__init__


def _sharding(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
    _begin(self, *args, fsdp_plugin=fsdp_plugin, **named)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = _sharding
