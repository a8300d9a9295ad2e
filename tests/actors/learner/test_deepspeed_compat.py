"""Every DeepSpeed symbol that `actors.learner.zero3` uses, with the call that it makes."""

import pytest
from internals import check_call, missing_fields, resolve

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
# symbol -> number of positional arguments (with self), names of keyword arguments
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "deepspeed:initialize": (0, ("model", "optimizer", "config", "lr_scheduler")),
    "deepspeed:init_distributed": (1, ("auto_mpi_discovery", "verbose", "timeout", "rank", "world_size")),
    "deepspeed:zero.Init": (0, ("module", "config_dict_or_path")),
    "deepspeed:zero.Init._convert_to_zero_parameters": (2, ()),
    "deepspeed.utils:set_z3_leaf_modules": (2, ()),
    "deepspeed.accelerator:get_accelerator": (0, ()),
    "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator.pin_empty_like": (2, ("device",)),
    "deepspeed.accelerator.abstract_accelerator:DeepSpeedAccelerator.synchronize": (1, ()),
    "deepspeed.ops.adam:DeepSpeedCPUAdam": (1, ("lr", "betas", "weight_decay")),
    "deepspeed.checkpoint.ds_to_universal:main": (1, ()),
}
ENGINE_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "set_gradient_accumulation_boundary": (2, ()),
    "backward": (2, ("scale_wrt_gas",)),
    "step": (1, ()),
    "was_step_applied": (1, ()),
    "get_lr": (1, ()),
    "get_global_grad_norm": (1, ()),
    "bfloat16_enabled": (1, ()),
    "offload_states": (1, ("include",)),
    "reload_states": (1, ()),
    "save_checkpoint": (2, ("tag", "save_latest", "exclude_frozen_parameters")),
    "load_checkpoint": (2, ("tag", "custom_load_fn")),
}
CALLS |= {f"{ENGINE}.{method}": call for method, call in ENGINE_CALLS.items()}


@pytest.mark.parametrize("symbol", CALLS)
def test_deepspeed_accepts_the_calls_of_the_code(symbol: str) -> None:
    check_call(symbol, *CALLS[symbol])


def test_states_that_are_offloaded_and_the_table_of_ops_exist() -> None:
    states = "deepspeed.runtime.zero.offload_config:OffloadStateTypeEnum"
    assert missing_fields(states, ("lp_grads", "contiguous_grad_buffer"), resolve(states).__members__) == []
    assert isinstance(resolve("deepspeed:ops.__compatible_ops__"), dict)
