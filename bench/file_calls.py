"""File-system calls below the job directory, by number of nodes; prints JSON.

Runs the real scripts on stand-in nodes under strace.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]

import support  # noqa: E402

SERVING = 5.0


def main() -> None:
    """Count for each number of nodes on the command line."""
    root = Path(tempfile.mkdtemp(prefix="bench-calls-"))
    try:
        os.environ.update(support.write_site(root / "config", {}, support.MODELS))
        from tracing import serve_for, traced

        found = []
        for nodes in map(int, sys.argv[1:]):
            run = traced(root / str(nodes), nodes, serve_for(SERVING))
            start = run.window(run.notes["started"], run.notes["ready"])
            serving = run.window(run.notes["ready"], run.notes["end"])
            row = {"nodes": nodes, "start": start.calls, "serving": serving.calls}
            print(row, file=sys.stderr, flush=True)
            found.append(row)
    finally:
        shutil.rmtree(root)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
