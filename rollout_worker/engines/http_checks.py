"""What a vLLM server has to be started with, and the proof that it was: asked for before anything is sampled.

Not everything can be asked for. That the weights are the run's base model is proved by the canary of each
version that is loaded, before a request uses it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.engines.http_server import ServerRefused, VllmServer
from bucketrl.rollout_worker.engines.settings import EngineSettings

NEUTRAL: dict[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Named in every request, so that no default of the model card applies, also none too small for the proof."""
CLAMPED = -9999.0
"""The server writes this for minus infinity."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""
_LOOKS = 8
"""Fresh connections, each of which may reach another process of a server that has several."""
# Shorter than a KV block: no prompt's prefix is cached, and all are computed alike.
_PROMPTS = tuple(tuple(3 + (7 * i + 13 * j) % 60 for j in range(8)) for i in range(4))
_ALTERNATIVES = 5
_COOL = 0.5
_NOISE = {"float32": 0.01, "bfloat16": 0.2}
"""Between two computations of one logprob."""
_SHIFT = 0.02
"""Of the mean logprob; noise averages out."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled token, with what was reported at its position."""

    token: int
    logprob: float
    top: dict[str, float]
    """Logprobs of the most likely tokens, and of the sampled one."""


def check_model(url: str, cards: dict[str, dict[str, Any]], settings: EngineSettings) -> None:
    """Raises UserError unless a base model is served, for sequences as long as the run's."""
    lengths = [card.get("max_model_len") for card in cards.values() if card.get("parent") is None]
    if not lengths or not isinstance(lengths[0], int):
        raise UserError(f"engine {url}: /v1/models names no base model with its max_model_len; is it vLLM?")
    if lengths[0] < settings.max_model_len:
        raise UserError(
            f"engine {url}: serves sequences of {lengths[0]} tokens, rollout.max_model_len is "
            f"{settings.max_model_len}; start the server with --max-model-len {settings.max_model_len}"
        )


