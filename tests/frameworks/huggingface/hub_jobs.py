"""What ranks do with Megatron-Bridge's own models, also of types that the installed transformers does not have; importable by
spawned processes."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.frameworks.huggingface import gemma4_jobs
from tests.frameworks.huggingface.framework_jobs import prepare
from tests.frameworks.megatron.models import Layout


def convert(rank: int, folder: str, layout: Layout, saved: str) -> tuple[int, list[str], list[str]]:
    """As `gemma4_jobs.convert`, with a configuration class for the type, as code beside the model would bring one."""
    prepare(dist.get_world_size(), layout)
    register(json.loads(Path(folder, "config.json").read_text())["model_type"])
    engine: Any = import_module("megatron.core.extensions.transformer_engine")
    is_at_least = engine.is_te_min_version
    # By its version it would have no sinks; the layer that stands in has them.
    engine.is_te_min_version = lambda version, **named: version == "2.8.0" or is_at_least(version, **named)
    # What moves tokens between ranks has no weights, and one of the kinds needs a GPU.
    experts: Any = import_module("megatron.core.transformer.moe.moe_layer")
    experts.MoEFlexTokenDispatcher = experts.MoEAlltoAllTokenDispatcher
    return gemma4_jobs.convert(rank, folder, layout, saved)


def register(kind: str) -> None:
    """Have transformers read the configuration of a type that it does not have."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    if kind in CONFIG_MAPPING:
        return

    class HubConfig(PretrainedConfig):  # type: ignore[misc]
        model_type = kind

        def __init__(self, text_config: dict[str, Any] | None = None, **named: Any) -> None:
            if text_config is not None:
                self.text_config = PretrainedConfig(**text_config)
            super().__init__(**named)

    AutoConfig.register(kind, HubConfig)
