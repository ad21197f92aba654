"""First code of a spawned child: watch the parent, then run the module that was asked for.

The watch starts before the module's imports, which can take seconds.
"""

from __future__ import annotations

import os
import runpy
import sys

from flexmarl.runtime.child_link import LINK_FD_VARIABLE, watch_parent


def main() -> None:
    """`python -m flexmarl.runtime.child_boot MODULE ARGS...`."""
    fd = int(os.environ[LINK_FD_VARIABLE])
    os.set_inheritable(fd, False)
    watch_parent(fd)
    module = sys.argv[1]
    del sys.argv[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
