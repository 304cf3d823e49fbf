"""The configuration of an adapter, as PEFT writes it (`adapter_config.json`). No torch.

Only plain LoRA is read, with these extensions: DoRA, rank-stabilized scaling, ranks and alphas by pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.io.small_files import read_file
from holdfast._core.store.base import Store
from holdfast._models.views import hub_format as hf
from holdfast.errors import BadInput

_CONFIG_BYTES = 1 << 20
_METHODS = {
    "LOHA": "LoHa",
    "LOKR": "LoKr",
    "ADALORA": "AdaLoRA",
    "VERA": "VeRA",
    "OFT": "OFT",
    "BOFT": "BOFT",
    "IA3": "IA3",
    "PROMPT_TUNING": "prompt tuning",
    "PREFIX_TUNING": "prefix tuning",
    "P_TUNING": "P-tuning",
}
"""Names of methods that are not read, by their `peft_type`; others are named by that."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` by which PEFT also changes the weights of the base model."""
_NO_EFFECT = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
    *("ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
    *(
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_bias",
    ),
    *("lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_type"),
    *("peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "target_parameters", "task_type", "use_dora", "use_rslora"),
}
"""Keys that are read here, or that say nothing of merged weights."""


class AdapterConfig:
    """The settings of a LoRA adapter that its weights depend on."""

    def __init__(self, said: Mapping[str, object], where: str) -> None:
        """said: the content of the file. where: its path, for errors.

        Raises BadInput for another method than LoRA, and for settings that are not read.
        """
        self.where = where
        self.identity = hex_digest(digest(repr(sorted(said.items())).encode()))
        method = str(said.get("peft_type"))
        if method != "LORA":
            raise BadInput(
                f"{where} is of {_METHODS.get(method, method[:100])}, which Holdfast does not read: it reads "
                f"LoRA only.",
                hint="Merge it into its model (PEFT: merge_and_unload, then save_pretrained).",
                details={"peft_type": method},
            )
        self._refuse_variants(said)
        self.use_dora = said.get("use_dora") is True
        self.parameters = tuple(map(str, _list(said.get("target_parameters"))))
        """The last words of the names of parameters that are adapted without a module."""
        everywhere = not (said.get("layers_to_transform") or said.get("exclude_modules"))
        self._modules = tuple(map(str, _list(said.get("target_modules")))) if everywhere else ()
        """The ends of names of modules that all have matrices; none if it takes more to tell which have."""
        self.bias = str(said.get("bias") or "none")
        self._is_root = said.get("use_rslora") is True
        self._rank, self._alpha = (
            self._number(said.get("r"), "r"),
            self._number(said.get("lora_alpha"), "lora_alpha"),
        )
        self._ranks, self._alphas = (self._pattern(said, key) for key in ("rank_pattern", "alpha_pattern"))

    def rank(self, module: str) -> int:
        """Return the rank of the matrices of a module, by its name in the model."""
        return int(_matching(self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """Return what the product of the matrices of a module is multiplied by."""
        rank, alpha = self.rank(module), _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._is_root else rank)

    def names(self, module: str) -> bool:
        """Return whether the configuration certainly asks for matrices for a linear module of this name."""
        return any(module == one or module.endswith(f".{one}") for one in self._modules)

    def _refuse_variants(self, said: Mapping[str, object]) -> None:
        init = said.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_CHANGE_BASE):
            raise self._refused(
                f"says init_lora_weights={init[:40]!r}, by which the base model's weights were changed, too",
                "Have PEFT convert it: save_pretrained(path_initial_model_for_weight_conversion=...).",
            )
        if said.get("fan_in_fan_out"):
            raise self._refused("says fan_in_fan_out, for weights whose inputs lie along rows")
        for key, value in said.items():
            if value and key not in _NO_EFFECT:
                raise self._refused(f"says {key[:60]}={str(value)[:60]}, a variant of LoRA")

    def _refused(self, says: str, hint: str = "") -> BadInput:
        return BadInput(
            f"{self.where} {says}. Holdfast does not read this.",
            hint=hint or "Merge it into its model (PEFT: merge_and_unload, then save_pretrained).",
        )

    def _pattern(self, said: Mapping[str, object], key: str) -> dict[re.Pattern[str], float]:
        found = said.get(key) or {}
        if not isinstance(found, Mapping):
            raise BadInput(f"{self.where}: {key} is no object of names and numbers.")
        try:
            # As PEFT matches: the whole name, or its end after a dot.
            return {
                re.compile(rf"(.*\.)?({name})\Z"): self._number(number, key) for name, number in found.items()
            }
        except re.error as error:
            raise BadInput(f"{self.where}: {key} has an invalid pattern: {error}.") from None

    def _number(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 30:
            raise BadInput(f"{self.where}: {key} is {str(value)[:60]!r}, which is no number above 0.")
        return value


def read_adapter_config(store: Store) -> AdapterConfig:
    """Read the configuration of an adapter's folder. BadInput if it has none, or one that is not read."""
    where = f"{store.url}/{hf.ADAPTER_CONFIG}"
    data = read_file(store, hf.ADAPTER_CONFIG, _CONFIG_BYTES)
    if data is None:
        raise BadInput(
            f"There is no {where}: {store.url} is no folder of an adapter.",
            hint="Give the folder that PEFT's save_pretrained wrote.",
        )
    return AdapterConfig(hf.decode(data, dict[str, object], where), where)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _matching(patterns: Mapping[re.Pattern[str], float], name: str, otherwise: float) -> float:
    return next((value for pattern, value in patterns.items() if pattern.match(name)), otherwise)
