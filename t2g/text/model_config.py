"""The config.json of a model on this machine."""

from pathlib import Path
from typing import Any

from t2g.errors import UserError


def malformed_config_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions with which transformers meets a value that a config.json may not have."""
    from huggingface_hub.errors import StrictDataclassError

    return (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError)


def load_local_config(model: str, revision: str | None = None) -> Any | None:
    """Return the config of a model in a folder or in this machine's hub cache.

    Returns:
        None without its files, or for an architecture that transformers does not know.

    Raises:
        UserError: A value in config.json has a wrong type or size.
    """
    from transformers import AutoConfig

    is_folder = Path(model).is_dir()
    try:
        return AutoConfig.from_pretrained(
            model, revision=None if is_folder else revision, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError):
        return None
    except malformed_config_errors() as error:
        reason = " ".join(str(error).split())
        raise UserError(f"config.json of {model} has a value that transformers refuses: {reason}; correct it") from None
