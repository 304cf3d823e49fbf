"""megatron-core's checkpoint functions, without a collective:
`from holdfast import megatron as dist_checkpointing`.

`save`, `load` and the `load_*` functions have the arguments of `megatron.core.dist_checkpointing`.
`optimizer_state_dict` describes a DistributedOptimizer so that it loads in any other layout, and
`load_optimizer_state_dict` loads it. `holdfast.install()` replaces megatron-core's functions by these.
"""

from holdfast._frameworks.megatron.checkpointing import load, load_plain_tensors, save
from holdfast._frameworks.megatron.fingerprints import fingerprint
from holdfast._frameworks.megatron.iterations import Checkpoints
from holdfast._frameworks.megatron.metadata import (
    check_is_distributed_checkpoint,
    load_common_state_dict,
    load_content_metadata,
    load_sharded_metadata,
    load_tensors_metadata,
)
from holdfast._frameworks.megatron.optimizer import load_state_dict as load_optimizer_state_dict
from holdfast._frameworks.megatron.optimizer import sharded_state_dict as optimizer_state_dict

__all__ = [
    "Checkpoints",
    "check_is_distributed_checkpoint",
    "fingerprint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_optimizer_state_dict",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "optimizer_state_dict",
    "save",
]
