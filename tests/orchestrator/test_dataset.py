"""What a dataset may look like, and what is said when it does not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.orchestrator.dataset import DatasetRules, read_dataset
from flexmarl.orchestrator.owned_runs import OwnedRun, OwnedRuns


def read(content: bytes, **rules: Any) -> list[Any]:
    dataset = read_dataset(content, DatasetRules(name="data.jsonl", **rules))
    return [json.loads(query) for query in dataset.queries]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def refused(content: bytes, **rules: Any) -> DomainError:
    with pytest.raises(DomainError) as error:
        read(content, **rules)
    assert error.value.reason is ErrorReason.DATASET_INVALID
    assert error.value.message.startswith("dataset data.jsonl: ")
    return error.value


def test_lines_become_queries_and_blank_ones_are_skipped() -> None:
    assert read(b'{"a":1}\n\n  \n{"a":"\\ud800"}\r\n') == [{"a": 1}, {"a": "\ud800"}]


def test_parquet_rows_become_queries() -> None:
    rows = [{"question": "1+1", "answer": 2}, {"question": "2+2", "answer": 4}]
    assert read(parquet(rows), columns=("question",)) == rows


def test_a_limit_takes_the_first_rows() -> None:
    assert read(b'{"a":1}\n{"a":2}\n{"a":3}', limit=2) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it has no rows"),
        (b"\n\n", "it has no rows"),
        (b'{"a":1}\n{"a":', "line 2 is not JSON"),
        (b'{"a":1}\n\xff', "line 2 is not JSON"),
        (b"[1]", "line 1 is not a JSON object"),
        (b'{"a":NaN}', "line 1 cannot be written as JSON"),
        (b"PAR1 and then nothing", "it cannot be read as Parquet"),
    ],
)
def test_bad_content_is_named_by_its_line(content: bytes, words: str) -> None:
    assert words in refused(content).message


def test_a_missing_column_is_named() -> None:
    error = refused(b'{"a":1}\n{"b":1}', columns=("a",))
    assert "line 2 lacks column 'a'" in error.message
    assert error.metadata["column"] == "a"
    assert "lacks column 'b'" in refused(parquet([{"a": 1}]), columns=("b",)).message


def test_a_parquet_value_that_is_no_json_is_named() -> None:
    assert "row 1 cannot be written" in refused(parquet([{"a": b"\x00"}])).message


def test_smaller_than_a_batch() -> None:
    assert "fewer than batch.groups = 3" in refused(b'{"a":1}\n{"a":2}', min_rows=3).message


def test_owned_runs_survive_and_a_torn_file_is_none(tmp_path: Path) -> None:
    owned = OwnedRuns(tmp_path / "data")
    assert owned.read() == []
    owned.add(OwnedRun("a", "s0", "host:1"))
    owned.add(OwnedRun("b", "s0", "host:1"))
    owned.add(OwnedRun("a", "s0", "host:2"))
    assert OwnedRuns(tmp_path / "data").read() == [
        OwnedRun("a", "s0", "host:2"),
        OwnedRun("b", "s0", "host:1"),
    ]
    owned.remove("a")
    assert [run.run_id for run in owned.read()] == ["b"]
    (tmp_path / "data" / "runs.json").write_text('[{"run_id":')
    assert owned.read() == []
