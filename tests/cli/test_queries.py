"""Folders of Hugging Face datasets are read by split, and what is held out is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.test_progress import run_config

from flexmarl.cli.errors import CliError
from flexmarl.cli.launch import source_of
from flexmarl.cli.preflight.dataset import check_dataset, dataset_content, held_out_content
from flexmarl.runtime.data_config import DatasetConfig, EvaluationConfig
from flexmarl.runtime.run_config import RunConfig


def config(path: Path, evaluation: dict[str, Any] | None = None, **dataset: Any) -> RunConfig:
    return run_config().model_copy(
        update={
            "dataset": DatasetConfig(path=path, **dataset),
            "evaluation": EvaluationConfig.model_validate(evaluation or {}),
        }
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"{number}+1", "answer": number + 1} for number in range(6)]
    splits = {
        "train": datasets.Dataset.from_list(rows[:4]),
        "test": datasets.Dataset.from_list(rows[4:]),
        "leaky": datasets.Dataset.from_list(rows[3:]),
    }
    folder = tmp_path / "saved"
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


def test_a_split_is_stored_as_lines(saved: Path) -> None:
    chosen = config(saved, {"every": 1, "split": "test"})
    lines = [json.loads(line) for line in dataset_content(chosen).splitlines()]
    assert lines[0] == {"question": "0+1", "answer": 1}
    queries = check_dataset(chosen)
    assert (len(queries.training), len(queries.held_out)) == (4, 2)
    source = source_of("run", chosen)
    assert source.dataset == dataset_content(chosen)
    assert source.held_out == held_out_content(chosen)


def test_a_split_that_is_not_there_is_named(saved: Path) -> None:
    with pytest.raises(CliError, match=r"dataset\.split: .*'dev'; it has: leaky, test, train"):
        check_dataset(config(saved, split="dev"))
    with pytest.raises(CliError, match=r"evaluation\.split: .*'dev'"):
        check_dataset(config(saved, {"every": 1, "split": "dev"}))


def test_what_is_trained_on_cannot_be_held_out(saved: Path) -> None:
    with pytest.raises(CliError, match="its query 1 is query 4 of"):
        check_dataset(config(saved, {"every": 1, "split": "leaky"}))


def test_a_folder_of_files_is_read_too(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert len(check_dataset(config(folder)).training) == 2


def test_a_folder_that_is_no_dataset(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(CliError, match="datasets cannot read it"):
        check_dataset(config(tmp_path))


def test_without_the_library_a_folder_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(CliError, match="pip install datasets"):
        check_dataset(config(tmp_path))


def test_an_evaluation_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    chosen = config(tmp_path / "q.jsonl", {"every": 1, "path": tmp_path / "none.jsonl"})
    with pytest.raises(CliError, match=r"evaluation\.path: no file"):
        check_dataset(chosen)
