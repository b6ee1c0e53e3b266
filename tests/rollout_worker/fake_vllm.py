"""A stand-in for `vllm serve`: its routes and formats over real sockets, a made-up distribution for a model,
and every mistake in its command line and every failure that an engine has to survive.
"""

import asyncio
import json
import math
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

VOCABULARY = 64
BASE = "served-base"


class FakeVllm:
    """Attributes may be changed while it runs."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        """Path by name."""
        self.loads: list[str] = []
        self.key = ""
        self.keys_seen: set[str] = set()
        # How it was started.
        self.logprobs_mode = "processed_logprobs"
        self.model_card_top_k = VOCABULARY
        self.runtime_updates = self.lora = self.sees_files = True
        self.max_rank, self.max_loras, self.max_model_len = 8, 3, 512
        self.max_new_tokens = 512
        self.processes = 1
        # How it fails.
        self.answers_base = False
        self.busy = 0
        """Completions that are still answered with 503."""
        self.cuts: list[int] = []
        """After how many tokens the next streams break off."""
        self.bad_logprob: float | None = 0.0
        """Sent instead of the fourth token's logprob unless it is 0."""
        self.token_s = 0.0
        self.queue_s = 0.0
        """Before the first token of a stream."""
        self.disconnected = 0
        self._looks = 0
        self.app = FastAPI()
        self.app.middleware("http")(self._authenticate)
        self.app.get("/health")(lambda: Response())
        self.app.get("/version")(lambda: {"version": "0.99.0"})
        self.app.get("/metrics")(self._metrics)
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/load_lora_adapter")(self._load)
        self.app.post("/v1/unload_lora_adapter")(self._unload)
        self.app.post("/v1/completions")(self._completions)

    async def _authenticate(self, request: Request, call_next: Any) -> Any:
        sent = request.headers.get("authorization", "")
        self.keys_seen.add(sent)
        if self.key and request.url.path.startswith("/v1") and sent != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await call_next(request)

    def _metrics(self) -> Response:
        return Response(
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
            f'vllm:lora_requests_info{{max_lora="{self.max_loras}",running_lora_adapters=""}} 1.0\n'
        )

    def _models(self) -> dict[str, Any]:
        base = {"id": BASE, "parent": None, "max_model_len": self.max_model_len}
        self._looks += 1
        # With several processes, connections go to each in turn, and only one has the adapters.
        names = self.adapters if self._looks % self.processes == 0 else {}
        return {"data": [base, *({"id": name, "parent": BASE} for name in names)]}

    async def _load(self, request: Request) -> Response:
        if not self.runtime_updates:
            return JSONResponse({"detail": "Not Found"}, 404)
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if not self.lora:
            return problem(500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora")
        if name in self.adapters:
            return problem(400, f"The lora adapter '{name}' has already been loaded.")
        config = path / "adapter_config.json"
        if not (self.sees_files and config.exists()):
            return problem(404, f"Loading lora {name} failed: No adapter found for <path>")
        rank = json.loads(config.read_text())["r"]
        if rank > self.max_rank:
            return problem(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}.")
        self.loads.append(name)
        self.adapters[name] = str(path)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        return Response() if self.adapters.pop(name, None) else problem(404, "cannot be found")

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        if self.busy > 0:
            self.busy -= 1
            return problem(503, "overloaded")
        name = body["model"]
        if name not in self.adapters and not self.answers_base:
            return problem(404, f"The model `{name}` does not exist.")
        served = BASE if self.answers_base else name
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        tokens = [list(self._draw(served, prompt, body)) for prompt in prompts]
        if body.get("stream"):
            return StreamingResponse(self._stream(served, prompts[0], tokens[0], body))
        choices = [
            self._choice(index, prompt, drawn)
            | ({"prompt_logprobs": self._score(served, prompt)} if "prompt_logprobs" in body else {})
            for index, (prompt, drawn) in enumerate(zip(prompts, tokens, strict=True))
        ]
        return JSONResponse({"model": served, "choices": choices})

    async def _stream(
        self, served: str, prompt: list[int], tokens: list[Any], body: dict[str, Any]
    ) -> AsyncIterator[str]:
        cut = self.cuts.pop(0) if self.cuts else None
        await asyncio.sleep(self.queue_s)
        try:
            for count, token in enumerate(tokens):
                if count == cut:
                    raise ConnectionResetError("cut")
                await asyncio.sleep(self.token_s)
                choice = self._choice(0, prompt, [token])
                if count < len(tokens) - 1:
                    choice["finish_reason"] = None
                yield f"data: {json.dumps({'model': served, 'choices': [choice]})}\n\n"
        except asyncio.CancelledError:
            self.disconnected += 1
            raise
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, prompt: list[int], drawn: list[Any]) -> dict[str, Any]:
        tokens, logprobs, tops = (list(column) for column in zip(*drawn, strict=True))
        return {
            "index": index, "token_ids": tokens, "prompt_token_ids": prompt, "finish_reason": "length",
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": tops},
        }  # fmt: skip

    def _draw(self, served: str, prompt: list[int], body: dict[str, Any]) -> Iterator[Any]:
        """Tokens with what is reported of each: its logprob and those of the most likely ones."""
        rng = random.Random(body.get("seed"))
        temperature, top_k = body.get("temperature", 1.0), body.get("top_k") or self.model_card_top_k
        if "top_k" in body:
            top_k = VOCABULARY
        context = list(prompt)
        for count in range(min(body["max_tokens"], self.max_new_tokens)):
            logits = self.logits(served, context)
            kept = sorted(logits, reverse=True)[top_k - 1]
            processed = [value / temperature if value >= kept else -math.inf for value in logits]
            weights = [math.exp(value) for value in processed]
            [token] = rng.choices(range(VOCABULARY), weights)
            reported = {
                "raw_logprobs": log_softmax(logits),
                "processed_logprobs": log_softmax(processed),
                "processed_logits": processed,
            }[self.logprobs_mode]
            likely = sorted(range(VOCABULARY), key=lambda t: -reported[t])[: body.get("logprobs", 0)]
            top = {f"token_id:{t}": max(reported[t], -9999.0) for t in {*likely, token}}
            logprob = reported[token] if count != 3 or self.bad_logprob == 0 else self.bad_logprob
            yield token, logprob, top
            context.append(token)

    def _score(self, served: str, prompt: list[int]) -> list[Any]:
        rows = [
            {str(prompt[n]): {"logprob": log_softmax(self.logits(served, prompt[:n]))[prompt[n]]}}
            for n in range(1, len(prompt))
        ]
        return [None, *rows]

    def logits(self, served: str, context: list[int]) -> list[float]:
        """Those of an adapter follow from its files' place, as two adapters are never in the same."""
        rng = random.Random(f"{self.adapters.get(served)} {context}")
        return [rng.gauss(0.0, 2.0) for _ in range(VOCABULARY)]


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def problem(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[int]:
    """The port. Connections are cut at the end."""
    listening = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
