"""A bucket URL becomes the right store, or one clear line without secrets."""

import sys
from pathlib import Path

import pytest

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.store import Tier
from bucketrl.bucket.stores import open_store

SECRET = "very-secret"


@pytest.fixture(autouse=True)
def _no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        (f"s3://key:{SECRET}@bucket/run", "carries credentials"),
        (f"s3://{SECRET}@bucket/run", "carries credentials"),
        (f"gs://{SECRET}@bucket/run", "carries credentials"),
        (f"abfs://user:{SECRET}@account/run", "carries credentials"),
        (f"s3://bucket/run?secret={SECRET}", "unknown option 'secret'"),
        (f"s3://bucket/run?endpoint_url=http://user:{SECRET}@host", "endpoint_url: carries credentials"),
        ("s3://bucket/run?endpoint_url=localhost:9000", "endpoint_url: 'localhost:9000' is no endpoint"),
        ("s3://bucket/run?endpoint_url=", "endpoint_url: '' is no endpoint"),
        ("s3:///run", "'' is no bucket name"),
        ("s3://a bucket/run", "'a bucket' is no bucket name"),
        ("s3://bucket/a/../b", "the prefix has"),
        ("s3://bucket/a//b", "the prefix has"),
        ("hf://models/owner/name", "want hf://buckets/<owner>/<name>"),
        ("hf://buckets/owner", "want hf://buckets/<owner>/<name>"),
        (f"gs://bucket/run?token={SECRET}", "not supported"),
        (f"simplecache::https://x/{SECRET}", "not supported"),
        ("nonsense://x/y", "nonsense"),
    ],
)
def test_a_url_that_cannot_be_a_bucket_is_one_clear_line_without_secrets(url: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        open_store(url)
    message = str(caught.value)
    assert says in message
    assert SECRET not in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_in_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, f"http://user:{SECRET}@host")
    with pytest.raises(UserError, match=f"{name}: carries credentials") as caught:
        open_store("s3://bucket/run")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("scheme", "module"), [("s3", "s3fs"), ("hf", "huggingface_hub")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"bucketrl.bucket.stores.{scheme}", raising=False)
    url = {"s3": "s3://bucket/run", "hf": "hf://buckets/owner/name"}[scheme]
    with pytest.raises(UserError, match=rf"{module}.*pip install 'bucketrl\[{scheme}\]'"):
        open_store(url)


def test_paths_and_file_urls_are_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    odd = "runs/a@b #1 100%?"
    open_store(odd).put("log/0", b"x")
    assert open_store(f"file://{tmp_path}/{odd}").get("log/0") == b"x"
    assert (tmp_path / odd / "log" / "0").read_bytes() == b"x"
    assert open_store(odd).url == f"{tmp_path}/{odd}"


def test_opening_a_folder_writes_nothing(tmp_path: Path) -> None:
    assert open_store(str(tmp_path / "new")).tier == Tier.CREATE
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_bucket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; give a folder"):
        open_store(str(tmp_path / "file"))


def test_memory_stores_of_one_name_share_their_objects() -> None:
    open_store("memory://open-store-test").put("a", b"x")
    assert open_store("memory://open-store-test").get("a") == b"x"
    assert list(open_store("memory://open-store-test-2").list("")) == []


def test_the_printed_url_names_the_place() -> None:
    url = "s3://bucket/run/1?endpoint_url=http://127.0.0.1:9"
    assert open_store(url).url == url
    assert open_store("s3://bucket/run/").url == "s3://bucket/run"
    assert open_store("hf://buckets/owner/name/run").url == "hf://buckets/owner/name/run"
