"""Keys: what is built parses back, and nothing else parses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.keys import GroupId

group_ids = st.builds(GroupId, st.integers(0, 9999), st.integers(0, 99_999_999))
attempts = st.from_regex(r"[a-z0-9][a-z0-9-]{0,80}", fullmatch=True)


@given(group_ids, attempts)
def test_keys_of_attempts_parse_back(group_id: GroupId, attempt: str) -> None:
    assert keys.parse_partial(keys.partial(group_id, attempt)) == (group_id, attempt)
    assert keys.parse_trajectory(keys.trajectory(group_id, attempt)) == (group_id, attempt)
    assert keys.parse_quarantine(keys.quarantine(group_id, attempt)) == (group_id, attempt)


@given(st.integers(0, 99_999_999))
def test_log_and_batch_keys_parse_back(number: int) -> None:
    assert keys.parse_log(keys.log(number)) == number
    assert keys.parse_batch(keys.batch(number, number)) == (number, number)


@given(st.lists(group_ids, min_size=2, max_size=2, unique=True))
def test_text_order_is_issue_order(pair: list[GroupId]) -> None:
    first, second = sorted(pair)
    assert str(first) < str(second)
    assert keys.trajectory(first, "z") < keys.trajectory(second, "a")


@given(st.integers(0, 10**9), st.integers(1, 99_999_999))
def test_ordinals_count_groups_across_epochs(ordinal: int, prompts: int) -> None:
    group_id = GroupId.from_ordinal(ordinal, prompts)
    assert group_id.index < prompts
    assert group_id.ordinal(prompts) == ordinal


@pytest.mark.parametrize("folder", [keys.policy(3, 1), keys.checkpoint(120, 12345)])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "shards/0001.safetensors"])
def test_artifact_files_parse_to_folder_and_name(folder: str, name: str) -> None:
    assert keys.parse_artifact(folder + name) == (folder, name)


@pytest.mark.parametrize(
    "key",
    [
        "policy/00000001-e0001/../../etc/passwd",
        "policy/00000001-e0001/.hidden",
        "policy/00000001-e0001//double",
        "policy/00000001-e0001/",
        "policy/00000001/adapter_model.safetensors",
        "policy/00000001-e0001/a\nb",
        "policy/00000001-e0001/back\\slash",
        "trajectories/00000001-e0001/file",
    ],
)
def test_artifact_keys_that_could_leave_their_folder_are_foreign(key: str) -> None:
    assert keys.parse_artifact(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "log/1.json",
        "log/00000001.json\n",
        "log/" + "\N{ARABIC-INDIC DIGIT ONE}" * 8 + ".json",
        "log/00000001.json.tmp",
        "log/x/00000001.json",
    ],
)
def test_log_keys_parse_only_as_built(key: str) -> None:
    assert keys.parse_log(key) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1-2",
        "0000-00000001\n",
        "0000-0000000x",
        "00000-0000001",
        "\N{ARABIC-INDIC DIGIT ONE}" * 4 + "-00000001",
    ],
)
def test_what_is_no_group_id_is_refused(text: str) -> None:
    with pytest.raises(IntegrityError, match="not a group id"):
        GroupId.parse(text)


@pytest.mark.parametrize("attempt", ["", "-a", "A", "a/b", "a.b", "a" * 82, "a\n"])
def test_what_is_no_attempt_id_is_refused(attempt: str) -> None:
    with pytest.raises(IntegrityError, match="not an attempt id"):
        keys.trajectory(GroupId(0, 1), attempt)
