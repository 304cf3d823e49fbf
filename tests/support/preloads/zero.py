"""DeepSpeed, on the CPU, and what an engine imports."""

import os
from importlib import import_module

from tests.frameworks.deepspeed.jobs import ENV

os.environ.update(ENV)
for name in ("deepspeed", "torch.export._trace", "torch._inductor.compile_fx"):
    import_module(name)
