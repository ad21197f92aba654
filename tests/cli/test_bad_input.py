"""Bad input: one line that names key, file or agent; exit code 2; nothing started or written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.cli import main as cli_main


def run_cli(*args: str, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> tuple[int, str]:
    """Run a command in this process; returns exit code and what it said on standard error."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["flexmarl", *args])
    monkeypatch.delenv("FLEXMARL_DEBUG", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    return ended.value.code, capsys.readouterr().err


@pytest.fixture
def refused(run_files, tmp_path, monkeypatch, capsys):
    """Train the run; it must be refused with one line, which is returned."""

    def train(*args: str) -> str:
        before = sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)
        code, said = run_cli(
            "train",
            str(run_files.config),
            *args,
            cwd=tmp_path,
            monkeypatch=monkeypatch,
            capsys=capsys,
        )
        assert code == 2, said
        lines = said.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        assert sorted(path for path in tmp_path.rglob("*")) == before
        return lines[0]

    return train


def test_an_unknown_key_is_named_with_the_closest_one(run_files, refused):
    run_files.edit("samples_per_group", "sample_per_group")
    said = refused()
    assert "'batch.sample_per_group'" in said
    assert "'batch.samples_per_group'" in said


def test_everything_that_is_wrong_is_said(run_files, refused):
    run_files.edit("samples_per_group = 2", "sample_per_group = 2")
    run_files.edit("versions = 2", 'versions = "two"')
    said = refused()
    assert "unknown key 'batch.sample_per_group', did you mean 'batch.samples_per_group'?; " in said
    assert "versions: Input should be a valid integer" in said


def test_an_unknown_key_on_the_command_line(refused):
    assert "'batch.gropus'" in refused("--set", "batch.gropus=3")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("agents.solver.max_token", "agents.solver.max_tokens"),
        ("policies.solver.rolout", "policies.solver.rollout"),
        ("policies.solver.optimizer.leraning_rate", None),
        ("policies.solver.optimizer.wieght_decay", "policies.solver.optimizer.weight_decay"),
        ("policies.solver.lr", "policies.solver.optimizer.lr"),
    ],
)
def test_an_unknown_key_below_a_name(refused, wrong: str, right: str | None):
    said = refused("--set", f"{wrong}=1")
    assert f"unknown key '{wrong}'" in said
    assert right is None or f"did you mean '{right}'?" in said


def test_a_config_that_is_no_toml(run_files, refused):
    run_files.config.write_text("name = ")
    assert f"{run_files.config}: not TOML" in refused()


def test_no_config(run_files, refused):
    run_files.config.unlink()
    assert f"no file {run_files.config}" in refused()


def test_an_agent_of_an_unknown_policy(run_files, refused):
    run_files.edit('policy = "solver"', 'policy = "solvr"')
    said = refused()
    assert "agents.solver.policy" in said
    assert "'solvr'" in said


def test_no_dataset(run_files, refused):
    run_files.dataset.unlink()
    assert f"dataset.path: no file {run_files.dataset}" in refused()


def test_an_empty_dataset(run_files, refused):
    run_files.dataset.write_text("\n")
    assert f"dataset {run_files.dataset}: it has no rows" in refused()


def test_a_dataset_smaller_than_a_batch(run_files, refused):
    said = refused("--set", "batch.groups=9")
    assert "batch.groups = 9" in said
    assert "only 4 rows" in said


def test_a_missing_column_names_row_and_columns(run_files, refused):
    with run_files.dataset.open("a") as file:
        file.write('{"digit": "7"}\n')
    said = refused()
    assert "line 5 has no column 'digits'" in said
    assert "digit" in said


def test_a_broken_row(run_files, refused):
    with run_files.dataset.open("a") as file:
        file.write("{broken\n")
    assert f"dataset {run_files.dataset}: line 5 is not JSON" in refused()