def load_failure(url: str, error: ServerRefused, settings: EngineSettings, folder: Path) -> UserError:
    """Why the first adapter could not be loaded, and the server's setting that is wrong."""
    if error.status == 404 and "No adapter found" in error.reason:
        return UserError(
            f"engine {url}: the server does not see {folder}; it must run on a machine that shares the worker's "
            "cache folder (--cache-dir), under the same path and with the right to read it"
        )
    if error.status in (404, 405):
        return UserError(
            f"engine {url}: has no /v1/load_lora_adapter; start the server with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
    if "LoRA is not enabled" in error.reason:
        return UserError(f"engine {url}: LoRA is not enabled; start the server with --enable-lora")
    if "max_lora_rank" in error.reason:
        rank = next((rank for rank in _RANKS if rank >= settings.lora_rank), settings.lora_rank)
        return UserError(
            f"engine {url}: adapters of lora.rank {settings.lora_rank} are more than it takes; start the server "
            f"with --max-lora-rank {rank}"
        )
    return UserError(f"engine {url}: cannot load an adapter of the run's model: {error}")


async def check_connections(server: VllmServer, name: str) -> None:
    """Raises UserError if not every connection reaches the process that has adapter `name` loaded. Several
    processes in front of one engine may give two adapters the same number, and then serve the wrong one."""
    for _ in range(_LOOKS):
        if name not in await server.persist(lambda: server.models(fresh=True)):
            raise UserError(
                f"engine {server.url}: an adapter is known to some connections only; start the server with "
                "--api-server-count 1, and give each worker a server of its own, not a load balancer"
            )


def check_slots(url: str, metrics: str, settings: EngineSettings) -> None:
    """Raises UserError if too few adapters may run at once. Servers with --disable-log-stats do not tell."""
    for found in re.finditer(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', metrics, re.MULTILINE):
        if int(found[1]) < settings.adapter_slots:
            raise UserError(
                f"engine {url}: runs {found[1]} adapters at once, the run needs {settings.adapter_slots} "
                f"(algorithm.max_staleness + 2); start the server with --max-loras {settings.adapter_slots}"
            )


def kv_tokens(metrics: str) -> int | None:
    """Size of the KV cache, of all data-parallel ranks together; None if the server does not tell."""
    ranks = re.findall(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    labels = [dict(re.findall(r'(\w+)="(\d+)"', rank)) for rank in ranks]
    try:
        # Only newer versions count for models whose layers need different blocks.
        sizes = [
            int(rank.get("kv_cache_size_tokens") or int(rank["num_gpu_blocks"]) * int(rank["block_size"]))
            for rank in labels
        ]
    except KeyError:
        return None
    return sum(sizes) or None


async def check_sampling(server: VllmServer, name: str, settings: EngineSettings) -> None:
    """Samples with adapter `name` at two temperatures and with the server's defaults, and scores what it got.
    Raises UserError that names the flag which is wrong."""

    async def draws(**sampling: float) -> list[Draw]:
        body = {
            "model": name, "prompt": _PROMPTS, "max_tokens": 1, "seed": 0, "logprobs": _ALTERNATIVES,
            "return_token_ids": True, "return_tokens_as_token_ids": True, **sampling,
        }  # fmt: skip
        choices = await server.persist(lambda: server.complete(body))
        return [_draw(choice, prompt) for choice, prompt in zip(choices, _PROMPTS, strict=True)]

    try:
        plain = await draws(temperature=1.0, **NEUTRAL)
        cool = await draws(temperature=_COOL, **NEUTRAL)
        default = await draws()
        scored = [(*prompt, draw.token) for prompt, draw in zip(_PROMPTS, plain, strict=True)]
        body = score_request(scored) | {"model": name}
        choices = await server.persist(lambda: server.complete(body))
        scores = [prompt_logprobs(choice, tokens)[-1] for choice, tokens in zip(choices, scored, strict=True)]
    except ServerRefused as error:
        raise UserError(
            f"engine {server.url}: refuses a request of the kind that is needed: {error}"
        ) from None
    except (KeyError, TypeError, ValueError, IndexError):
        raise UserError(
            f"engine {server.url}: answers without token ids or logprobs, or with a prompt other than the one "
            "sent; vLLM 0.24 or newer is needed"
        ) from None
    problem = sampling_problem(plain, cool, default, scores, _NOISE[settings.dtype])
    if problem is not None:
        raise UserError(f"engine {server.url}: {problem}")


def sampling_problem(
    plain: Sequence[Draw],
    cool: Sequence[Draw],
    default: Sequence[Draw],
    scores: Sequence[float],
    noise: float,
) -> str | None:
    """`plain` was drawn at temperature 1, `cool` at _COOL, `default` with nothing said, from the same prompts;
    `scores` are logprobs of `plain`'s tokens as prompt tokens, to which no setting applies."""
    mode = "start the server with --logprobs-mode processed_logprobs"
    if max(abs(draw.logprob - score) for draw, score in zip(plain, scores, strict=True)) > noise:
        return f"reported logprobs are not those of the model's distribution; {mode}"
    # Temperature T stretches the gaps between logprobs by 1/T, whatever the sampled token is.
    gaps = [
        (first.top[a] - first.top[b], second.top[a] - second.top[b])
        for first, second in zip(plain, cool, strict=True)
        for a, b in combinations(sorted(first.top.keys() & second.top.keys()), 2)
    ]
    before = sum(abs(gap) for gap, _ in gaps)
    after = sum(math.copysign(1, gap) * cooled for gap, cooled in gaps)
    # Flatter distributions are the same at every temperature, and say nothing.
    if before > _SHIFT * len(gaps) and after < (1 + 1 / _COOL) / 2 * before:
        return f"reported logprobs are those before the temperature is applied; {mode}"
    changes = [
        change
        for first, second in zip(plain, default, strict=True)
        for change in _changes(first.top, second.top)
    ]
    if max(map(abs, changes)) > noise or abs(sum(changes)) / len(changes) > _SHIFT:
        return (
            "sampling defaults of the model's generation_config.json apply; start the server with "
            "--generation-config vllm"
        )
    return None


def _changes(before: dict[str, float], after: dict[str, float]) -> list[float]:
    """Of the logprobs of the most likely tokens. A sampled token that is none of them is left out: the other
    draw may not report it."""
    least = sorted(after.values(), reverse=True)[:_ALTERNATIVES][-1]
    most_likely = sorted(before, key=before.__getitem__, reverse=True)[:_ALTERNATIVES]
    return [after.get(token, least) - before[token] for token in most_likely]


def score_request(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The body that asks for the logprobs of `prompts`, but for the model's name."""
    return {"prompt": prompts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, **NEUTRAL}


def prompt_logprobs(choice: dict[str, Any], token_ids: Sequence[int]) -> list[float]:
    """[len - 1], NaN where the server has none. Row 0 belongs to the first token, which nothing precedes.
    Raises KeyError, TypeError or ValueError for another format."""
    rows = choice["prompt_logprobs"][1:]
    values = [row[str(token)]["logprob"] for row, token in zip(rows, token_ids[1:], strict=True)]
    return [unclamped(value) if value is not None else math.nan for value in values]


def unclamped(logprob: float) -> float:
    return logprob if logprob > CLAMPED else -math.inf


def _draw(choice: dict[str, Any], prompt: tuple[int, ...]) -> Draw:
    if choice["prompt_token_ids"] != list(prompt):
        raise ValueError("the server has changed the prompt")
    [token], [logprob], [top] = (
        choice["token_ids"],
        choice["logprobs"]["token_logprobs"],
        choice["logprobs"]["top_logprobs"],
    )
    return Draw(int(token), float(logprob), {name: float(value) for name, value in top.items()})
