"""What the command line does with stores at rest; it knows no database itself.

    python -m flexmarl.meg_store.offline check FOLDER...
    python -m flexmarl.meg_store.offline restore SNAPSHOT... --to [SHARD=]FOLDER...

Prints one JSON object, with a key `error` instead of a result when there is none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flexmarl.core.errors import DomainError
from flexmarl.meg_store.check.store import check_stores
from flexmarl.meg_store.restore import restore


def _run(arguments: list[str]) -> dict[str, Any]:
    match arguments:
        case ["check", _, *_]:
            return check_stores([Path(folder) for folder in arguments[1:]]).as_json()
        case ["restore", *rest] if "--to" in rest:
            end = rest.index("--to")
            return _restore(rest[:end], rest[end + 1 :])
        case _:
            return {"error": __doc__}


def _restore(snapshots: list[str], folders: list[str]) -> dict[str, Any]:
    made = restore([Path(snapshot) for snapshot in snapshots], folders)
    return {
        "stores": [
            {
                "shard": each.listed.shard,
                "folder": str(each.folder),
                "objects": len(each.listed.objects),
                "segments": len(each.listed.segments),
            }
            for each in made
        ]
    }


def main() -> None:
    """Entry point."""
    try:
        answer = _run(sys.argv[1:])
    except DomainError as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
