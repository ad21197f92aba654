"""`python -m flexmarl.rollout [--role dispatcher|engine-host] [--config FILE] [--set k=v]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flexmarl.rollout.config import RolloutConfig
from flexmarl.runtime.main import run_service


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process that the role names."""
    return run_service(
        "rollout", RolloutConfig, _serve, argv=_role_as_key(sys.argv[1:] if argv is None else argv)
    )


async def _serve(config: RolloutConfig) -> None:
    # Imported late: the other role's modules are not this process's business.
    if config.role == "engine-host":
        from flexmarl.rollout.host.app import run as run_host

        await run_host(config)
    else:
        from flexmarl.rollout.dispatcher.app import run as run_dispatcher

        await run_dispatcher(config)


def _role_as_key(argv: Sequence[str]) -> list[str]:
    """`--role X` is short for `--set role=X`."""
    found: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument == "--role":
            found += ["--set", f"role={next(rest, '')}"]
        elif argument.startswith("--role="):
            found += ["--set", f"role={argument.removeprefix('--role=')}"]
        else:
            found.append(argument)
    return found


if __name__ == "__main__":
    sys.exit(main())
