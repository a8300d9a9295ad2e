"""Check that the weights of a model folder are finite: NaN would be found only after engines and ranks have started."""

from contextlib import nullcontext
from pathlib import Path

from t2g.errors import UserError
from t2g.files import FileVersion, identify_file
from t2g.runs.progress import log_duration

CHUNK = 1 << 20  # weights that are checked at a time
QUIET_BYTES = 1 << 30  # reading more than this prints a line

_finite: set[FileVersion] = set()  # files of finite weights that this process has read


def check_finite_weights(key: str, model: str) -> None:
    """Check the safetensors files of a local model folder; of a hub name nothing is read.

    Raises:
        UserError: A weight is NaN or infinite; the message names the model of `key`, the file and the tensor.
    """
    if not Path(model).is_dir():
        return
    files = [file for file in sorted(Path(model).glob("*.safetensors")) if identify_file(file) not in _finite]
    size = sum(file.stat().st_size for file in files)
    with log_duration(f"reading the weights of {model}") if size > QUIET_BYTES else nullcontext():
        for file in files:
            if problem := _find_problem(file):
                raise UserError(f"{key}={model}: {file.name} has {problem}; take another copy or an earlier checkpoint")
            _finite.add(identify_file(file))


def _find_problem(file: Path) -> str:
    """Describe the first tensor of the file with weights that are not finite; "" if there is none."""
    import torch  # heavy
    from safetensors import SafetensorError, safe_open

    checked = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # 8-bit formats are for engines alone
    try:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                tensor = tensors.get_tensor(name)
                if tensor.dtype not in checked:
                    continue
                bad = 0
                for chunk in tensor.flatten().split(CHUNK):
                    if not chunk.sum().isfinite():  # ten times as fast as isfinite of each weight; it may overflow
                        bad += int((~chunk.isfinite()).sum())
                if bad:
                    return f"{bad:,} of {tensor.numel():,} weights that are NaN or infinite in {name}"
    except SafetensorError as error:
        return f"no readable weights ({error})"
    return ""
