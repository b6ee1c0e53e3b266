"""The engine over HTTP on a fake server: what it refuses, what it survives. On a real one: test_vllm_serve.py."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.jobs.arguments import parse
from bucketrl.rollout_worker.engine import DroppedCompletion, EngineCapacity
from bucketrl.rollout_worker.engines import create_engine, http_server, member
from bucketrl.rollout_worker.engines.http_checks import Draw, sampling_problem
from bucketrl.rollout_worker.engines.http_engine import HttpEngine
from bucketrl.rollout_worker.engines.pool import EnginePool
from bucketrl.rollout_worker.engines.settings import EngineSettings
from bucketrl.rollout_worker.options import WorkerOptions

from .engine_contract import make_settings, request
from .fake_vllm import FakeVllm, free_port, log_softmax, serving
from .fakes import until
from .tiny_model import RANK


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "RETRY_S", 0.02)
    monkeypatch.setattr(http_server, "RETRY_CAP_S", 0.1)


@pytest.fixture
def fake_settings(tmp_path: Path) -> EngineSettings:
    """A model folder with one matrix, which is all that the fake server's adapters need."""
    model = tmp_path / "model"
    model.mkdir()
    save_file({"model.q_proj.weight": np.zeros((4, 4), dtype=np.float32)}, model / "model.safetensors")
    return replace(make_settings(model), lora_targets=("q_proj",))


@pytest.fixture
def server() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def fake_url(server: FakeVllm) -> Iterator[str]:
    with serving(server.app) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def adapters(tmp_path: Path) -> dict[int, Path]:
    for version in (1, 2):
        (tmp_path / f"v{version}").mkdir()
        (tmp_path / f"v{version}" / "adapter_config.json").write_text(json.dumps({"r": RANK}))
        save_file(
            {"lora_A": np.zeros(1, dtype=np.float32)}, tmp_path / f"v{version}" / "adapter_model.safetensors"
        )
    return {version: tmp_path / f"v{version}" for version in (1, 2)}


@pytest.fixture
def started(fake_settings: EngineSettings, adapters: dict[int, Path], tmp_path: Path) -> Callable[..., Any]:
    """An engine with versions 1 and 2 on the server at a URL."""

    @asynccontextmanager
    async def start(url: str) -> AsyncIterator[HttpEngine]:
        engine = HttpEngine(fake_settings, url, cache_dir=tmp_path / "cache")
        try:
            await engine.start()
            for version, folder in adapters.items():
                await engine.add_adapter(version, folder)
            yield engine
        finally:
            await engine.close()

    return start


async def test_tokens_logprobs_and_what_the_server_tells(
    server: FakeVllm, fake_url: str, started: Callable[..., Any]
) -> None:
    async with started(f"{fake_url}/v1/") as engine:
        assert engine.name == "vllm 0.99.0 over HTTP"
        assert engine.capacity == EngineCapacity(1600, 64)
        drawn = await engine.generate(request(2, seed=3, prompt=(5, 6), prior=(7,), temperature=0.7))
        context = [5, 6, 7]
        [name] = [name for name in server.adapters if "-v2-" in name]
        for token, logprob in zip(drawn.token_ids, drawn.logprobs, strict=True):
            logits = [value / 0.7 for value in server.logits(name, context)]
            assert logprob == pytest.approx(log_softmax(logits)[token])
            context.append(token)
        assert drawn.finish_reason == "length"
    assert not server.adapters, "others use the server, too"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"runtime_updates": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"lora": False}, "--enable-lora"),
        ({"max_rank": 4}, "--max-lora-rank 8"),
        ({"max_loras": 2}, "--max-loras 3"),
        ({"max_model_len": 511}, "--max-model-len 512"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"logprobs_mode": "processed_logits"}, "--logprobs-mode processed_logprobs"),
        ({"model_card_top_k": 3}, "--generation-config vllm"),
        ({"sees_files": False}, "does not see .*cache folder"),
        ({"processes": 2}, "--api-server-count 1"),
        ({"answers_base": True}, "answered by served-base"),
        ({"key": "secret"}, "BUCKETRL_ENGINE_KEY"),
    ],
)
async def test_a_server_started_wrongly_is_refused_by_name(
    server: FakeVllm, fake_url: str, started: Callable[..., Any], wrong: dict[str, Any], words: str
) -> None:
    for name, value in wrong.items():
        setattr(server, name, value)
    with pytest.raises(UserError, match=words) as refused:
        async with started(fake_url):
            pass
    assert fake_url in str(refused.value)


async def test_the_key_is_sent_and_never_told(
    server: FakeVllm,
    fake_url: str,
    started: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    server.key = "s3cret-key"
    monkeypatch.setenv(http_server.KEY_VARIABLE, server.key)
    async with started(fake_url) as engine:
        await engine.generate(request(1, seed=0))
    assert server.keys_seen == {"Bearer s3cret-key"}
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("url", ["http://me:s3cret@host:1", "host:1", "ftp://host", "http://host:port", ""])
def test_urls_that_cannot_be_used(fake_settings: EngineSettings, tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="engine URL") as refused:
        create_engine("http", fake_settings, url=url, cache_dir=tmp_path)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"engine": "http"}, "engine_url"), ({"engine_url": "http://host"}, "engine_url"),
     ({"engine": "http", "engine_url": "http://host", "engines": 2}, "engines")],
)  # fmt: skip
def test_options_that_do_not_go_together(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"^{named}: "):
        WorkerOptions(worker_id="w0", cache_dir=tmp_path, **given)


