"""`bucket_layout.md` describes what the code writes: its examples, tables, keys and numbers are checked."""

import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.bucket.builders import run_record, worked_example

from bucketrl.bucket import keys, partials, records, snapshots, trajectories
from bucketrl.bucket.audit import audit
from bucketrl.bucket.completions import MAX_POSITIVE_LOGPROB
from bucketrl.bucket.gc import DELETED_AT_ONCE, PROBE_AGE_S
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.records import PROTOCOL_VERSION, Record, decode, decode_log, sha256_hex
from bucketrl.bucket.retention import CHECKPOINTS_KEPT, LISTED, least_keep
from bucketrl.bucket.seal import SEAL_KEY
from bucketrl.bucket.sealed_table import MAX_BYTES, SealedTable
from bucketrl.bucket.store import Store
from bucketrl.bucket.trajectories import SCHEMA
from bucketrl.jobs import model_identity

DOCUMENT = (Path(__file__).parents[2] / "bucket_layout.md").read_text()
BLOCKS = dict(re.findall(r"^```(?:json )?(\S+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL))
RECORD_KEYS = sorted(name for name in BLOCKS if name.endswith(".json"))
SHOWN_ROWS = "trajectories/0000-00000002/w1-0002.parquet"
SHOWN_PARTIAL = "partial/0001-00000001/w3-0001.parquet"

KINDS = {
    "run.json": records.RunRecord,
    "batches/": records.BatchRecord,
    "quarantine/": records.QuarantineRecord,
    "evaluations/": records.EvaluationRecord,
    "snapshots/": records.SnapshotRecord,
    "gc/": records.BoundaryRecord,
}


def parsed(key: str) -> Record:
    data = BLOCKS[key].encode()
    if key.startswith(keys.LOG_PREFIX):
        return decode_log(data)
    return decode(next(kind for prefix, kind in KINDS.items() if key.startswith(prefix)), data)


def masked(value: Any) -> Any:
    """Without sizes and digests, which depend on the version of the Parquet library."""
    if isinstance(value, dict):
        hidden = ("size", "sha256", "parent_sha256", SEAL_KEY)
        return {name: masked(item) for name, item in value.items() if name not in hidden}
    return [masked(item) for item in value] if isinstance(value, list) else value


def test_every_kind_of_object_has_an_example() -> None:
    shown = {key.split("/")[0] for key in RECORD_KEYS}
    assert shown == {"run.json", "log", "batches", "quarantine", "evaluations", "snapshots", "gc"}
    assert {"keys", "rows", "metadata", "partial_rows"} <= BLOCKS.keys()


@pytest.mark.parametrize("key", RECORD_KEYS)
def test_an_example_is_the_very_bytes_of_a_record(key: str) -> None:
    assert parsed(key).encode() == BLOCKS[key].encode()


def test_examples_are_what_the_code_writes_for_the_worked_example(memory: Store) -> None:
    written = worked_example(memory)
    compared = [key for key in RECORD_KEYS if key in written]
    assert len(compared) == 5
    for key in compared:
        assert masked(json.loads(BLOCKS[key])) == masked(json.loads(written[key].encode()))


def test_examples_name_each_other_by_their_true_digests() -> None:
    """A reader may check with `sha256sum` what the text says."""
    digests = {key: sha256_hex(BLOCKS[key].encode()) for key in RECORD_KEYS}
    start, commit = json.loads(BLOCKS["log/00000003.json"]), json.loads(BLOCKS["log/00000004.json"])
    assert start["parent_sha256"] == digests["log/00000002.json"]
    assert commit["parent_sha256"] == digests["log/00000003.json"]
    assert json.loads(BLOCKS["snapshots/00000004.json"])["record_sha256"] == digests["log/00000004.json"]
    batch = BLOCKS["batches/00000002-e0002.json"].encode()
    assert commit["batch"] == {
        "key": "batches/00000002-e0002.json",
        "size": len(batch),
        "sha256": digests["batches/00000002-e0002.json"],
    }


def test_the_listing_is_that_of_the_worked_example(memory: Store) -> None:
    worked_example(memory)
    prefixes = [value for name, value in vars(keys).items() if name.endswith("_PREFIX")]
    found = [info.key for prefix in prefixes for info in memory.list(prefix)] + [keys.RUN]
    assert BLOCKS["keys"].splitlines() == sorted(found)


def rebuilt(key: str) -> str | None:
    """`key` as keys.py builds it from what keys.py parses from it."""
    if key == keys.RUN:
        return keys.RUN
    if (seq := keys.parse_log(key)) is not None:
        return keys.log(seq)
    if (batch := keys.parse_batch(key)) is not None:
        return keys.batch(*batch)
    if (attempt := keys.parse_trajectory(key)) is not None:
        return keys.trajectory(*attempt)
    if (attempt := keys.parse_partial(key)) is not None:
        return keys.partial(*attempt)
    if (attempt := keys.parse_quarantine(key)) is not None:
        return keys.quarantine(*attempt)
    if (seq := keys.parse_snapshot(key)) is not None:
        return keys.snapshot(seq)
    if (step := keys.parse_boundary(key)) is not None:
        return keys.boundary(step)
    if (artifact := keys.parse_artifact(key)) is not None:
        kind, numbers = artifact[0].rstrip("/").split("/")
        build = {"policy": keys.policy, "checkpoints": keys.checkpoint}[kind]
        return build(*map(int, numbers.split("-e"))) + artifact[1]
    if match := re.fullmatch(r"evaluations/(\d+)/(.+)\.json", key):
        return keys.evaluation(int(match[1]), match[2])
    return None


def test_every_key_in_the_text_is_one_that_the_code_builds() -> None:
    folders = "log|policy|checkpoints|batches|trajectories|partial|quarantine|evaluations|snapshots|gc"
    named = set(re.findall(rf"(?:{folders})/\d[^\s`…]*\.(?:json|parquet|safetensors)", DOCUMENT))
    named |= set(BLOCKS["keys"].splitlines())
    assert len(named) > 20
    for key in named:
        assert rebuilt(key) == key
    for group_id in re.findall(r"\b\d{4}-\d{8}\b", DOCUMENT):
        assert str(GroupId.parse(group_id)) == group_id


def table_after(marker: str, column: int = 1) -> dict[str, str]:
    """First column (without backticks) to another column of the table that follows the marker."""
    body = DOCUMENT.split(f"<!-- {marker} -->\n", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines()[2:]]
    return {row[0].strip().strip("`"): row[column] for row in cells}


@pytest.mark.parametrize("marker", re.findall(r"<!-- fields: (.*?) -->", DOCUMENT))
def test_a_field_table_has_exactly_the_fields_of_the_record(marker: str) -> None:
    name, _, base = marker.partition(" - ")
    wanted = set(getattr(records, name).model_fields)
    if base:
        wanted -= set(getattr(records, base).model_fields)
    assert set(table_after(f"fields: {marker}")) == wanted


def test_every_record_has_a_field_table() -> None:
    """Those without one are written out in the sentence around them."""
    tables = {marker.split(" - ")[0] for marker in re.findall(r"<!-- fields: (.*?) -->", DOCUMENT)}
    models = {
        name
        for name, value in vars(records).items()
        if isinstance(value, type) and issubclass(value, Record) and value is not Record
    }
    assert models - tables == {"GroupRef", "SkippedGroup", "PolicyRef", "CheckpointRef", "Consumed"}
    for name in models - tables:
        for field in getattr(records, name).model_fields:
            assert f"`{field}`" in DOCUMENT.split("### 6.3")[1].split("### 6.4")[0]


@pytest.mark.parametrize(
    ("marker", "table"), [("columns", trajectories.TABLE), ("partial columns", partials.TABLE)]
)
def test_a_column_table_is_the_schema(marker: str, table: SealedTable) -> None:
    physical = {
        name: "list of " + leaves[0][0]
        if leaves[0][1]
        else leaves[0][0] + (" (UTF-8)" if leaves[0][0] == "BYTE_ARRAY" else "")
        for name, leaves in table.leaves.items()
    }
    if "reward_parts" in physical:
        physical["reward_parts"] = "map of BYTE_ARRAY (UTF-8) to DOUBLE"
    assert table_after(marker) == physical


def test_the_example_rows_and_metadata_are_the_objects(memory: Store) -> None:
    worked_example(memory)
    file = pq.ParquetFile(BytesIO(memory.get(SHOWN_ROWS)))
    rows = [row | {"reward_parts": dict(row["reward_parts"])} for row in file.read().to_pylist()]
    assert [list(row) for row in rows] == [SCHEMA.names] * 2
    assert json.loads(BLOCKS["rows"]) == rows
    metadata = {name.decode(): value.decode() for name, value in file.metadata.metadata.items()}
    assert masked(json.loads(BLOCKS["metadata"])) == masked(metadata)
    partial = pq.ParquetFile(BytesIO(memory.get(SHOWN_PARTIAL))).read().to_pylist()
    assert [list(row) for row in partial] == [partials.TABLE.schema.names] * 2
    assert json.loads(BLOCKS["partial_rows"]) == partial


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    assert f"Protocol version **{PROTOCOL_VERSION}**" in DOCUMENT
    assert f"more than {MAX_BYTES >> 20} MiB" in DOCUMENT
    assert f"about every {snapshots.EVERY} records" in DOCUMENT
    assert f"1 deletion per {DELETED_AT_ONCE} keys" in DOCUMENT
    assert "but the two newest of them" in DOCUMENT
    assert "that neither step 0 nor the steps N and N - 1 name" in DOCUMENT
    assert snapshots.KEPT == CHECKPOINTS_KEPT == 2
    assert "two passes at least ten minutes apart" in DOCUMENT
    assert PROBE_AGE_S == 10 * 60
    assert "at least `max_staleness + 2`" in DOCUMENT
    for staleness in (0, 4):
        assert least_keep(run_record(max_staleness=staleness).config) == staleness + 2
    assert f"{MAX_POSITIVE_LOGPROB:.0e}".replace("e-0", "e-") + " allowed for rounding" in DOCUMENT


def test_the_model_identity_is_specified_as_computed(tmp_path: Path) -> None:
    table = table_after("fields: ModelIdentity", column=2)
    assert [set(re.findall(r"`(.*?)`", files)) for files in table.values()] == [
        set(model_identity.WEIGHT_FILES),
        set(model_identity.TOKENIZER_FILES),
    ]
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_bytes(b"{}")
    lines = f"config.json {sha256_hex(b'{}')}\nmodel.safetensors {sha256_hex(b'weights')}\n"
    assert model_identity.identify_model(tmp_path).weights_sha256 == sha256_hex(lines.encode())


def test_what_the_text_says_about_its_audit_is_true(memory: Store) -> None:
    worked_example(memory)
    report = audit(memory)
    assert report.violations == ()
    assert (report.trained, report.skipped, report.unconsumed, report.duplicates) == (4, 1, 1, 1)
    assert report.partials == 1
    text = " ".join(DOCUMENT.split("## 16. Worked example")[-1].split())
    assert "no violation, 4 groups trained, 1 skipped, 1 upload not consumed yet, 1 duplicate" in text
    assert "and 1 partial group" in text


def test_what_may_be_deleted_is_what_the_table_says() -> None:
    section = DOCUMENT.split("### 7.9")[1].split("## 8.")[0]
    named = {
        prefix
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for prefix in re.findall(r"`(.*?)`", row)
    }
    assert named == {*LISTED, keys.BOUNDARY_PREFIX, keys.PROBE_PREFIX}


def test_references_to_sections_exist() -> None:
    for number in re.findall(r"[Ss]ection (\d+)", DOCUMENT):
        assert re.search(rf"^## {number}\. ", DOCUMENT, re.MULTILINE)
    for number in re.findall(r"\((\d\.\d)\)", DOCUMENT):
        assert re.search(rf"^### {re.escape(number)} ", DOCUMENT, re.MULTILINE)
