"""Takes the place of an interpreter with vLLM: started like it, serves completions like it.

    python stand_in_vllm.py PATH_OF_LAUNCH SOCKET THREADS [arguments of the server]

Ends when standard input closes, as the launch script does.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rollout.engines.completion_server import CompletionServer

if __name__ == "__main__":
    launch, socket, threads, *arguments = sys.argv[1:]
    assert Path(launch).name == "launch.py" and threads.isdigit()
    assert arguments[arguments.index("--uds") + 1] == socket
    if "--refuse" in arguments:
        print("ValueError: the stand-in was told to refuse", flush=True)
        sys.exit(1)
    server = CompletionServer(Path(socket))
    while os.read(0, 4096):
        pass
