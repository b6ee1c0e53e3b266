"""Tokenizer and prompts from a real model folder."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.loading import load_engine
from bucketrl.rollout_worker.options import WorkerOptions
from bucketrl.rollout_worker.prompts import Prompts, PromptTooLong

from .fake_run import make_run
from .fakes import FakeTask
from .tiny_model import save_model

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One token per character; the tokenizer adds a <s> of its own unless told not to."""
    words = ["<pad>", "</s>", "<s>", *map(chr, range(32, 123))]
    core = Core(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", bos_token="<s>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    save_model(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., WorkerOptions]:
    return lambda engine: WorkerOptions(worker_id="w0", cache_dir=tmp_path / "cache", engine=engine)


def test_prompts_are_the_chat_templates_tokens_and_nothing_more(
    model: Path, options: Callable[..., WorkerOptions]
) -> None:
    run = make_run(rollout={"max_model_len": 64})
    tokenizer, engine = load_engine(run, model, options("transformers"))
    assert engine.name.startswith("transformers ")
    prompt = Prompts(FakeTask(), tokenizer, run.config).get("train", 3)
    assert prompt.text == "<s>usertrain 3</s><s>assistant"
    templated = tokenizer.apply_chat_template(
        list(prompt.prompt.messages), tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(prompt.token_ids) == templated
    assert prompt.token_ids.count(2) == 2
    assert Prompts(FakeTask(), tokenizer, run.config).text_of(prompt.token_ids) == "usertrain 3assistant"


def test_the_longest_prompt_fits_and_a_longer_one_is_named(
    model: Path, options: Callable[..., WorkerOptions]
) -> None:
    """ "<s>usertrain 3</s><s>assistant" has 23 tokens."""
    tokenizer, _ = load_engine(make_run(), model, options("transformers"))
    exact = make_run(rollout={"max_model_len": 23 + 8}).config
    assert len(Prompts(FakeTask(), tokenizer, exact).get("train", 3).token_ids) == 23
    with pytest.raises(PromptTooLong, match="train prompt 33 has 24 tokens"):
        Prompts(FakeTask(), tokenizer, exact).get("train", 33)


def test_a_model_without_a_tokenizer_is_one_clear_line(
    tmp_path: Path, options: Callable[..., WorkerOptions]
) -> None:
    save_model(tmp_path / "bare")
    with pytest.raises(UserError, match=r"model\.id fake: its tokenizer has no chat template"):
        load_engine(make_run(), tmp_path / "bare", options("transformers"))
