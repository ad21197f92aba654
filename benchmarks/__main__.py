"""Runs benchmarks: `python -m benchmarks store|rollout|trainer|pipeline|all`.

One JSON object per figure goes to stdout, a table to stderr. A benchmark is a module of this folder
with `run(report)`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import signal
import sys

import structlog

from benchmarks.report import Report
from flexmarl.runtime.polling import poll_in_one_thread

NAMES = ("store", "rollout", "trainer", "pipeline")
PARTS = {
    "store": ("store", "store_scale"),
    "rollout": ("balance", "rollout", "hot_queue", "in_flight", "weight_updates"),
    "trainer": ("trainer", "trainer_tokens"),
}
"""Modules of a name; the module of that name where none are listed."""


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*NAMES, "all"])
    chosen = parser.parse_args().name
    names = NAMES if chosen == "all" else (chosen,)
    modules = [module for name in names for module in PARTS.get(name, (name,))]
    built = [module for module in modules if importlib.util.find_spec(f"benchmarks.{module}")]
    missing = [module for module in modules if module not in built]
    if missing:
        print(f"no benchmark so far: {', '.join(missing)}", file=sys.stderr)
    if not built:
        return 2
    # What is on stdout are figures, and nothing else.
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    # Ended from outside, it stops its processes and removes its folders, as at its own end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    poll_in_one_thread()  # as in the services that are measured, and in what they are compared with
    report = Report()
    try:
        for module in built:
            report.progress(f"{module}: measuring")
            importlib.import_module(f"benchmarks.{module}").run(report)
    finally:
        report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
