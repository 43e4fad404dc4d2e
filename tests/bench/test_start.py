"""How long a start takes, with a server that is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import start as bench
from processes import DoesNotServe

SERVER = """
import json, socket, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with socket.create_server(("127.0.0.1", int(arguments["--port"]))):
    print(json.dumps({"event": "model loaded", "import_seconds": 0.0, "load_seconds": 0.0}), flush=True)
    print("it is ready at http://127.0.0.1, with a context of 1 tokens. Try:", flush=True)
    time.sleep(60)
"""


def test_the_parts_add_up(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER)

    found = bench.start([sys.executable, str(program)], bench.free_port())

    *parts, ready, imports, rest = found.values()
    assert sum(parts) == pytest.approx(ready)
    assert imports + rest == pytest.approx(ready)
    assert 0 < imports <= ready
    assert "| ready |" in bench.table([found, found])


def test_a_server_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(DoesNotServe, match="no such model"):
        bench.start([sys.executable, "-c", "raise SystemExit('no such model')"], bench.free_port())