def test_a_missing_parquet_column(run_files, refused):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = run_files.folder / "q.parquet"
    parquet.write_table(pyarrow.table({"other": [1, 2, 3]}), path)
    said = refused("--set", f"dataset.path={path}")
    assert "no column 'digits'" in said
    assert "other" in said


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_model_folder_without_a_file(run_files, refused, file: str):
    (run_files.model / file).unlink()
    said = refused()
    assert "policies.solver.model.path" in said
    assert f"has no {file}" in said


def test_a_model_with_a_broken_tokenizer(run_files, refused):
    (run_files.model / "tokenizer.json").write_text("{}")
    assert "tokenizer.json has no model" in refused()


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": 0, "b": 8}}},
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]] * 9}},
    ],
)
def test_a_tokenizer_with_tokens_that_the_model_does_not_know(run_files, refused, tokenizer):
    (run_files.model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (run_files.model / "config.json").write_text(
        json.dumps({"model_type": "llama", "text_config": {"vocab_size": 8}})
    )
    said = refused()
    assert "tokenizer.json has 9 tokens" in said
    assert "a vocabulary of 8" in said


def test_no_model_folder(run_files, refused):
    said = refused("--set", "policies.solver.model.path=nowhere")
    assert "policies.solver.model.path: no folder" in said


def test_a_pretrained_model_without_weights(refused):
    said = refused("--set", "policies.solver.model.init=pretrained")
    assert "has no weights" in said


@pytest.mark.parametrize("set_context", [(), ("--set", "policies.solver.rollout.max_context=999")])
def test_no_room_for_a_prompt(refused, set_context):
    said = refused("--set", "agents.solver.max_tokens=64", *set_context)
    assert "agents.solver.max_tokens = 64" in said
    assert "64 tokens in all" in said


def test_no_workflow_package(run_files, refused):
    said = refused("--set", "workflow.package=nowhere")
    assert f"workflow.package: no folder {run_files.folder / 'nowhere'}" in said


def test_no_workflow_module(refused):
    said = refused("--set", "workflow.entry=flwo:team")
    assert "workflow.entry: no module 'flwo'" in said
    assert "did you mean 'flow'?" in said


def test_no_workflow_function(refused):
    said = refused("--set", "workflow.reward=flow:rewards")
    assert "workflow.reward: no function 'rewards'" in said
    assert "did you mean 'reward'?" in said


def test_no_estimator(refused):
    said = refused("--set", "advantage.estimator=flow:rewards")
    assert "advantage.estimator: no function 'rewards'" in said


def test_an_import_error_names_file_line_and_cause(run_files, refused):
    run_files.flow.write_text("import os\nimport no_such_module\n")
    said = refused()
    assert "No module named 'no_such_module'" in said
    assert f"({run_files.flow}:2)" in said


def test_a_syntax_error_names_file_and_line(run_files, refused):
    run_files.flow.write_text("x = 1\nasync def team(:\n")
    assert f"({run_files.flow}:2)" in refused()


def test_a_module_that_raises(run_files, refused):
    run_files.flow.write_text("def f():\n    raise RuntimeError('no GPU')\n\nf()\n")
    said = refused()
    assert "RuntimeError: no GPU" in said
    assert f"({run_files.flow}:2)" in said


def test_a_module_that_exits_the_process(run_files, refused):
    run_files.flow.write_text("import os\nprint('bye')\nos._exit(3)\n")
    assert "exit code 3" in refused()


def test_a_module_that_prints_is_fine(run_files, refused):
    run_files.flow.write_text(run_files.flow.read_text() + "\nprint('{}')\n")
    assert "no folder" in refused("--set", "policies.solver.model.path=nowhere")
    # The workflow is looked at last: a later problem shows that it passed.
    assert "not an `async def`" in refused("--set", "workflow.entry=flow:reward")


def test_a_module_that_does_not_end(run_files, refused, monkeypatch):
    from flexmarl.cli.preflight import run, workflow

    run_files.flow.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(
        run, "check_workflow", lambda config: workflow.check_workflow(config, timeout_s=1.0)
    )
    assert "took longer than 1 s" in refused()


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("{digits", "expected '}'"),
        ("{}>", "placeholder {}"),
        ("{digits.real}", "digits.real"),
        ("{digits:>4}", "digits:>4"),
        ("{digits!r}", "digits!r"),
    ],
)
def test_a_prompt_that_no_call_can_fill(run_files, refused, prompt: str, why: str):
    run_files.edit('prompt = "{digits}>"', f'prompt = "{prompt}"')
    said = refused()
    assert "agents.solver.prompt" in said
    assert why in said