@pytest.mark.parametrize("verb", [["rollout", "--proxy", "http://proxy"], ["evaluate"]])
def test_the_command_line_names_the_server(verb: list[str]) -> None:
    parsed = parse([*verb, "--bucket", "b", "--engine", "http", "--engine-url", "http://host:8000"])
    assert (parsed.engine, parsed.engine_url) == ("http", "http://host:8000")


def test_a_key_that_cannot_be_sent_is_not_quoted(
    fake_settings: EngineSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(http_server.KEY_VARIABLE, "s3cret\n")
    with pytest.raises(UserError, match=http_server.KEY_VARIABLE) as refused:
        HttpEngine(fake_settings, "http://host", cache_dir=tmp_path)
    assert "s3cret" not in str(refused.value)


async def test_adapters_that_the_server_lost_are_loaded_once_under_new_names(
    server: FakeVllm, fake_url: str, started: Callable[..., Any]
) -> None:
    async with started(fake_url) as engine:
        before, first = await engine.generate(request(1, seed=1)), list(server.loads)
        for name in first[1:]:
            del server.adapters[name]
        drawn = await asyncio.gather(*(engine.generate(request(1 + n % 2, seed=1)) for n in range(24)))
        assert drawn[0] == before
        again = server.loads[len(first) :]
        assert len(again) == 2
        assert not set(again) & set(first)


@pytest.fixture
def pooled(
    fake_settings: EngineSettings,
    adapters: dict[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """The same as a worker has it: in a pool, with version 1 proved."""
    monkeypatch.setattr(member, "RESTART_S", 0.001)

    @asynccontextmanager
    async def start(url: str) -> AsyncIterator[EnginePool]:
        make = lambda index: HttpEngine(fake_settings, url, cache_dir=tmp_path / "cache")  # noqa: E731
        pool = EnginePool(make, 1, group_size=2)
        try:
            await pool.start()
            await pool.add_adapter(1, adapters[1])
            expected = await pool.score((1, 2, 3, 4), 1)
            judge = lambda got: None if got == expected else "canary is off"  # noqa: E731
            assert await pool.prove(1, (1, 2, 3, 4), judge) is None
            yield pool
        finally:
            await pool.close()

    return start


@pytest.mark.parametrize("wrong", ["started with other flags", "another base model"])
async def test_a_server_that_was_restarted_wrongly_serves_nothing(
    server: FakeVllm, fake_url: str, pooled: Callable[..., Any], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is what it was: then each version is loaded and proved again."""
    async with pooled(fake_url) as pool:
        expected = await pool.generate(request(1, seed=1))
        logits, words = server.logits, "--logprobs-mode"
        if wrong == "another base model":
            monkeypatch.setattr(server, "logits", lambda name, context: logits(name, [*context, 0]))
            words = "version 1: canary is off"
        else:
            server.logprobs_mode = "raw_logprobs"
        server.adapters.clear()
        asked = asyncio.create_task(pool.generate(request(1, seed=1)))
        await until(lambda: words in pool.note)
        assert not asked.done()
        monkeypatch.undo()
        server.logprobs_mode = "processed_logprobs"
        assert await asyncio.wait_for(asked, 10) == expected
        assert pool.note == ""


async def test_a_server_that_was_restarted_between_two_versions_is_noticed(
    server: FakeVllm, adapters: dict[int, Path], fake_url: str, pooled: Callable[..., Any]
) -> None:
    async with pooled(fake_url) as pool:
        server.adapters.clear()
        server.logprobs_mode = "raw_logprobs"
        loading = asyncio.create_task(pool.add_adapter(2, adapters[2]))
        await until(lambda: "--logprobs-mode" in pool.note)
        server.logprobs_mode = "processed_logprobs"
        await asyncio.wait_for(loading, 10)
        assert pool.note == ""
        assert await pool.generate(request(2, seed=1))


async def test_the_base_model_is_never_taken_for_the_adapter(
    server: FakeVllm, fake_url: str, started: Callable[..., Any]
) -> None:
    async with started(fake_url) as engine:
        server.answers_base = True
        with pytest.raises(DroppedCompletion, match="does not serve the adapter"):
            await engine.generate(request(1, seed=1))
        with pytest.raises(IntegrityError, match="answered by served-base"):
            await engine.score((1, 2, 3), 1)


async def test_a_busy_server_is_asked_again(
    server: FakeVllm, fake_url: str, started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(fake_url) as engine:
        server.busy = 3
        assert await engine.generate(request(1, seed=1))
        monkeypatch.setattr(http_server, "OUTAGE_S", 0.3)
        server.busy = 10_000
        with pytest.raises(DroppedCompletion, match="HTTP 503"):
            await engine.generate(request(1, seed=1))


async def test_a_server_that_is_not_there_is_waited_for_and_named(
    started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "OUTAGE_S", 0.3)
    with pytest.raises(UserError, match=r"no answer for 0\.3 s .*vllm serve"):
        async with started(f"http://127.0.0.1:{free_port()}"):
            pass


async def test_requests_wait_while_the_server_restarts(server: FakeVllm, pooled: Callable[..., Any]) -> None:
    async with AsyncExitStack() as engines:
        with serving(server.app) as port:
            engine = await engines.enter_async_context(pooled(f"http://127.0.0.1:{port}"))
            expected = await engine.generate(request(1, seed=1))
        server.adapters.clear()
        waiting = asyncio.create_task(engine.generate(request(1, seed=1)))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        with serving(server.app, port):
            assert await waiting == expected


async def test_waiting_for_its_turn_is_no_outage(
    server: FakeVllm, fake_url: str, started: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose connection breaks after a long wait in the server's queue is sent again."""
    async with started(fake_url) as engine:
        expected = await engine.generate(request(1, seed=1))
        monkeypatch.setattr(http_server, "OUTAGE_S", 0.2)
        server.queue_s, server.cuts = 0.3, [0]
        assert await engine.generate(request(1, seed=1)) == expected


async def test_a_stream_that_breaks_off(server: FakeVllm, fake_url: str, started: Callable[..., Any]) -> None:
    """Before its first token it is begun again; later its completion is lost, and no other."""
    async with started(fake_url) as engine:
        expected = await engine.generate(request(1, seed=1))
        server.cuts = [0, 0]
        assert await engine.generate(request(1, seed=1)) == expected
        server.cuts = [5]
        with pytest.raises(DroppedCompletion, match="broke off"):
            await engine.generate(request(1, seed=1))
        assert await engine.generate(request(1, seed=1)) == expected


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"bad_logprob": None}, "logprob missing"),
        ({"bad_logprob": -9999.0}, "logprob not finite"),
        ({"max_new_tokens": 20}, "server's own limit"),
    ],
)
async def test_what_cannot_be_trained_on_is_dropped(
    server: FakeVllm, fake_url: str, started: Callable[..., Any], fault: dict[str, Any], reason: str
) -> None:
    async with started(fake_url) as engine:
        for name, value in fault.items():
            setattr(server, name, value)
        with pytest.raises(DroppedCompletion, match=reason):
            await engine.generate(request(1, seed=1))


