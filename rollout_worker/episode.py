"""What was said in one completion, as messages, and what the environment answers to it.

    [ policy's turn ... <eos> | environment's messages, templated | policy's turn ... <eos> | ... ]
      loss mask 1               loss mask 0                         loss mask 1

The messages are found again from the tokens: an environment is pure, so a worker that goes on with another's
episode asks it once more for what it had answered.
"""

from dataclasses import replace
from itertools import groupby

from bucketrl.bucket.completions import Completion
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.prompts import Prompts, TemplatedPrompt
from bucketrl.rollout_worker.rewards import RewardFailed, RewardPool
from bucketrl.tasks.base import FinishReason, Message, Reward


class Episode:
    """One completion's conversation after its prompt."""

    def __init__(
        self,
        prompt: TemplatedPrompt,
        prompts: Prompts,
        rewards: RewardPool,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        """`stop_token_ids`: each ends a turn of the policy."""
        self._prompt = prompt
        self._prompts = prompts
        self._rewards = rewards
        self._stop_token_ids = stop_token_ids
        self._said: list[Message] = []
        self._turns = 0
        """Policy's turns among what was said; each has been answered."""

    def awaits_answer(self, completion: Completion) -> bool:
        """Whether the policy has ended a turn that the environment has not answered yet."""
        return (
            self._prompts.multi_turn
            and bool(completion.completion_token_ids)
            and completion.loss_mask[-1]
            and completion.completion_token_ids[-1] in self._stop_token_ids
        )

    async def answered(self, completion: Completion, max_tokens: int) -> Completion:
        """`completion` and the environment's answer; ended if there is none (`stop`) or if the policy could
        not say anything after it (`length`). Raises RewardFailed.

        The answer's tokens have no logprob, and the version of the turn that they answer.
        """
        answer: tuple[Message, ...] = ()
        for turn in policy_turns(completion)[self._turns :]:
            answer = await self._answer(turn)
        if not answer:
            return replace(completion, finish_reason="stop")
        try:
            tokens = self._prompts.between_turns(answer)
        except UserError as error:
            raise RewardFailed(f"environment's answer does not fit: {error}") from error
        if len(completion.completion_token_ids) + len(tokens) >= max_tokens:
            del self._said[-len(answer) :]  # the policy never hears it
            return replace(completion, finish_reason="length")
        return replace(
            completion,
            completion_token_ids=completion.completion_token_ids + tokens,
            behaviour_logprobs=completion.behaviour_logprobs + (0.0,) * len(tokens),
            policy_versions=completion.policy_versions + completion.policy_versions[-1:] * len(tokens),
            loss_mask=completion.loss_mask + (False,) * len(tokens),
        )

    async def reward(self, completion: Completion) -> Reward:
        """Of a completion that has ended. Raises RewardFailed."""
        reason: FinishReason = "stop" if completion.finish_reason == "stop" else "length"
        if not self._prompts.multi_turn:
            text = self._prompts.text_of(completion.completion_token_ids)
            return await self._rewards.score(self._prompt.prompt, text, reason)
        *answered, last = policy_turns(completion)
        for turn in answered[self._turns :]:
            await self._answer(turn)
        if self._turns == len(answered):
            self._said.append(self._message(last))
        return await self._rewards.score_episode(self._prompt.prompt, tuple(self._said), reason)

    async def _answer(self, turn: tuple[int, ...]) -> tuple[Message, ...]:
        said = (*self._said, self._message(turn))
        answer = await self._rewards.respond(self._prompt.prompt, said)
        self._said = [*said, *answer]
        self._turns += 1
        return answer

    def _message(self, turn: tuple[int, ...]) -> Message:
        return {"role": "assistant", "content": self._prompts.text_of(turn)}


def policy_turns(completion: Completion) -> list[tuple[int, ...]]:
    """The tokens of each of the policy's turns; the last one may not have ended."""
    marked = zip(completion.loss_mask, completion.completion_token_ids, strict=True)
    return [
        tuple(token for _, token in run) for sampled, run in groupby(marked, lambda pair: pair[0]) if sampled
    ]
