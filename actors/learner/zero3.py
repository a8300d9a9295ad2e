"""ZeRO-3 engines, exact gradient accumulation, checkpoints. Only this module and `full_weights.py` know DeepSpeed.

It is called in a rank's process. Functions that take an engine are collectives: all ranks call them in the same order.
It knows neither PPO nor Ray, and builds no model.
"""

import contextlib
import io
import logging
import math
import os
import shutil
import socket
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from actors.cluster.toolkit import build_environment
from actors.learner import lora
from actors.learner.export import write_model
from actors.learner.full_weights import FullWeights
from t2g.config import Dtype, ModelConfig, OptimConfig
from t2g.errors import Diverged
from t2g.files import match_folder_permissions
from t2g.resources.memory import BUCKET_NUMEL, STEP_GROUP_NUMEL

Engine = Any  # deepspeed.DeepSpeedEngine
log = logging.getLogger(__name__)

LossFunction = Callable[[Engine, Any], tuple[torch.Tensor, dict[str, float]]]

EXPORT_BUCKET_BYTES = 256 * 2**20
HOST_BUFFERS = "t2g_host_buffers"  # attribute of an engine whose states were offloaded


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, already reduced over microbatches and ranks."""

    metrics: dict[str, float]  # metrics of the loss function: summed, or the maximum where the name ends in _max
    grad_norm: float  # global, before clipping
    lr: float  # the learning rate this step used


def init_distributed(
    rank: int, world_size: int, master_addr: str, master_port: int, backend: str, *, timeout_s: float
) -> None:
    """Join the process group as `rank`. An existing group, as under Ray Train, is used.

    Args:
        master_addr: Address of rank 0, which listens for the rendezvous on this address only.
        backend: "gloo" on CPUs, "nccl" on GPUs.
        timeout_s: Timeout of each collective.
    """
    if backend == "gloo":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise a CPU rank on a node with GPUs would use one
    else:
        os.environ |= build_environment()
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world_size)
    os.environ["MASTER_ADDR"] = master_addr
    os.environ["MASTER_PORT"] = str(master_port)
    os.environ.setdefault("LOCAL_RANK", "0")  # a Ray actor sees its own GPU only
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # DeepSpeed's calls
    if backend == "gloo":
        # Otherwise DeepSpeed tests the compilers of all its ops, and compiles inference ops for half a minute.
        deepspeed.ops.__compatible_ops__ = {}
    timeout = timedelta(seconds=timeout_s)
    if not torch.distributed.is_initialized():
        # The store has no authentication, and by default torch lets it listen on every address of the node.
        listener = socket.create_server((master_addr, master_port)).detach() if rank == 0 else None
        store = torch.distributed.TCPStore(
            master_addr, master_port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener
        )
        device = None
        if backend == "nccl" and world_size > 1:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(  # as DeepSpeed itself calls it
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
        )
    deepspeed.init_distributed(
        backend, auto_mpi_discovery=False, verbose=False, timeout=timeout, rank=rank, world_size=world_size
    )


def lr_factor(step: int, optim: OptimConfig, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based) as a share of optim.lr.

    Linear warm-up over warmup_ratio * num_steps steps, then constant, linear or cosine down to final_lr_ratio at
    `num_steps`. Example: linear, num_steps 4, no warm-up, final 0 -> 1, .75, .5, .25.
    """
    warmup = math.ceil(optim.warmup_ratio * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    steps_after_warmup = max(1, num_steps - warmup)
    progress = min(1.0, (step - warmup) / steps_after_warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    share = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}
    return optim.final_lr_ratio + (1 - optim.final_lr_ratio) * share[optim.schedule]


def _config(model: torch.nn.Module, dtype: Dtype, world_size: int, *, offload: bool = False) -> dict[str, Any]:
    device = {"device": "cpu" if offload else "none", "pin_memory": offload}
    num_weights = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    numel = min(BUCKET_NUMEL, max(1, num_weights))
    zero_optimization = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # small parameters are partitioned too: one code path
        "reduce_bucket_size": numel,
        "stage3_prefetch_bucket_size": numel,
        "offload_optimizer": device,
        "offload_param": device,
    }
    if not _on_gpu():
        # AdamW's step on a CPU needs three arrays of the size of a group.
        zero_optimization["sub_group_size"] = STEP_GROUP_NUMEL
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # we accumulate: DeepSpeed would divide by it
        "train_batch_size": world_size,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == "bfloat16"},
        # In bfloat16 a sum of many microbatches would lose the small ones: 256 + 1 is 256.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero_optimization,
    }


