"""Entry point of a service process: arguments, config, logging, event loop, exit code."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop

from flexmarl.core.errors import DomainError
from flexmarl.runtime import own_credentials
from flexmarl.runtime.config import ConfigError, ServiceConfig, load_config
from flexmarl.runtime.logging import configure_logging, get_logger
from flexmarl.runtime.polling import poll_in_one_thread
from flexmarl.runtime.preconditions import missing_module

ConfigT = TypeVar("ConfigT", bound=ServiceConfig)

GC_THRESHOLDS = (50_000, 20, 50)
"""Services make many short-lived messages and few cycles: collect more rarely than usual."""

EXIT_START_REFUSED = 2
"""Exit code of a process that refused to start: its one line on stderr says why."""


def run_service(
    name: str,
    model: type[ConfigT],
    async_main: Callable[[ConfigT], Awaitable[None]],
    *,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a service until it stops.

    Args:
        name: Such as `meg_store`; the environment prefix is `FLEXMARL_MEG_STORE`.
        model: Configuration of the service.
        async_main: Serves until a signal; import the heavy modules inside of it, not before.
        argv: Arguments; those of the process by default.

    Returns:
        Exit code: 0 stopped in order, or checked; 1 failed while running; 2 refused to start.
    """
    args = _parser(name).parse_args(argv)
    try:
        config = load_config(
            model, path=args.config, env_prefix=f"FLEXMARL_{name.upper()}", overrides=args.set
        )
        own_credentials.show(config.client)
    except ConfigError as error:
        return _refuse(name, str(error))
    if args.check:
        return 0
    configure_logging(config.log, service=name)
    log = get_logger(__name__)
    log.info("configuration", config=config.model_dump(mode="json"))
    gc.set_threshold(*GC_THRESHOLDS)
    poll_in_one_thread()
    try:
        uvloop.run(_coroutine(async_main(config)))
    except (ConfigError, DomainError) as error:
        return _refuse(name, str(error))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module == "flexmarl":
            raise  # ours: the installation is broken, and the traceback says where
        return _refuse(name, missing_module(module, service=name))
    except KeyboardInterrupt:
        return 0
    except Exception:
        log.exception("failed")
        return 1
    return 0


async def _coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


def _refuse(name: str, message: str) -> int:
    line = " ".join(message.splitlines())
    sys.stderr.write(f"flexmarl {name}: {line}\n")
    return EXIT_START_REFUSED


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m flexmarl.{name}", description=f"FlexMARL service {name}."
    )
    parser.add_argument("--config", type=Path, default=None, help="TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, such as a.b=1"
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether the configuration is one"
    )
    return parser
