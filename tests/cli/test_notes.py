"""What is said of a run that is right as it is."""

from __future__ import annotations

import pytest

from flexmarl.cli.preflight.run import load_run_config, notes_of


def notes(run_files, *overrides: str) -> list[str]:
    return notes_of(load_run_config(run_files.config, overrides))


def test_nothing_of_a_run_whose_micro_batches_fill(run_files):
    assert notes(run_files, "policies.solver.trainer.micro_batch_rows=16") == []


def test_a_micro_batch_larger_than_a_batch_can_give(run_files):
    (note,) = notes(run_files, "policies.solver.trainer.micro_batch_rows=17")
    assert note.startswith("policies.solver.trainer.micro_batch_rows = 17 is more than")
    assert "2 groups x 2 samples x 1 agents x 4 calls = 16 rows" in note


def test_an_estimator_that_compares_whole_batches(run_files):
    (note,) = notes(run_files, "advantage.estimator=reinforce_pp")
    assert note.startswith('advantage.estimator = "reinforce_pp" compares whole batches')


@pytest.mark.parametrize(
    "settings",
    [
        ["policies.solver.trainer.micro_batch_tokens=100"],
        ["pipeline.overlap=false"],
        ["pipeline.colocated=true"],
        ["advantage.estimator=reinforce_pp", "pipeline.overlap=false"],
    ],
)
def test_nothing_where_no_overlap_is_lost(run_files, settings: list[str]):
    assert notes(run_files, "policies.solver.trainer.micro_batch_rows=17", *settings) == []
