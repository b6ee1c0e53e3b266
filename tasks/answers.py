"""Answer rules: where in a completion the answer stands. Pure; any text in, an answer or None out."""

import re
import textwrap
from fractions import Fraction
from typing import Literal

AnswerRule = Literal["whole", "line", "first_number", "last_number", "boxed", "tag", "last_code_block"]

# A minus is a sign unless something stands right before it ("7-5"); commas only group thousands.
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<=\d-)\d+(?:\.\d+)?")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = "\\boxed{"
_CODE_BLOCK = re.compile(r"^[ \t]*```[^`\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def extract_answer(rule: AnswerRule, completion: str) -> str | None:
    """The answer, without surrounding white space; None if `rule` finds none.

    - `whole`: the whole completion
    - `line`: the last line that is not blank
    - `first_number`, `last_number`: a decimal number, thousands separators removed
    - `boxed`: the content of the last complete `\\boxed{...}`
    - `tag`: the content of the last complete `<answer>...</answer>`
    - `last_code_block`: the content of the last complete block between lines of ```, common indent removed
    """
    match rule:
        case "whole":
            answer = completion
        case "line":
            answer = ([""] + [line for line in completion.splitlines() if line.strip()])[-1]
        case "first_number" | "last_number":
            numbers = _NUMBER.findall(completion.replace("\N{MINUS SIGN}", "-"))
            answer = numbers[0 if rule == "first_number" else -1].replace(",", "") if numbers else ""
        case "boxed":
            answer = _last_boxed(completion) or ""
        case "tag":
            tagged = _TAG.findall(completion)
            answer = tagged[-1] if tagged else ""
        case "last_code_block":
            blocks = _CODE_BLOCK.findall(completion)
            answer = textwrap.dedent(blocks[-1]) if blocks else ""
    return answer.strip() or None


def same_number(answer: str, reference: str) -> bool:
    """Whether both are decimal numbers or fractions of equal value. Raises ValueError for a reference that
    is neither."""
    expected = Fraction(reference.replace(",", ""))
    try:
        return Fraction(answer.replace(",", "")) == expected
    except (ValueError, ZeroDivisionError):
        return False


def same_text(answer: str, reference: str) -> bool:
    """Equal up to white space."""
    return answer.split() == reference.split()


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    while start >= 0:
        depth, begin = 1, start + len(_BOXED)
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position]
        start = text.rfind(_BOXED, 0, start)
    return None