def _gather_whole_layers(model: torch.nn.Module) -> None:
    """Have ZeRO-3 gather a decoder layer at once: separate gathers of its weights wait longer than they compute."""
    from deepspeed.utils import set_z3_leaf_modules

    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    layers = {type(module) for module in model.modules() if type(module).__name__ in names}
    if layers:
        set_z3_leaf_modules(model, list(layers))


def _partition(model: torch.nn.Module, config: dict[str, Any], dtype: Dtype) -> None:
    """Partition the weights among the ranks one by one: DeepSpeed would first move the full model to the device.

    Weights that `from_pretrained` loaded in the type of their files are pages of these files, which the ranks of a node
    share.
    """
    import deepspeed

    zero_init = deepspeed.zero.Init(module=torch.nn.Module(), config_dict_or_path=config)
    for parameter in model.parameters():
        # DeepSpeed casts only weights that are not partitioned, and a critic's head has another type. The copy is
        # needed because rank 0's weights are written into it, which would make a shared page private.
        parameter.data = parameter.data.to(getattr(torch, dtype), copy=True)
        zero_init._convert_to_zero_parameters([parameter])
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(zero_init.local_device)


def _on_gpu() -> bool:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name() != "cpu"


def _adamw(model: torch.nn.Module, optim: OptimConfig, *, offload: bool) -> torch.optim.Optimizer:
    """Return torch's AdamW, fused on a GPU, or DeepSpeed's CPU Adam if the states are offloaded."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "weight_decay": optim.weight_decay}
    if offload and _on_gpu():
        try:
            return DeepSpeedCPUAdam(trainable, **options)
        except RuntimeError as error:  # it is compiled at the first use
            log.warning("%s; torch's AdamW takes its place, at a fraction of the speed", error)
    return torch.optim.AdamW(trainable, **options, fused=_on_gpu() and not offload)


def build_engine(
    model: torch.nn.Module,
    optim: OptimConfig | None,
    *,
    num_steps: int = 1,
    dtype: Dtype,
    world_size: int,
    offload: bool = False,
) -> Engine:
    """Return a ZeRO-3 engine with AdamW, clipping by the global norm, and the learning-rate schedule of `num_steps`.

    All ranks get rank 0's parameters. Frozen parameters are partitioned too, without optimizer state. For a bfloat16
    model the optimizer has float32 copies of the others.

    Args:
        optim: None freezes the model, for forward passes only.
        offload: Whether partitions and optimizer state lie in host memory.
    """
    import deepspeed

    _gather_whole_layers(model)
    config = _config(model, dtype, world_size, offload=offload)
    _partition(model, config, dtype)
    if optim is None:
        model.requires_grad_(False)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.eval()
        return engine

    def build_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, optim, num_steps))

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=_adamw(model, optim, offload=offload),
        config=config | {"gradient_clipping": optim.max_grad_norm},
        lr_scheduler=build_schedule,
    )
    return engine


def train_step(engine: Engine, microbatches: Sequence[Any], loss_fn: LossFunction, *, label: str) -> StepResult:
    """Make one optimizer step over this rank's microbatches; every rank has the same number of them, at least one.

    The caller sets the mode of the model, training or evaluation.

    Args:
        loss_fn: (engine, microbatch) -> (loss, metrics). Both are this microbatch's *share* of the global mean, that is
            sums divided by the global token count, so that shares add up over microbatches and ranks. DeepSpeed
            averages gradients over ranks; the factor world_size cancels that.

    Raises:
        Diverged: A loss or the gradient is not finite, on every rank; the step is not applied.
    """
    assert microbatches, "a rank without tokens needs an empty microbatch: backward is a collective"
    lr = float(engine.get_lr()[0])
    totals: dict[str, float] = {}
    all_finite = True
    for number, microbatch in enumerate(microbatches, start=1):
        is_last = number == len(microbatches)
        engine.set_gradient_accumulation_boundary(is_last)
        loss, metrics = loss_fn(engine, microbatch)
        is_finite = bool(torch.isfinite(loss.detach()))
        all_finite = all_finite and is_finite
        engine.backward(loss * engine.world_size, scale_wrt_gas=False)
        for name, value in metrics.items():
            if name.endswith("_max"):
                totals[name] = max(totals.get(name, value), value)
            else:
                totals[name] = totals.get(name, 0) + value

    totals["bad_losses"] = 0.0 if all_finite else 1.0
    totals = _reduce(totals, engine.device)
    if totals.pop("bad_losses"):
        engine.optimizer.zero_grad()
        raise Diverged(f"{label}: the loss is not finite; the optimizer step was not applied")
    engine.step()
    if not engine.was_step_applied():
        raise Diverged(f"{label}: the gradient is not finite; the optimizer step was not applied")
    return StepResult(metrics=totals, grad_norm=float(engine.get_global_grad_norm()), lr=lr)


def _reduce(metrics: dict[str, float], device: torch.device) -> dict[str, float]:
    """Reduce over all ranks: the maximum of names that end in _max, the sum of the others. All ranks have all names."""
    dist = torch.distributed
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    maxima: list[str] = []
    sums: list[str] = []
    for name in sorted(metrics):
        names = maxima if name.endswith("_max") else sums
        names.append(name)

    reduced: dict[str, float] = {}
    for op, names in ((dist.ReduceOp.MAX, maxima), (dist.ReduceOp.SUM, sums)):
        values = torch.tensor([metrics[name] for name in names], dtype=dtype, device=device)
        dist.all_reduce(values, op=op)
        reduced.update(zip(names, values.tolist(), strict=True))
    return reduced


def export(engine: Engine, tokenizer: Any, folder: Path, source: ModelConfig) -> None:
    """Write the model as a Hugging Face folder in safetensors with its tokenizer, on rank 0.

    Under LoRA the model is merged, and its folder `adapter` has the adapter.

    Args:
        source: Source of the model, see `export.write_model`.
    """
    dtype = "bfloat16" if engine.bfloat16_enabled() else "float32"
    merged = _copy_weights(FullWeights(engine), dtype)
    adapter = _copy_weights(FullWeights(engine, adapters=True), dtype)
    try:
        if engine.global_rank == 0:
            write_model(engine.module, tokenizer, merged, folder, source)
            if adapter:
                lora.write_adapter(engine.module, adapter, folder / lora.FOLDER)
                tokenizer.save_pretrained(folder / lora.FOLDER)
            match_folder_permissions(folder)
    finally:  # without it a full disk would leave the other ranks in the barrier, and no checkpoint could follow
        torch.distributed.barrier()


def _copy_weights(weights: FullWeights, dtype: Dtype) -> dict[str, torch.Tensor]:
    copies: dict[str, torch.Tensor] = {}
    for bucket in weights.buckets(EXPORT_BUCKET_BYTES, dtype):
        copies |= {name: tensor.clone() for name, tensor in bucket}
    return copies


def offload_states(engine: Engine) -> None:
    """Move gradients, AdamW's moments and its float32 weights to host memory; the model's weights stay."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    _offload_adam_states(engine)
    engine.offload_states(include=[State.lp_grads, State.contiguous_grad_buffer])  # also empties the CUDA cache


