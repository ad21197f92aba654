"""`python -m flexmarl.meg_store --config FILE --set store.data_dir=DIR`."""

from __future__ import annotations

import sys

from flexmarl.meg_store.config import MegStoreConfig
from flexmarl.runtime.main import run_service


async def _main(config: MegStoreConfig) -> None:
    from flexmarl.meg_store.app import serve

    await serve(config)


if __name__ == "__main__":
    sys.exit(run_service("meg_store", MegStoreConfig, _main))
