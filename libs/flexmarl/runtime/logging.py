"""Structured logs: one JSON object a line, with the ids of the call that wrote it.

Standard-library logging (gRPC, asyncio, libraries) is routed through the same renderer.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from typing import TYPE_CHECKING, Any

import structlog

from flexmarl.core.call_context import current_ids
from flexmarl.runtime.config import LogConfig

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logging(config: LogConfig | None = None, *, service: str) -> None:
    """Route structlog and standard logging to one JSON stream.

    Args:
        config: Level and destination.
        service: Written as `service` in every line.
    """
    config = config or LogConfig()
    level = _LEVELS[config.level]
    shared: list[Processor] = [
        _add_ids,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _constant("service", service),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(default=str),
        ],
    )
    handler = _handler(config)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    # uvloop and asyncio report every slow callback at debug; that is noise at our debug level.
    logging.getLogger("asyncio").setLevel(max(level, logging.INFO))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """Logger of a module; works before `configure_logging`, too."""
    logger: FilteringBoundLogger = structlog.get_logger(name)
    return logger


def _handler(config: LogConfig) -> logging.Handler:
    if config.file is None:
        return logging.StreamHandler(sys.stderr)
    config.file.parent.mkdir(parents=True, exist_ok=True)
    # Reopens when the file was moved away, so that logrotate works without a signal.
    return logging.handlers.WatchedFileHandler(config.file, encoding="utf-8")


def _add_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name, value in current_ids().items():
        event.setdefault(name, value)
    return event


def _constant(key: str, value: Any) -> Processor:  # noqa: ANN401 - any JSON value
    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault(key, value)
        return event

    return add