def reload_states(engine: Engine) -> None:
    """Move back what `offload_states` moved."""
    for tensor in _adam_tensors(engine):
        tensor.data = tensor.data.to(engine.device, non_blocking=True, copy=True)  # later kernels queue behind the copy
    engine.reload_states()


def _offload_adam_states(engine: Engine) -> None:
    """Move AdamW's states into pinned buffers, which the engine keeps for the next time.

    DeepSpeed's own call serves the states of its FusedAdam only, and this optimizer is torch's AdamW. Pageable memory
    would be allocated anew each time, and copied through a small pinned buffer of the driver.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    buffers = vars(engine).setdefault(HOST_BUFFERS, {})  # index in `_adam_tensors` -> buffer
    tensors = _adam_tensors(engine)
    for index, tensor in enumerate(tensors):
        buffer = buffers.get(index)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = accelerator.pin_empty_like(tensor.data, device="cpu")
            buffers[index] = buffer
        buffer.copy_(tensor.data, non_blocking=True)
    accelerator.synchronize()
    for index, tensor in enumerate(tensors):
        tensor.data = buffers[index]


def _adam_tensors(engine: Engine) -> list[torch.Tensor]:
    """Return AdamW's float32 weights and its moments; before the first step there are no moments."""
    tensors = [*engine.optimizer.fp32_partitioned_groups_flat]
    for state in engine.optimizer.optimizer.state.values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    return tensors