def test_braces_in_a_system_message_are_text(run_files, refused):
    run_files.edit("max_tokens = 4", "max_tokens = 4\nchat = true\nsystem = 'Answer as {\"a\": 1}'")
    # Looked at after the prompts: a later problem shows that they passed.
    assert "no folder" in refused("--set", "policies.solver.model.path=nowhere")


def test_a_chat_with_a_model_that_cannot(run_files, refused):
    said = refused("--set", "agents.solver.chat=true")
    assert "agents.solver.chat" in said
    assert "no chat template" in said
    (run_files.model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    said = refused("--set", "agents.solver.chat=true", "--set", "workflow.package=nowhere")
    assert "workflow.package" in said


def test_a_package_that_cannot_be_stored_is_told_before_anything_starts(run_files, refused):
    (run_files.flow.parent / "data").symlink_to("/etc")
    said = refused()
    assert f"{run_files.flow.parent / 'data'}: is a symbolic link" in said


def test_fewer_instances_than_policies(refused):
    said = refused(
        "--set", "policies.solver.rollout.instances=3", "--service-set", "engine_host.max_engines=2"
    )
    assert "solver 3 = 3 instances" in said
    assert "at most 2 (max_engines)" in said


def test_a_port_in_use(refused):
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        said = refused("--service-set", f"meg_store.server.port={port}")
    assert f"meg_store.server.port: port {port}" in said
    assert "in use" in said


def test_an_override_of_no_service(refused):
    said = refused("--service-set", "megstore.durability=fsync")
    assert "did you mean 'meg_store'?" in said


def test_a_run_id_that_is_taken(tmp_path, refused):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    said = refused("--run-id", "mine")
    assert "exists already" in said
    assert "flexmarl resume mine" in said


def test_a_run_id_that_is_none(refused):
    assert "run id 'a/b'" in refused("--run-id", "a/b")


def test_no_cluster_to_show(tmp_path, monkeypatch, capsys):
    code, said = run_cli("status", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1
    assert "no cluster runs there" in said


def test_no_service_to_serve(tmp_path, monkeypatch, capsys):
    code, said = run_cli("serve", "trainr", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "did you mean 'trainer'?" in said


def test_a_role_that_no_service_has(tmp_path, monkeypatch, capsys):
    code, said = run_cli(
        "serve", "rollout", "--role", "boss", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys
    )
    assert code == 2
    assert said == "error: --role 'boss': rollout has the roles dispatcher and engine-host\n"


def test_a_debugging_user_gets_the_traceback(run_files, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flexmarl.cli.main", "train", "nowhere.toml"],
        cwd=tmp_path,
        env={**os.environ, "FLEXMARL_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" in done.stderr


def test_help_imports_nothing_heavy_and_cuts_no_sentence():
    code = (
        "import json, sys\n"
        "sys.argv = ['flexmarl', '--help']\n"
        "from flexmarl.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "sys.stderr.write(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    commands = done.stdout.partition("Commands:")[2]
    assert "train" in commands
    assert "..." not in commands
    loaded = set(json.loads(done.stderr))
    assert not loaded & {"torch", "grpc", "transformers", "matplotlib", "pydantic", "numpy"}
