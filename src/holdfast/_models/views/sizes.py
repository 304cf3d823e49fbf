"""Numbers of a model's configuration, on which shapes depend."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import BadInput

_OTHER_KEYS = {
    "num_hidden_layers": ("depth",),
    "num_attention_heads": ("num_heads",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "mamba_num_heads": ("mamba_n_heads",),
    "mamba_head_dim": ("mamba_d_head",),
    "n_groups": ("mamba_n_groups",),
    "ssm_state_size": ("mamba_d_state",),
}
"""By configuration key, others for the same number, which some families have."""


class Numbers(dict[str, int]):
    """Numbers of a configuration; BadInput for one that is missing."""

    def __missing__(self, key: str) -> int:
        raise BadInput(
            f"The configuration does not say {key}, on which shapes depend.",
            hint="Give the whole config.json of the published model.",
        )


_COUNTS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"),
    *("vocab_size", "num_experts"),
)


def sizes_of(config: Mapping[str, object], where: str) -> dict[str, int]:
    """Return the numbers in a configuration, on which shapes depend. BadInput for a count below 1."""
    sizes = {key: value for key, value in config.items() if type(value) is int}
    if isinstance(layers := config.get("layers_block_type"), list):
        sizes.setdefault("num_hidden_layers", len(layers))
    for key, others in _OTHER_KEYS.items():
        for other in others:
            if other in sizes:
                sizes.setdefault(key, sizes[other])
    if "num_attention_heads" in sizes:
        sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    for name in _COUNTS:
        if sizes.get(name, 1) < 1:
            raise BadInput(f"{where} says {name}={sizes[name]}, which no model has.")
    return sizes
