"""`python -m deploy.three_hosts FOLDER`: three hosts until Ctrl-C; type `lose c`, `return c`."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from deploy.three_hosts.cluster import ThreeHosts

QUICKSTART = Path("examples/quickstart/config.toml")


def main() -> int:
    """Run until the input ends; returns the exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m deploy.three_hosts FOLDER\n")
        return 2
    memory = Path(tempfile.mkdtemp(prefix="flexmarl-hosts-", dir="/dev/shm"))
    try:
        with ThreeHosts(Path(sys.argv[1]).resolve(), memory) as cluster:
            print(f"three hosts serve; train on them:\n  {shlex.join(_example(cluster))}")
            print("then type: lose c, return c; Ctrl-C ends all")
            for line in sys.stdin:
                _do(cluster, line.split())
    except KeyboardInterrupt:
        return 130
    except (OSError, TimeoutError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _example(cluster: ThreeHosts) -> list[str]:
    return [
        *cluster.train_command(QUICKSTART),
        *("--set", "policies.sorter.trainer.world_size=2"),
    ]


def _do(cluster: ThreeHosts, words: list[str]) -> None:
    match words:
        case ["lose", name] if name in cluster.hosts:
            cluster.lose(name)
            print(f"{name} is gone")
        case ["return", name] if name in cluster.hosts:
            cluster.bring_back(name)
            print(f"{name} is back")
        case []:
            pass
        case _:
            print(f"lose HOST or return HOST; hosts: {', '.join(cluster.hosts)}")


if __name__ == "__main__":
    sys.exit(main())
