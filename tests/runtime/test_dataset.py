"""What a dataset may look like, what is held out of it, and what is said when it is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.dataset import Queries, QueryFile, read_queries
from flexmarl.runtime.run_config import RunConfig

TEN = b"".join(b'{"a":%d}\n' % number for number in range(10))


def config(
    *, groups: int = 1, evaluation: Mapping[str, Any] | None = None, **dataset: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "team",
            "versions": 1,
            "workflow": {"entry": "team:team", "reward": "team:reward"},
            "dataset": {"path": "data.jsonl", **dataset},
            "batch": {"groups": groups, "samples_per_group": 2},
            "evaluation": evaluation or {},
            "policies": {"p": {"model": {"path": "model"}}},
            "agents": {"a": {"policy": "p"}},
        }
    )


def queries(content: bytes, *, held_out: bytes | None = None, **more: Any) -> Queries:
    other = None if held_out is None else QueryFile(name="eval.jsonl", content=held_out)
    return read_queries(config(**more), QueryFile(name="data.jsonl", content=content), other)


def read(content: bytes, **more: Any) -> list[Any]:
    return [json.loads(query) for query in queries(content, **more).training]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def refused(content: bytes, **more: Any) -> DomainError:
    with pytest.raises(DomainError) as error:
        queries(content, **more)
    assert error.value.reason is ErrorReason.DATASET_INVALID
    return error.value


def test_lines_become_queries_and_blank_ones_are_skipped() -> None:
    assert read(b'{"a":1}\n\n  \n{"a":"\\ud800"}\r\n') == [{"a": 1}, {"a": "\ud800"}]


def test_parquet_rows_become_queries() -> None:
    rows = [{"question": "1+1", "answer": 2}, {"question": "2+2", "answer": 4}]
    assert read(parquet(rows), columns=("question",)) == rows


def test_a_limit_takes_the_first_rows_that_pass() -> None:
    assert read(b'{"a":1}\n{"a":2}\n{"a":3}', limit=2) == [{"a": 1}, {"a": 2}]
    keep = [{"column": "a", "op": ">", "value": 1}]
    assert read(b'{"a":1}\n{"a":2}\n{"a":3}', limit=1, filters=keep) == [{"a": 2}]


def test_filters_keep_rows_that_pass_all_of_them() -> None:
    keep = [{"column": "a", "op": ">=", "value": 3}, {"column": "a", "op": "in", "value": [1, 4]}]
    assert read(TEN, filters=keep) == [{"a": 4}]
    nothing = refused(TEN, filters=[{"column": "a", "value": 99}])
    assert "it has no rows that pass dataset.filters" in nothing.message
    wrong = refused(b'{"a":"x"}', filters=[{"column": "a", "op": "<", "value": 9}])
    assert "line 1: dataset.filters: column 'a' holds 'x'" in wrong.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it has no rows"),
        (b"\n\n", "it has no rows"),
        (b'{"a":1}\n{"a":', "line 2 is not JSON"),
        (b'{"a":1}\n\xff', "line 2 is not JSON"),
        (b'{"a":1}\n{"b":' + b"[" * 99999, "line 2 is not JSON"),
        (b'{"a":1}\n{"b":1,"a":1,"b":1}', "line 2 has the key 'b' twice"),
        (b'{"a":[{"b":{"c":1,"c":2}}]}', "line 1 has the key 'c' twice"),
        (b"[1]", "line 1 is not a JSON object"),
        (b'{"a":NaN}', "line 1 cannot be written as JSON"),
        (b'{"a":1}\n{"a":"' + b"x" * 1_100_000 + b'"}', "line 2 has 1100008 bytes as JSON"),
        (b"PAR1 and then nothing", "it cannot be read as Parquet"),
    ],
)
def test_bad_content_is_named_by_its_line(content: bytes, words: str) -> None:
    error = refused(content)
    assert error.message.startswith("dataset data.jsonl: ")
    assert words in error.message


def test_a_missing_column_is_named() -> None:
    error = refused(b'{"a":1}\n{"b":1}', columns=("a",))
    assert "line 2 has no column 'a' (dataset.columns); it has: b" in error.message
    assert error.metadata["column"] == "a"
    assert "no column 'b'" in refused(parquet([{"a": 1}]), columns=("b",)).message


def test_a_parquet_value_that_is_no_json_is_named() -> None:
    assert "row 1 cannot be written" in refused(parquet([{"a": b"\x00"}])).message


def test_smaller_than_a_batch() -> None:
    message = refused(b'{"a":1}\n{"a":2}', groups=3).message
    assert "only 2 rows, fewer than batch.groups = 3" in message


def test_a_share_is_held_out_and_the_rest_is_trained_on() -> None:
    many = b"".join(b'{"a":%d}\n' % number for number in range(200))
    found = queries(many, evaluation={"every": 2, "fraction": 0.2})
    assert 20 < len(found.held_out) < 60
    assert not set(found.held_out) & set(found.training)
    assert len(found.held_out) + len(found.training) == 200
    # The same row twice is on one side.
    twice = queries(many + many, evaluation={"every": 2, "fraction": 0.2})
    assert not set(twice.held_out) & set(twice.training)
    few = queries(many, evaluation={"every": 2, "fraction": 0.2, "limit": 3})
    assert few.held_out == found.held_out[:3]
    assert few.training == found.training
    assert "no query is left" in refused(TEN, evaluation={"every": 1, "fraction": 1e-9}).message


def test_without_evaluation_nothing_is_held_out() -> None:
    assert queries(TEN, evaluation={"fraction": 0.5}) == Queries(TEN.splitlines(), [])


def test_a_file_of_its_own_may_not_overlap() -> None:
    own = {"every": 1, "path": "eval.jsonl"}
    found = queries(TEN, held_out=b'{"a":77}\n', evaluation=own)
    assert found.held_out == [b'{"a":77}']
    assert len(found.training) == 10
    # However it is written, it is the same query.
    error = refused(TEN, held_out=b'{"a":77}\n{"a": 4}\n', evaluation=own)
    assert "dataset eval.jsonl: its query 2 is query 5 of data.jsonl, too" in error.message


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        ({"every": 1}, "one of the two"),
        ({"every": 1, "fraction": 0.1, "path": "x"}, "one of the two"),
        ({"every": 1, "fraction": 0.1, "greedy": False, "samples": 0}, "nothing would be sampled"),
    ],
)
def test_an_evaluation_needs_queries_and_samples(evaluation: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(evaluation=evaluation)


def test_a_list_goes_with_in_alone() -> None:
    for op, value in (("in", 3), ("==", [3])):
        with pytest.raises(ValueError, match='"in" takes a list'):
            config(filters=[{"column": "a", "op": op, "value": value}])


def test_paths_are_taken_from_the_configurations_folder(tmp_path: Path) -> None:
    found = config(evaluation={"every": 1, "path": "eval.jsonl"}).relative_to(tmp_path)
    assert found.evaluation.path == tmp_path / "eval.jsonl"
    assert config().relative_to(tmp_path).evaluation.path is None