def save_checkpoint(engine: Engine, folder: Path, tag: str) -> None:
    """Write trained parameters, optimizer and schedule of every rank under folder/tag; wait for all ranks.

    Frozen parameters are left out: a resume reads them from the model.
    """
    adam = engine.optimizer.optimizer
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        if not adam.state[flat]:  # before the first step: without Adam's initial state a conversion fails
            moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[flat] = {"step": 0, **moments}
    _convert_step_counts(engine)
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False, exclude_frozen_parameters=True)


def universal_folder(folder: Path, tag: str) -> Path:
    return folder / f"{tag}.universal"


def convert_checkpoint(folder: Path, tag: str) -> None:
    """Convert a checkpoint of `save_checkpoint` into one in `universal_folder` that any number of ranks can load.

    This is no collective: one rank calls it. Meanwhile the disk has three copies of the state.
    """
    from deepspeed.checkpoint import ds_to_universal

    target = universal_folder(folder, tag)
    shutil.rmtree(target, ignore_errors=True)  # left by a process that died in a conversion
    options = Namespace(
        input_folder=tag,
        output_folder=f"{target.name}/{tag}",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
    )
    quiet = io.StringIO()
    # DeepSpeed uses the folders as patterns, and fails on a "+" or a bracket: relative paths have none.
    with contextlib.chdir(folder), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        ds_to_universal.main(options)


def load_checkpoint(engine: Engine, folder: Path, tag: str, *, universal: bool = False) -> None:
    """Load a checkpoint of the same number of ranks, or with `universal` one of `convert_checkpoint`.

    DeepSpeed unpickles the files: load only the run's own folder.

    Raises:
        FileNotFoundError: The folder has no such checkpoint.
        ValueError: It is of another model, or the optimizer's state is not that of its step.
    """
    engine._config.load_universal_checkpoint = universal  # read at each load
    source = universal_folder(folder, tag) if universal else folder
    path, _ = engine.load_checkpoint(str(source), tag=tag, custom_load_fn=_load_trained)
    if path is None:
        raise FileNotFoundError(f"{source / tag} holds no ZeRO-3 checkpoint of {engine.world_size} ranks")
    if universal:
        _load_buffers(engine.module, folder / tag)
    _check_optimizer(engine, source / tag)
    _convert_step_counts(engine)


def _check_optimizer(engine: Engine, source: Path) -> None:
    """Check that Adam has made as many steps as the model: DeepSpeed compares the two nowhere.

    Raises:
        ValueError: The numbers differ: the next update would start with other moments.
    """
    num_steps = engine.global_steps - engine.skipped_steps
    adam = engine.optimizer.optimizer
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        state = adam.state.get(flat, {})
        count = int(state.get("step", 0))
        if count != num_steps:
            raise ValueError(
                f"{source}: the optimizer's state was not restored: Adam has made {count} steps, and the model "
                f"{num_steps}"
            )


def _load_buffers(model: torch.nn.Module, checkpoint: Path) -> None:
    """Load the persistent buffers, which DeepSpeed's universal checkpoint lacks, from any rank's file."""
    file = min(checkpoint.glob("*_model_states.pt"))
    saved = torch.load(file, map_location="cpu", weights_only=False)["module"]
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.copy_(saved[name])


def _convert_step_counts(engine: Engine) -> None:
    """Set the step count of each sub-group to the type of its optimizer; loaded counts may have another type."""
    adam = engine.optimizer.optimizer
    is_torch = isinstance(adam, torch.optim.AdamW)
    for flat, state in adam.state.items():
        count = int(state["step"])
        if is_torch:
            state["step"] = torch.tensor(float(count), device=flat.device)
        else:
            state["step"] = count


def _load_trained(*, src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
    """Load strictly, except for frozen parameters, which `save_checkpoint` leaves out."""
    missing, unexpected = dst.load_state_dict(src, strict=False)
    trained = {name for name, parameter in dst.named_parameters() if parameter.requires_grad}
    if unexpected or trained & set(missing):
        raise ValueError(f"the checkpoint is of another model: it misses {missing} and has also {unexpected}")
