"""Trains the model of `tiny.toml` from scratch: the same folder, byte for byte, on the same software.

    python examples/make_tiny_arithmetic.py [FOLDER]

A Qwen3 of some 100,000 weights that reads characters. Its corpus is a book of sums of which most were left
unanswered ("?"): the model learns to add, and to leave sums unanswered. At temperature 1 about a third of
its replies are right, which leaves reinforcement learning something to do. Takes about 4 minutes on one core.
"""

import argparse
import logging
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bucketrl.jobs.models import TINY_ARITHMETIC
from bucketrl.tasks.arithmetic import draw_sum

logger = logging.getLogger(__name__)

PAD, END_OF_TURN, USER, ASSISTANT = "<pad>", "<end>", "<user>", "<assistant>"
SPECIAL = (PAD, END_OF_TURN, USER, ASSISTANT)
CHARACTERS = "0123456789+-= ?"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

SEED = 1
STEPS = 1600
BATCH = 256
LEARNING_RATE = 2e-3
MAX_OPERAND = 99
UNANSWERED = 0.6
"""Share of the corpus without an answer."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character; anything else is dropped."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END_OF_TURN,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """head_dim 32 is the least that vLLM's attention takes on CPU."""
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def draw_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, [BATCH, length]; only the answer and its end are learned."""
    prompts, answers = [], []
    for _ in range(BATCH):
        question = draw_sum(rng, terms=2, max_operand=MAX_OPERAND, operators="+")
        prompts.append([{"role": "user", "content": question.text}])
        answer = "?" if rng.random() < UNANSWERED else question.reference
        answers.append(answer + END_OF_TURN)
    texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    heads = tokenizer(texts)["input_ids"]
    tails = tokenizer(answers)["input_ids"]
    length = max(len(head) + len(tail) for head, tail in zip(heads, tails, strict=True))
    ids = torch.full((BATCH, length), tokenizer.pad_token_id)
    labels = torch.full((BATCH, length), -100)
    for row, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        end = len(head) + len(tail)
        ids[row, :end] = torch.tensor(head + tail)
        labels[row, len(head) : end] = torch.tensor(tail)
    return ids, labels


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, 3.0 * (STEPS - step) / STEPS)
    )
    for step in range(STEPS):
        ids, labels = draw_batch(rng, tokenizer)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            logger.info("step %d: loss %.3f", step + 1, loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=TINY_ARITHMETIC)
    folder: Path = parser.parse_args().folder
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info("saved to %s", folder)


if __name__ == "__main__":
    main()
