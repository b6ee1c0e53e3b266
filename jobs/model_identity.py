"""What a model folder contains, by digest."""

import hashlib
from pathlib import Path

from bucketrl.bucket.records import ModelIdentity, sha256_hex

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
)


def identify_model(path: Path) -> ModelIdentity:
    """By content: two folders with the same files have the same identity, wherever they are."""
    return ModelIdentity(
        weights_sha256=_digest(path, WEIGHT_FILES), tokenizer_sha256=_digest(path, TOKENIZER_FILES)
    )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(folder: Path, patterns: tuple[str, ...]) -> str:
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return sha256_hex("".join(f"{path.name} {file_sha256(path)}\n" for path in files).encode())
