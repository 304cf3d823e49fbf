"""Megatron-FSDP's uneven DTensors, described from local data: megatron-core's names and arguments, and no
collective.

    from holdfast.megatron_fsdp import (
        handle_gdn_in_state_dict, handle_swiglu_in_state_dict, preprocess_state_dict_for_uneven_dtensor)

in place of megatron-core's functions, in the code that prepares an `fsdp_dtensor` state dict.
"""

from holdfast._frameworks.megatron_fsdp.uneven import (
    fill_missing_states,
    handle_gdn_in_state_dict,
    handle_swiglu_in_state_dict,
    preprocess_state_dict_for_uneven_dtensor,
)

__all__ = [
    "fill_missing_states",
    "handle_gdn_in_state_dict",
    "handle_swiglu_in_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
]
