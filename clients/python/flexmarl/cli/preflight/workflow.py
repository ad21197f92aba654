"""Can the workflow, its reward and its tools be imported?

In a child process with a time limit: user code must neither stay in the command line's process nor
keep it from answering.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from flexmarl.cli.errors import CliError
from flexmarl.runtime.run_config import RunConfig

IMPORT_TIMEOUT_S: Final = 60.0


def check_workflow(config: RunConfig, *, timeout_s: float = IMPORT_TIMEOUT_S) -> None:
    """Imports what the config names.

    Raises:
        CliError: The package folder, a module or a function is missing; an import raises, with file
            and line; or it takes too long.
    """
    workflow = config.workflow
    if not workflow.package.is_dir():
        raise CliError(f"workflow.package: no folder {workflow.package}")
    functions = {
        "workflow.entry": {"name": workflow.entry, "coroutine": True},
        "workflow.reward": {"name": workflow.reward, "coroutine": False},
        **{
            f"workflow.tools.{name}": {"name": tool, "coroutine": False}
            for name, tool in workflow.tools.items()
        },
    }
    if config.advantage.rule().is_own:
        functions["advantage.estimator"] = {
            "name": config.advantage.estimator,
            "coroutine": False,
        }
    problem = _ask_child(workflow.package, functions, timeout_s)
    if problem:
        place = f" ({problem['file']}:{problem['line']})" if problem["file"] else ""
        raise CliError(f"{problem['key']}: {problem['message']}{place}")


def _ask_child(package: Path, functions: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    request = json.dumps({"package": str(package), "functions": functions})
    try:
        child = subprocess.run(
            [sys.executable, "-m", "flexmarl.cli.preflight.import_child"],
            input=request.encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CliError(
            f"workflow.package: importing {package} took longer than {timeout_s:g} s; move work "
            "out of the modules' top level"
        ) from None
    try:
        answer: dict[str, Any] = json.loads(child.stdout)
    except ValueError:
        lines = child.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CliError(
            f"workflow.package: importing {package} ended the process (exit code "
            f"{child.returncode}): {lines[-1] if lines else 'no output'}"
        ) from None
    return answer
