"""`python -m flexmarl.meg_store.offline check FOLDER | restore SNAPSHOT FOLDER`.

For the command line, which knows no database: prints one JSON object, with a key `error` instead of
a result when there is none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flexmarl.core.errors import DomainError
from flexmarl.meg_store.check.store import check_store
from flexmarl.meg_store.snapshots import restore


def _run(arguments: list[str]) -> dict[str, Any]:
    match arguments:
        case ["check", folder]:
            return check_store(Path(folder)).as_json()
        case ["restore", snapshot, folder]:
            listed = restore(Path(snapshot), Path(folder))
            return {"objects": len(listed.objects), "segments": len(listed.segments)}
        case _:
            return {"error": __doc__}


def main() -> None:
    """Entry point."""
    try:
        answer = _run(sys.argv[1:])
    except DomainError as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
