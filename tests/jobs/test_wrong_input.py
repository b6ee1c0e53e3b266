"""Wrong input to the command: one line on stderr, exit code 2, nothing written."""

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.jobs.worlds import save_model_files, snapshot, toml

from bucketrl.jobs.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the command, with a model in it."""
    save_model_files(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUCKETRL_WORKER_TOKEN", raising=False)
    monkeypatch.delenv("BUCKETRL_READ_TOKEN", raising=False)
    return tmp_path


def write(folder: Path, name: str = "x.toml", model: str = "./model", /, **changes: str) -> str:
    (folder / name).write_text(toml(model, **changes))
    return name


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command, which must fail as wrong input does; returns its line."""
    capsys.readouterr()
    before = snapshot(folder)
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert snapshot(folder) == before
    lines = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in said.err
    return lines[0]


@pytest.mark.parametrize("verb", [("run",), ("create", "--bucket", "bucket")], ids=["run", "create"])
class TestBeforeARun:
    def test_unknown_key(
        self, folder: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
    ) -> None:
        path = write(folder, algorithm="learning_rat = 1")
        line = refused(folder, capsys, verb[0], path, *verb[1:])
        assert line == "error: x.toml: algorithm.learning_rat: unknown key; did you mean learning_rate?"

    def test_missing_model(
        self, folder: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
    ) -> None:
        line = refused(folder, capsys, verb[0], write(folder, "x.toml", "./nowhere"), *verb[1:])
        assert "model.id ./nowhere: there is no such folder" in line

    def test_lora_target_that_the_model_lacks(
        self, folder: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
    ) -> None:
        path = write(folder, lora='rank = 8\ntarget_modules = ["q_proj", "query_proj"]')
        line = refused(folder, capsys, verb[0], path, *verb[1:])
        assert "lora.target_modules" in line
        assert "'query_proj'" in line
        assert "q_proj" in line

    def test_unwritable_bucket(
        self, folder: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
    ) -> None:
        """Not even root can make a folder in /proc."""
        line = refused(folder, capsys, verb[0], write(folder), "--bucket", "/proc/nowhere/bucket")
        assert "/proc/nowhere/bucket" in line
        assert "cannot be written" in line

    def test_a_file_in_place_of_a_bucket(
        self, folder: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
    ) -> None:
        (folder / "taken").write_text("")
        assert "is a file" in refused(folder, capsys, verb[0], write(folder), "--bucket", "taken")

    def test_bucket_of_another_run(
        self, folder: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
    ) -> None:
        bucket = "bucket" if verb[0] == "create" else "runs/demo/bucket"
        assert main(["create", write(folder), "--bucket", bucket]) == 0
        other = write(folder, "y.toml", algorithm="steps = 9\ngroups_per_step = 2")
        line = refused(folder, capsys, verb[0], other, *verb[1:])
        assert "belongs to run demo-" in line
        assert "algorithm.steps is 3, not 9" in line

    def test_a_model_that_cannot_fit(
        self, folder: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
    ) -> None:
        """Creating a run needs no memory; running it on this machine does."""
        config = folder / "model" / "config.json"
        config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 1000000'))
        path = write(folder)
        if verb[0] == "create":
            assert main(["create", path, "--bucket", "bucket"]) == 0
        else:
            line = refused(folder, capsys, "run", path)
            assert "needs at least" in line
            assert "GiB" in line


def test_too_few_commits_to_keep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(folder, capsys, "run", write(folder, algorithm="max_staleness = 4"), "--keep", "5")
    assert line == "error: --keep 5: a run with max_staleness 4 needs 6 commits or more"


def test_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` and `proxy` both say so before they write."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        path = write(folder)
        assert f"--port {port}" in refused(folder, capsys, "run", path, "--port", port)
        assert main(["create", path, "--bucket", "bucket"]) == 0
        line = refused(folder, capsys, "proxy", "--bucket", "bucket", "--port", port)
        assert f"--port {port}" in line
        assert "in use" in line


def test_a_proxy_that_others_can_reach_needs_a_token(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["create", write(folder), "--bucket", "bucket"]) == 0
    line = refused(folder, capsys, "proxy", "--bucket", "bucket", "--host", "0.0.0.0", "--port", "0")
    assert "BUCKETRL_WORKER_TOKEN" in line


@pytest.mark.parametrize("role", ["proxy", "rollout", "learner", "evaluate", "report", "status"])
def test_an_empty_bucket_holds_no_run(folder: Path, capsys: pytest.CaptureFixture[str], role: str) -> None:
    rest = ["--proxy", "http://127.0.0.1:9"] if role == "rollout" else []
    where = ["bucket"] if role == "report" else ["--bucket", "bucket"]
    assert "holds no run" in refused(folder, capsys, role, *where, *rest)


def test_an_audit_of_an_empty_bucket_is_no_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no run" in refused(folder, capsys, "audit", "bucket")


@pytest.mark.parametrize("role", ["rollout", "learner"])
class TestAgainstAProxy:
    def test_wrong_token(
        self, folder: Path, capsys: pytest.CaptureFixture[str], role: str, refusing_proxy: str
    ) -> None:
        """The line says which variable to look at, and never the token itself."""
        assert main(["create", write(folder), "--bucket", "bucket"]) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BUCKETRL_WORKER_TOKEN", "not-the-right-one")
            line = refused(folder, capsys, role, "--bucket", "bucket", "--proxy", refusing_proxy)
        assert "wrong bearer token" in line
        assert "check BUCKETRL_WORKER_TOKEN" in line
        assert "not-the-right-one" not in line

    def test_a_url_without_a_scheme(
        self, folder: Path, capsys: pytest.CaptureFixture[str], role: str
    ) -> None:
        assert main(["create", write(folder), "--bucket", "bucket"]) == 0
        line = refused(folder, capsys, role, "--bucket", "bucket", "--proxy", "localhost:8080")
        assert "want http://host:port" in line
        assert "TOKEN" not in line


def test_status_of_a_proxy_that_is_away_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No wrong input, so exit code 1; but no traceback either."""
    assert main(["status", "--proxy", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:9: ")


def test_a_bucket_url_with_credentials_is_refused_without_showing_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(folder, capsys, "create", write(folder), "--bucket", "s3://key:hunter2@bucket/run")
    assert "credentials" in line
    assert "hunter2" not in line


class _Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"error": "wrong bearer token: this request needs the value of BUCKETRL_WORKER_TOKEN"}'
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing_proxy() -> Iterator[str]:
    """Answers every request as the proxy answers a wrong token."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
