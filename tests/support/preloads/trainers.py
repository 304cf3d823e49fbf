"""The trainers that are installed. Accelerate shards models on CPU ranks here: by itself it leaves FSDP to machines
with an accelerator, and trains with DDP on others."""

import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any

with redirect_stdout(sys.stderr):  # whoever imports this may speak on stdout
    for name in ("lightning", "torchdata.stateful_dataloader", "deepspeed"):  # Accelerate imports the last
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    for name in ("torch.export._trace", "torch._inductor.compile_fx"):  # which engines of DeepSpeed import
        import_module(name)


def _shard_on_cpus() -> None:
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401 (imported for what it imports)

    begin = AcceleratorState.__init__

    def sharding(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = sharding
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` does


if find_spec("accelerate") is not None and find_spec("transformers") is not None:
    _shard_on_cpus()
