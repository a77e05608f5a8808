"""API servers to be killed at any moment.

`python -m tests.support.server_process MODEL STATE_DIR` imports everything once and forks a server
per line of its standard input, so that a restart costs seconds. On its standard output it says
`{"pid": N, "url": URL}` when the server answers, and `{"dead": N}` when it is dead.
"""

import os
import sys
import threading
from pathlib import Path

from tests.support.crash import report
from tests.support.engine import EngineServer, import_vllm, prepare_environment


def main() -> None:
    model, state = Path(sys.argv[1]), sys.argv[2]
    prepare_environment()
    import_vllm()
    assert threading.active_count() == 1, "a fork would lose threads"
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            with EngineServer(model, forest={"state_dir": state}) as server:
                report(pid=os.getpid(), url=server.url)
                os.read(0, 1)  # ends with the process that asked for the server
            os._exit(0)
        os.waitpid(pid, 0)
        report(dead=pid)


if __name__ == "__main__":
    main()