async def test_an_abort_ends_the_request_in_the_server_and_returns_what_has_arrived(
    server: FakeVllm, fake_url: str, started: Callable[..., Any]
) -> None:
    async with started(fake_url) as engine:
        whole = await engine.generate(request(1, seed=1))
        server.token_s = 0.02
        asked = request(1, seed=1)
        running = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(0.15)
        await engine.abort(asked.request_id)
        cut = await running
        assert cut.finish_reason == "abort"
        assert 0 < len(cut.token_ids) < len(whole.token_ids)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert cut.logprobs == whole.logprobs[: len(cut.token_ids)]
        for _ in range(100):
            await asyncio.sleep(0.01)
            if server.disconnected:
                break
        assert server.disconnected == 1


@given(st.integers(0, 2**32), st.floats(0.3, 4.0), st.floats(0.0, 0.005))
@settings(max_examples=25)
def test_the_proof_holds_for_every_distribution(seed: int, scale: float, noise: float) -> None:
    """Processed logprobs pass; raw ones, logits and a model card's top_k do not, whatever the model. (A
    default that takes away less than a few per cent of the probability can stay unseen.)"""
    rng = random.Random(seed)
    logits = [[rng.gauss(0.0, scale) for _ in range(50)] for _ in range(4)]

    def draws(rows: list[list[float]]) -> list[Draw]:
        made = []
        for row in rows:
            row = [value + rng.uniform(-noise, noise) for value in row]
            token = rng.randrange(50)
            likely = sorted(range(50), key=lambda t: -row[t])[:5]
            made.append(Draw(token, row[token], {str(t): row[t] for t in {*likely, token}}))
        return made

    raw = [log_softmax(row) for row in logits]
    cool = [log_softmax([value / 0.5 for value in row]) for row in logits]
    cut = [log_softmax([v if v >= sorted(row)[-3] else -9999.0 for v in row]) for row in logits]
    plain = draws(raw)
    scores = [row[draw.token] for row, draw in zip(raw, plain, strict=True)]
    assert sampling_problem(plain, draws(cool), draws(raw), scores, 0.02) is None
    assert "--logprobs-mode" in str(sampling_problem(plain, draws(raw), draws(raw), scores, 0.02))
    shifted = [score - 3 for score in scores]
    assert "--logprobs-mode" in str(sampling_problem(plain, draws(cool), draws(raw), shifted, 0.02))
    assert "--generation-config" in str(sampling_problem(plain, draws(cool), draws(cut), scores, 0.02))
