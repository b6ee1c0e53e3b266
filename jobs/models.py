"""Which folder a configuration's `model.id` means."""

import os
from collections.abc import Callable
from pathlib import Path

from bucketrl.bucket.config import ModelConfig
from bucketrl.bucket.errors import UserError
from bucketrl.jobs.model_identity import TOKENIZER_FILES, WEIGHT_FILES, identify_model

__all__ = ["BUILT_IN", "TINY_ARITHMETIC", "default_cache", "identify_model", "resolve_model"]

TINY_ARITHMETIC = Path(__file__).parent / "tiny_arithmetic"
"""Made by `examples/make_tiny_arithmetic.py`."""

BUILT_IN = ("tiny-arithmetic", "smollm2-135m-instruct")

Progress = Callable[[str], None]
"""Called with one line before anything that takes more than a few seconds."""


def resolve_model(config: ModelConfig, *, cache_dir: Path | None = None, progress: Progress) -> Path:
    """A local transformers folder with safetensors weights and a tokenizer.

    A built-in name, a folder (an absolute path, or one with `/`, `.` or `~` in front) or a hub id. Built-in
    SmolLM2 is made once under `cache_dir` (default `~/.cache/bucketrl`, or `$BUCKETRL_CACHE`). Raises
    UserError.
    """
    if config.id in BUILT_IN and config.revision:
        raise UserError(f"model.revision {config.revision!r}: built-in {config.id} has none; leave it empty")
    if config.id == "tiny-arithmetic":
        return _checked(TINY_ARITHMETIC, config.id)
    if config.id == "smollm2-135m-instruct":
        from bucketrl.jobs.smollm2 import prepare_smollm2

        return _checked(prepare_smollm2((cache_dir or default_cache()) / "models", progress), config.id)
    folder = Path(config.id).expanduser()
    if folder.is_dir() or config.id.startswith(("/", "./", "../", "~")):
        if config.revision:
            raise UserError(f"model.revision {config.revision!r}: {config.id} is a folder; leave it empty")
        return _checked(folder.resolve(), config.id)
    return _checked(_from_hub(config, progress), config.id)


def default_cache() -> Path:
    return Path(os.environ.get("BUCKETRL_CACHE", "~/.cache/bucketrl")).expanduser()


def _checked(folder: Path, model_id: str) -> Path:
    if not folder.is_dir():
        raise UserError(
            f"model.id {model_id}: there is no such folder; give an existing one, a hub id, or one of "
            f"{', '.join(BUILT_IN)}"
        )
    for pattern, what in (
        ("config.json", "config.json"),
        ("*.safetensors", "safetensors weights"),
        ("tokenizer*", "tokenizer"),
    ):
        if not any(folder.glob(pattern)):
            raise UserError(f"model.id {model_id}: {folder} has no {what}; give a transformers model folder")
    return folder


def _from_hub(config: ModelConfig, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(
            f"model.id {config.id}: hub models need a package: pip install 'bucketrl[hf]'"
        ) from error
    progress(f"fetching {config.id} from the hub")
    try:
        folder = snapshot_download(
            config.id, revision=config.revision or None, allow_patterns=[*WEIGHT_FILES, *TOKENIZER_FILES]
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model.id {config.id}: not a folder, not one of {', '.join(BUILT_IN)}, and the hub did not give "
            f"it: {reason[:200]}"
        ) from error
    return Path(folder)
