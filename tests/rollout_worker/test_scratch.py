"""Local adapter folders are private, and do not pile up however their owners end."""

import subprocess
import sys
from pathlib import Path

from bucketrl.rollout_worker.scratch import scratch_folder


def test_the_folder_goes_with_its_owner(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        (folder / "v0").mkdir()
        (folder / "v0" / "weights").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_two_owners_never_share(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert first != second
        assert first.exists()
        assert second.exists()


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from bucketrl.rollout_worker.scratch import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'weights').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with scratch_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]
