"""What the forkserver imports once, so that no rank has to."""

import warnings
from importlib import import_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core says of CUDA extensions that it does not find
    for name in ("distributed", "models.gpt", "pipeline_parallel"):
        import_module(f"megatron.core.{name}")
    for name in ("models.gpt.gpt_layer_specs", "transformer.multi_latent_attention", "optimizer"):
        import_module(f"megatron.core.{name}")
    for name in ("holdfast.megatron", "tests.frameworks.megatron.jobs", "torch.export._trace", "numpy.ma"):
        import_module(name)
