"""Every vLLM symbol that the code uses beyond vLLM's documented interface, with the call that the code makes."""

import pytest
from internals import check_call, missing_fields, resolve

TRANSFER = "vllm.distributed.weight_transfer"
# symbol -> number of positional arguments (with self), names of keyword arguments
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config": (1, ("disable_log_stats", "stat_loggers")),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (4, ("lora_request",)),
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": (1, ("mode", "clear_cache")),
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": (1, ()),
    "vllm.v1.engine.async_llm:AsyncLLM.init_weight_transfer_engine": (2, ()),
    "vllm.v1.engine.async_llm:AsyncLLM.start_weight_update": (1, ()),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weights": (2, ()),
    "vllm.v1.engine.async_llm:AsyncLLM.finish_weight_update": (1, ("weight_version",)),
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version": (2, ()),
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache": (1, ()),
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": (2, ()),
    "vllm.lora.request:LoRARequest": (3, ("load_inplace",)),
    "vllm.distributed.weight_transfer.base:WeightTransferInitRequest": (1, ()),
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateRequest": (1, ()),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": (4, ()),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine": (3, ()),
    "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferUpdateInfo": (
        0, ("names", "dtype_names", "shapes")
    ),
    "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine.receive_weights": (2, ()),
    "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine.shutdown": (1, ()),
    "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferUpdateInfo": (
        0, ("names", "dtype_names", "shapes", "ipc_handles", "tensor_sizes")
    ),
    "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferEngine.receive_weights": (2, ()),
    "vllm.distributed.weight_transfer.packed_tensor:packed_nccl_broadcast_producer": (4, ()),
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator": (1, ("device",)),
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.destroy": (1, ()),
    "vllm.distributed.utils:StatelessProcessGroup": (0, ("rank", "world_size", "store")),
    "vllm.utils.nccl:unpinned_nccl_env": (0, ()),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": (1, ()),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (2, ()),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": (1, ()),
    "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading": (2, ()),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (3, ()),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": (1, ()),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": (3, ()),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler.update_from_output": (3, ()),
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc": (2, ("unique_reply_rank",)),
    "vllm.v1.metrics.loggers:PrometheusStatLogger.record": (3, ("mm_cache_stats", "engine_idx")),
    "vllm.v1.metrics.loggers:PrometheusStatLogger.record_sleep_state": (1, ("sleep", "level")),
    "vllm.v1.metrics.loggers:PrometheusStatLogger.record_admission_rejection": (2, ()),
}  # fmt: skip


@pytest.mark.parametrize("symbol", CALLS)
def test_vllm_accepts_the_calls_of_the_code(symbol: str) -> None:
    check_call(symbol, *CALLS[symbol])


def test_outputs_have_the_fields_that_are_joined() -> None:
    from actors.vllm_compat.scheduler import UNJOINABLE_FIELDS

    outputs = {
        "vllm.v1.engine:EngineCoreOutput": (
            "request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "events", "prefill_stats",
            *UNJOINABLE_FIELDS,
        ),
        "vllm.v1.engine:EngineCoreOutputs": ("outputs", "weight_version"),
    }  # fmt: skip
    absent = [missing_fields(name, used, resolve(name).__struct_fields__) for name, used in outputs.items()]
    assert absent == [[], []]
    assert resolve("vllm.v1.outputs:LogprobsLists")._fields[:3] == (
        "logprob_token_ids",
        "logprobs",
        "sampled_token_ranks",
    )
    assert resolve("vllm.v1.core.sched.interface:PauseState.PAUSED_ALL") is not None


def test_the_transfer_engine_has_the_hooks_that_are_overridden() -> None:
    base = f"{TRANSFER}.base:WeightTransferEngine"
    hooks = (
        "parse_init_info",
        "init_transfer_engine",
        "start_weight_update",
        "receive_weights",
        "finish_weight_update",
    )
    assert missing_fields(base, (*hooks, "shutdown"), dir(resolve(base))) == []
    assert isinstance(resolve(f"{TRANSFER}.factory:WeightTransferEngineFactory._registry"), dict)


@pytest.mark.parametrize("symbol", ["vllm.v1.engine:Renamed", "vllm.no_module:Thing"])
def test_a_missing_symbol_is_named(symbol: str) -> None:
    with pytest.raises(AssertionError, match=f"^{symbol} is gone"):
        resolve(symbol)


def test_a_changed_signature_is_named() -> None:
    with pytest.raises(AssertionError, match=r"^vllm\.utils\.nccl:unpinned_nccl_env\(\).* refuses the call"):
        check_call("vllm.utils.nccl:unpinned_nccl_env", 0, ("pinned",))
