"""Configurations, model folders and bucket snapshots for the tests of the command."""

import json
import struct
from pathlib import Path
from typing import Any

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_model_files(folder: Path) -> Path:
    """What a model folder looks like from outside: enough to create a run, not to load it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    names += [f"model.layers.0.block.{name}.weight" for name in LINEAR]
    header: dict[str, Any] = {
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]}
        for i, name in enumerate(names)
    }
    header["model.norm.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [16 * len(names)] * 2}
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16 * len(names)))
    shape = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 96,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def toml(model: Path | str, /, **changes: str) -> str:
    """A valid configuration; `changes` replaces the lines of a section."""
    sections = {
        "model": f'id = "{model}"',
        "lora": "rank = 8",
        "task": 'kind = "arithmetic"',
        "sampling": "group_size = 4\nmax_tokens = 8",
        "algorithm": "steps = 3\ngroups_per_step = 2",
        "rollout": "max_model_len = 64",
    } | changes
    return 'name = "demo"\n' + "".join(f"[{name}]\n{lines}\n" for name, lines in sections.items())


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, with its contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
