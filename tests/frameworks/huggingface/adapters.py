"""Adapters of tiny models, as PEFT writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def base_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def write_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """Have PEFT wrap a model, and write the adapter with random weights."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base_model(base), LoraConfig(**{"r": 4, **settings}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.uniform_(0.5, 2)
            elif "lora_" in name or "modules_to_save" in name or name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def wrapped(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base_model(base, dtype), adapter)


def merge_by_peft(base: Any, adapter: Path) -> Any:
    """Return PEFT's merge into a model of transformers', which it changes."""
    from peft import PeftModel

    return PeftModel.from_pretrained(base, adapter).merge_and_unload()
