"""An engine host as a process of its own, on a store that is a folder; for tests that kill it."""

import sys
from functools import partial

from rollout.host.host_kit import folder_store

from flexmarl.rollout.config import RolloutConfig
from flexmarl.rollout.host.app import run_host
from flexmarl.runtime.main import run_service

if __name__ == "__main__":
    main = partial(run_host, connect_store=folder_store, preload=())
    sys.exit(run_service("rollout", RolloutConfig, main))
