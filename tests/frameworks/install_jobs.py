"""Programs that call `install()`, each in a process of its own: what is imported when is the point."""

import contextlib
import io
import sys
import types


def said_by(rank: int, program: str) -> str:
    """What a program prints in a rank, which finds megatron-core imported and the default process group made."""
    module = sys.modules["program"] = types.ModuleType("program")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(program, vars(module))
    return said.getvalue()


EARLY = """
import sys
import holdfast
holdfast.install(session=False)
assert "megatron" not in sys.modules, "install() imports no framework"
from tests.frameworks.megatron.cpu import use_cpu
use_cpu()
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import save
from megatron.core.optimizer import ChainedOptimizer
assert dist_checkpointing.save is save
assert save.holdfast_original.__module__ == "megatron.core.dist_checkpointing.serialization"
found = {part.name: part for part in holdfast.installed()}
core = found["megatron-core"]
assert "megatron.core.dist_checkpointing.serialization.save" in core.replaced
assert any("maybe_finalize_async_calls" in name for name in core.guarded)
assert core.missing == (), core.missing
ours = [save]
holdfast.uninstall()
assert dist_checkpointing.save is save is ours[0].holdfast_original, "where it was bound, too"
assert not hasattr(ChainedOptimizer.load_state_dict, "holdfast_original")
assert holdfast.installed() == []
print("done")
"""

LATE = """
import sys, types
from tests.frameworks.megatron.cpu import use_cpu
use_cpu()
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import load, save
user = types.ModuleType("user"); user.save = save; user.other = load; sys.modules["user"] = user
import holdfast
holdfast.install(session=False)
assert user.save is dist_checkpointing.save is not save.holdfast_original
assert user.other is dist_checkpointing.load
original = save.holdfast_original
holdfast.uninstall()
assert user.save is dist_checkpointing.save is save is original
print("done")
"""

TOO_LATE = """
import logging, sys
from tests.frameworks.megatron.cpu import use_cpu
use_cpu()
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)  # an import of others may have set it up
import holdfast
holdfast.install()
print("done")
"""

CONVERTER = """
# A script as frameworks ship them: it knows nothing of Holdfast.
import sys, torch
from tests.frameworks.megatron.cpu import use_cpu
use_cpu()
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "kind": "actor"}
dist_checkpointing.save(state, sys.argv[1])
back = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, sys.argv[1])
print(back["w"].tolist(), back["kind"])
"""

FORWARD = """
import sys
assert "torch" not in sys.modules
import hidden_customization
print("hidden one ran:", hidden_customization.RAN)
"""

HOLDFAST_FIRST = """
import holdfast
holdfast.save  # imports torch
from tests.frameworks.megatron.cpu import use_cpu
use_cpu()
from megatron.core import dist_checkpointing
print(hasattr(dist_checkpointing.save, "holdfast_original"))
holdfast.install(session=False, job=holdfast.Job(timeout=7))
print(hasattr(dist_checkpointing.load, "holdfast_original"))
"""
