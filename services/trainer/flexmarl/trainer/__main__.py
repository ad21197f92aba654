"""`python -m flexmarl.trainer --config FILE --set slots=["slot0","slot1"]`."""

from __future__ import annotations

import sys

from flexmarl.runtime.main import run_service
from flexmarl.trainer.config import TrainerConfig


async def _main(config: TrainerConfig) -> None:
    from flexmarl.trainer.app import serve

    await serve(config)


if __name__ == "__main__":
    sys.exit(run_service("trainer", TrainerConfig, _main))
