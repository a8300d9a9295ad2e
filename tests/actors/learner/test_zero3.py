import errno
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.learner import zero3
from actors.learner.ranks import rank_environment
from actors.learner.zero3 import lr_factor
from t2g.config import OptimConfig, RoleConfig


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),  # the step after the last has reached the end
        ({"schedule": "linear", "final_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ({"schedule": "linear", "warmup_ratio": 0.5}, [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_schedule_over_four_steps(options: dict[str, object], expected: list[float]) -> None:
    optim = OptimConfig(lr=1, **options)
    assert [lr_factor(step, optim, 4) for step in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_meets_the_others_after_the_export(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise its next collective, that of a checkpoint, would meet theirs of the export."""
    barriers = list[str]()

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zero3, "FullWeights", lambda engine, adapters=False: None)
    monkeypatch.setattr(zero3, "_copy_weights", lambda weights, dtype: {})
    monkeypatch.setattr(zero3, "write_model", fail)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: barriers.append("export"))
    engine: Any = SimpleNamespace(global_rank=rank, module=None, bfloat16_enabled=lambda: False)
    failure = pytest.raises(OSError, match="No space left") if rank == 0 else nullcontext()
    with failure:
        zero3.export(engine, None, tmp_path, None)  # type: ignore[arg-type]
    assert barriers == ["export"]


def test_cosine_after_a_warm_up() -> None:
    """Eight steps, a quarter of them rising: final + (1 - final) * (1 + cos(pi * k / 6)) / 2 for k = 0 ... 6."""
    optim = OptimConfig(lr=1, schedule="cosine", warmup_ratio=0.25, final_lr_ratio=0.1)
    expected = [0.5, 1, 1, 0.9397114, 0.775, 0.55, 0.325, 0.1602886, 0.1]
    assert [lr_factor(step, optim, 8) for step in range(9)] == pytest.approx(expected)


def test_no_step_past_the_end_goes_below_the_final_rate() -> None:
    assert lr_factor(9, OptimConfig(final_lr_ratio=0.1), 4) == pytest.approx(0.1)


def test_memory_of_a_gpu_that_is_lent_stays_in_one_piece() -> None:
    assert rank_environment(RoleConfig(gpus=1)) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert rank_environment(RoleConfig(gpus=0.5), uses_cuda_ipc=True) == {}
    on_cpu = {
        "MALLOC_MMAP_THRESHOLD_": "8388608",
        "MALLOC_TRIM_THRESHOLD_": "268435456",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }
    assert rank_environment(RoleConfig()) == on_cpu


@pytest.mark.parametrize("on_gpu", [False, True])
def test_adamw_is_one_kernel_on_a_gpu_and_deepspeeds_where_its_states_are_in_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_gpu: bool
) -> None:
    class OfHost:
        compiles = True

        def __init__(self, trainable: list[torch.nn.Parameter], **options: Any) -> None:
            if not self.compiles:
                raise RuntimeError("no compiler")
            self.trainable = trainable
            self.options = options

    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(DeepSpeedCPUAdam=OfHost))
    monkeypatch.setattr(zero3, "_on_gpu", lambda: on_gpu)
    model = torch.nn.Linear(2, 3)
    optim = OptimConfig(lr=0.5, betas=(0.8, 0.9), weight_decay=0.25)
    model.bias.requires_grad_(False)

    here: Any = zero3._adamw(model, optim, offload=False)
    (group,) = here.param_groups
    assert type(here) is torch.optim.AdamW
    assert group["fused"] is on_gpu
    assert group["params"] == [model.weight]
    assert (group["lr"], group["betas"]) == (0.5, (0.8, 0.9))

    host: Any = zero3._adamw(model, optim, offload=True)
    assert isinstance(host, OfHost) is on_gpu
    if on_gpu:
        assert host.trainable == [model.weight]
        assert host.options == {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.25}
        OfHost.compiles = False
        host = zero3._adamw(model, optim, offload=True)
        assert "no compiler; torch's AdamW takes its place" in caplog.text
    assert type(host) is torch.optim.AdamW
    assert not host.param_groups[0]["fused"]


@pytest.mark.parametrize(("offload", "home"), [(False, ("none", False)), (True, ("cpu", True))])
def test_what_lies_in_the_host_is_pinned(offload: bool, home: tuple[str, bool]) -> None:
    zero = zero3._config(torch.nn.Linear(2, 3), "float32", 2, offload=offload)["zero_optimization"]
    for what in ("offload_param", "offload_optimizer"):
        assert (zero[what]["device"], zero[what]["pin_memory"]) == home


class PinningAccelerator:
    """Pinned memory without a GPU; counts the allocations."""

    def __init__(self) -> None:
        self.allocated: list[torch.Tensor] = []

    def pin_empty_like(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        self.allocated.append(torch.empty_like(tensor, device=device))
        return self.allocated[-1]

    def synchronize(self) -> None:
        pass


def test_offloaded_states_reuse_their_pinned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three allocations for a group, whatever the number of steps; the states are bit for bit those of AdamW alone."""
    accelerator = PinningAccelerator()
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    flats = [torch.nn.Parameter(torch.arange(5.0) + i) for i in range(2)]
    alone = [torch.nn.Parameter(flat.detach().clone()) for flat in flats]
    adam = torch.optim.AdamW(flats, lr=0.1)
    expected = torch.optim.AdamW(alone, lr=0.1)
    calls: list[str] = []
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=adam, fp32_partitioned_groups_flat=flats),
        device=torch.device("cpu"),
        offload_states=lambda include: calls.append("offload"),
        reload_states=lambda: calls.append("reload"),
    )
    for step in range(4):
        zero3.offload_states(engine)
        hosted = {tensor.data_ptr() for tensor in zero3._adam_tensors(engine)}
        assert hosted <= {buffer.data_ptr() for buffer in accelerator.allocated}
        zero3.reload_states(engine)
        assert not hosted & {tensor.data_ptr() for tensor in zero3._adam_tensors(engine)}
        for optimizer, parameters in ((adam, flats), (expected, alone)):
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() + step)
            optimizer.step()
    assert calls == ["offload", "reload"] * 4
    assert len(accelerator.allocated) == 3 * len(flats)
    for flat, value in zip(flats, alone, strict=True):
        assert torch.equal(flat, value)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(adam.state[flat][name], expected.state[value][name])
