"""Log lines are JSON with the ids of the call that wrote them."""

import json
import subprocess
import sys

SCRIPT = """
import logging, sys
from pathlib import Path
from flexmarl.core.call_context import bind_ids
from flexmarl.runtime.config import LogConfig
from flexmarl.runtime.logging import configure_logging, get_logger

log = get_logger("early")
configure_logging(LogConfig(level="info", file=Path(sys.argv[1])), service="store")
bind_ids(run="r1", vertex="v1")
log.info("written", rows=3)
log.debug("not written")
logging.getLogger("library").warning("from %s", "outside")
try:
    raise ValueError("broken")
except ValueError:
    log.exception("failed", vertex="v2")
"""


def test_lines_are_json_with_ids_whoever_writes_them(tmp_path):
    file = tmp_path / "logs" / "store.jsonl"
    subprocess.run([sys.executable, "-c", SCRIPT, str(file)], check=True, timeout=30)
    ours, library, failed = map(json.loads, file.read_text().splitlines())
    assert (ours["event"], ours["rows"], ours["level"]) == ("written", 3, "info")
    assert library["event"] == "from outside"
    for line in (ours, library, failed):
        assert (line["service"], line["run"]) == ("store", "r1")
        assert line["timestamp"].endswith("Z")
    assert (ours["vertex"], failed["vertex"]) == ("v1", "v2")
    assert "ValueError: broken" in failed["exception"]


def test_a_logger_works_before_logging_is_configured():
    from flexmarl.runtime.logging import get_logger

    get_logger("any").info("nobody configured me")
