"""`python -m flexmarl.orchestrator --config FILE --set data_dir=DIR`."""

from __future__ import annotations

import sys

from flexmarl.orchestrator.config import OrchestratorConfig
from flexmarl.runtime.main import run_service


async def _main(config: OrchestratorConfig) -> None:
    from flexmarl.orchestrator.app import serve

    await serve(config)


if __name__ == "__main__":
    sys.exit(run_service("orchestrator", OrchestratorConfig, _main))
