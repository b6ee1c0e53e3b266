"""Answer rules find what they say, in any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.tasks.answers import AnswerRule, extract_answer, same_number, same_text

RULES: tuple[AnswerRule, ...] = (
    "whole",
    "line",
    "first_number",
    "last_number",
    "boxed",
    "tag",
    "last_code_block",
)


@pytest.mark.parametrize(
    ("rule", "completion", "answer"),
    [
        ("whole", "  12 \n", "12"),
        ("whole", " \n ", None),
        ("line", "thinking\n 12 \n\n", "12"),
        ("line", "", None),
        ("last_number", "7 + 5 = 12.", "12"),
        ("last_number", "7-5", "5"),
        ("last_number", "7 - 5 = 2, or -2", "-2"),
        ("last_number", "it is \N{MINUS SIGN}3", "-3"),
        ("last_number", "1,234,567 people", "1234567"),
        ("last_number", "about 3.50", "3.50"),
        ("last_number", "none", None),
        ("last_number", "1,2", "2"),
        ("first_number", "12 = 7 + 5", "12"),
        ("first_number", "-4 degrees, not 4", "-4"),
        ("boxed", r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} then \boxed{2}", "2"),
        ("boxed", r"\boxed{1} then \boxed{2", "1"),
        ("boxed", "no box", None),
        ("tag", "<answer>a</answer><answer> b\nc </answer>", "b\nc"),
        ("tag", "<answer> <answer>x</answer>", "x"),
        ("tag", "<answer>cut off", None),
    ],
)
def test_rule_finds(rule: AnswerRule, completion: str, answer: str | None) -> None:
    assert extract_answer(rule, completion) == answer


@given(st.sampled_from(RULES), st.text())
def test_any_text_gives_a_stripped_answer_or_none(rule: AnswerRule, text: str) -> None:
    answer = extract_answer(rule, text)
    assert answer is None or (answer and answer == answer.strip())


@given(st.integers(), st.text(alphabet="abc =\n:()"), st.text(alphabet="abc =\n:()"))
def test_an_integer_between_words_is_found(number: int, before: str, after: str) -> None:
    text = f"{before} {number} {after}"
    assert extract_answer("first_number", text) == extract_answer("last_number", text) == str(number)


@given(st.integers(min_value=0))
def test_grouped_thousands_are_one_number(number: int) -> None:
    assert extract_answer("last_number", f"= {number:,}.") == str(number)


@given(st.text(alphabet=st.characters(exclude_characters="{}\\")), st.text(alphabet="ab }{"))
def test_the_content_of_a_box_is_found(content: str, before: str) -> None:
    found = extract_answer("boxed", f"{before}\\boxed{{x{content}}}")
    assert found == f"x{content}".strip()


@given(st.text(alphabet=st.characters(exclude_characters="<>")))
def test_the_content_of_a_tag_is_found(content: str) -> None:
    assert extract_answer("tag", f"a <answer>x{content}</answer>") == f"x{content}".strip()


def test_numbers_are_compared_by_value() -> None:
    assert same_number("12.0", "12")
    assert same_number("1/2", "0.5")
    assert same_number("1,000", "1000")
    assert not same_number("13", "12")
    assert not same_number("twelve", "12")
    assert not same_number("1/0", "12")


def test_a_reference_that_is_no_number_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(ValueError, match="twelve"):
        same_number("12", "twelve")


def test_text_is_compared_up_to_white_space() -> None:
    assert same_text(" a  b\n", "a b")
    assert not same_text("ab", "a b")
