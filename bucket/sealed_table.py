"""Rows of one schema as one sealed Parquet object: what trajectories and partial groups have in common.

    rows, metadata -> write -> bytes -> one PUT        GET -> bytes -> read -> rows, metadata

`read` takes bytes from anybody: it verifies the seal before a Parquet reader sees them, and types and sizes
before a single column is read.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.records import PROTOCOL_VERSION
from bucketrl.bucket.seal import SEAL_KEY, UNSEALED, check_seal, seal

MAX_BYTES = 64 << 20
"""Largest object that `read` takes, and largest total of its columns uncompressed."""

Row = dict[str, Any]
"""One value per column; tuples where the schema has lists, dicts where it has maps."""
HEADER = ("run_id", "group_id", "attempt", "worker_id", "engine")
"""Names in the metadata that say whose the object is."""
_PHYSICAL = {
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INT32",
    pa.int64(): "INT64",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "BYTE_ARRAY",
}


class SealedTable:
    """The codec of one schema. Columns are scalars, lists of scalars and maps."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.leaves = {field.name: _leaves(field.type) for field in schema}
        """Parquet physical type and repetition depth of each column's leaves: what another writer must
        match."""

    def write(self, rows: Sequence[Row], header: dict[str, str]) -> bytes:
        """The object's bytes. `header` holds the names of HEADER. Raises IntegrityError
        if a value does not fit its column."""
        columns = {name: [_cell(row[name]) for row in rows] for name in self.schema.names}
        try:
            table = pa.table(columns, schema=self.schema)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise IntegrityError(f"a value does not fit its column: {error}") from None
        buffer = BytesIO()
        # No statistics: they would put text from the columns into the footer, where the seal is searched.
        # No stored Arrow schema: the Parquet types say it all, and it would repeat the metadata.
        with pq.ParquetWriter(
            buffer, table.schema, compression="zstd", store_schema=False, write_statistics=False
        ) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(
                {"protocol": str(PROTOCOL_VERSION)}
                | {name: header[name] for name in HEADER}
                | {"rows": str(len(rows)), SEAL_KEY: UNSEALED}
            )
        return seal(buffer.getvalue())

    def read(
        self, data: bytes, *, run_id: str, group_id: str, attempt: str, max_bytes: int
    ) -> tuple[list[Row], dict[str, str]]:
        """Rows and header. Raises IntegrityError with one reason if the object is not whole, not of this
        schema and size, or not the one asked for."""
        if len(data) > max_bytes:
            raise IntegrityError(f"object of {len(data)} bytes, more than the limit of {max_bytes}")
        check_seal(data)
        file = _parsed(lambda: pq.ParquetFile(BytesIO(data)), "not a Parquet file")
        raw = file.metadata.metadata or {}
        metadata = _parsed(lambda: {k.decode(): v.decode() for k, v in raw.items()}, "unreadable metadata")
        _check_header(metadata, {"run_id": run_id, "group_id": group_id, "attempt": attempt})
        self._check_shape(file, metadata, max_bytes)
        names = self.schema.names
        cells = _parsed(
            lambda: file.read(columns=names, use_threads=False).select(names).cast(self.schema).to_pylist(),
            "unreadable columns",
        )
        rows = [{name: self._value(name, cell) for name, cell in row.items()} for row in cells]
        return rows, {name: metadata[name] for name in HEADER}

    def _check_shape(self, file: pq.ParquetFile, metadata: dict[str, str], max_bytes: int) -> None:
        """Types and sizes as the footer declares them, before a single column is read."""
        found: dict[str, list[tuple[str, int]]] = {}
        for i in range(len(file.schema)):
            leaf = file.schema.column(i)
            name = leaf.path.split(".")[0]
            found.setdefault(name, []).append((leaf.physical_type, leaf.max_repetition_level))
        for name, leaves in self.leaves.items():
            if name not in found:
                raise IntegrityError(f"missing column {name}")
            if found[name] != leaves:
                raise IntegrityError(f"column {name} is {found[name]}, want {leaves} (type, repetition)")
        if metadata.get("rows") != str(file.metadata.num_rows):
            raise IntegrityError(f"{file.metadata.num_rows} rows, metadata says {metadata.get('rows', '')!r}")
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
        # Runs of equal values take almost no bytes even uncompressed; 4 bytes is the smallest list element.
        if max(sum(group.total_byte_size for group in groups), 4 * values) > max_bytes:
            raise IntegrityError(f"columns of {values} values, more than {max_bytes} bytes uncompressed")

    def _value(self, name: str, cell: Any) -> Any:
        """Raises IntegrityError for a null anywhere."""
        is_map = pa.types.is_map(self.schema.field(name).type)
        parts = [part for pair in cell for part in pair] if is_map and cell else cell
        if cell is None or (isinstance(parts, list) and None in parts):
            raise IntegrityError(f"column {name} has a null")
        if is_map:
            return dict(cell)
        return tuple(cell) if isinstance(cell, list) else cell


def _leaves(kind: pa.DataType) -> list[tuple[str, int]]:
    if pa.types.is_map(kind):
        return [(_PHYSICAL[kind.key_type], 1), (_PHYSICAL[kind.item_type], 1)]
    if pa.types.is_list(kind):
        return [(_PHYSICAL[kind.value_type], 1)]
    return [(_PHYSICAL[kind], 0)]


def _cell(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


def _parsed(read: Callable[[], Any], what: str) -> Any:
    try:
        return read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{what}: {str(error).splitlines()[0]}") from None


def _check_header(metadata: dict[str, str], wanted: dict[str, str]) -> None:
    protocol = metadata.get("protocol", "")
    if not protocol.isdecimal():
        raise IntegrityError(f"protocol is {protocol!r}, want a number")
    if int(protocol) > PROTOCOL_VERSION:
        raise IntegrityError(
            f"object has protocol {protocol}, this bucketrl reads up to {PROTOCOL_VERSION}: upgrade it"
        )
    for name, want in wanted.items():
        if metadata.get(name) != want:
            raise IntegrityError(f"{name} is {metadata.get(name, '')!r}, want {want!r}")
    for name in ("worker_id", "engine"):
        if name not in metadata:
            raise IntegrityError(f"metadata lacks {name}")
