"""Scratch folders are private, and outlive neither their process nor, for long, its violent death."""

import subprocess
import sys
from pathlib import Path

import pytest

from bucketrl.bucket.scratch import scratch_folder


def test_it_is_removed_at_the_end_whatever_happens(tmp_path: Path) -> None:
    def fail_inside() -> None:
        with scratch_folder(tmp_path, "learner-") as folder:
            (folder / "file").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert list(tmp_path.iterdir()) == []


def test_folders_in_use_are_left_alone(tmp_path: Path) -> None:
    with scratch_folder(tmp_path, "learner-") as one, scratch_folder(tmp_path, "learner-") as two:
        assert one != two
        assert one.is_dir()
        assert two.is_dir()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from bucketrl.bucket.scratch import scratch_folder\n"
        "with scratch_folder(pathlib.Path(sys.argv[1]), 'learner-') as folder:\n"
        "    (folder / 'file').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (abandoned,) = tmp_path.iterdir()
    (tmp_path / "learner-notes").mkdir()
    with scratch_folder(tmp_path, "learner-") as folder:
        assert not abandoned.exists()
        assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["learner-notes"]
