"""Our top-level folders never stand in the way of packages of the same name, `kernels` above all.

A regular package `kernels` at the root would shadow Hugging Face's for whoever starts Python there, and
peft, transformers and vllm would fail at import.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORWARD_PASS = """
import torch, transformers, vllm
from vllm.v1.engine.async_llm import AsyncLLM
from peft import LoraConfig, get_peft_model
shape = transformers.Qwen3Config(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=32, use_hub_kernels=True,
)
model = get_peft_model(transformers.Qwen3ForCausalLM(shape), LoraConfig(r=2, target_modules="all-linear"))
logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
assert logits.shape == (1, 3, 32) and bool(logits.isfinite().all())
print("forward pass ok")
"""
FIND_KERNELS = "from importlib.util import find_spec; print(find_spec('kernels').origin)"


def python_at_the_root(code: str, *, root_on_path: bool) -> str:
    """What `code` prints when Python starts in the repository, with the root on sys.path or without."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    flags = [] if root_on_path else ["-P"]
    ensure = "import sys; assert ('' in sys.path) is " + str(root_on_path) + "\n"
    done = subprocess.run(
        [sys.executable, *flags, "-c", ensure + code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("root_on_path", [True, False], ids=["root on sys.path", "root not on sys.path"])
class TestBesideHuggingFaceKernels:
    def test_the_name_kernels_means_theirs(self, root_on_path: bool) -> None:
        """With PyPI's `kernels` installed, `import kernels` finds it and not our folder."""
        assert version("kernels")
        origin = Path(python_at_the_root(FIND_KERNELS, root_on_path=root_on_path).strip())
        assert not (origin.is_relative_to(ROOT) and not origin.is_relative_to(ROOT / ".venv")), origin
        assert "site-packages" in origin.parts

    @pytest.mark.slow
    def test_a_forward_pass_works_with_peft_and_vllm(self, root_on_path: bool) -> None:
        """transformers, peft and vllm import in one process, and a model with an adapter computes."""
        assert "forward pass ok" in python_at_the_root(FORWARD_PASS, root_on_path=root_on_path)


def test_the_kernels_folder_is_no_package() -> None:
    """A regular package would win over Hugging Face's wherever the root comes first on sys.path."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_sub_package_is_a_link_to_its_root_folder() -> None:
    """`src/bucketrl/<folder>` is a relative symlink to the folder at the root, in the working tree and in git; that
    of the kernels to one below."""
    package = ROOT / "src" / "bucketrl"
    folders = sorted(path for path in package.iterdir() if path.is_dir() and path.name != "__pycache__")
    assert {"api", "bucket", "jobs", "kernels", "learner", "planner", "proxy", "rollout_worker", "tasks"} <= {
        folder.name for folder in folders
    }
    for folder in folders:
        assert folder.is_symlink(), folder
        below = "/package" if folder.name == "kernels" else ""
        assert os.readlink(folder) == f"../../{folder.name}{below}"
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "src/bucketrl"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.splitlines()}
    assert {modes[f"src/bucketrl/{folder.name}"] for folder in folders} == {"120000"}
