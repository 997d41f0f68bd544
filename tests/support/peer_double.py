#!/usr/bin/env python3
"""A peer with the protocol of tools/peers/run.py that answers at once; replaces the Python of --llama-python.

PEER_DOUBLE names a file to which every request is appended, except requests of a program with the argument "unlogged",
which never fails. PEER_FAILS is empty, "exit", "silence", "memory", or
"repacking", which crashes where the request has that.
"""

import json
import os
import sys
from pathlib import Path

request = json.load(sys.stdin)
lines = Path("/proc/self/cgroup").read_text().splitlines()
inside = [line.split(":")[-1] for line in lines if "memory" in line or line.startswith("0::")]
logged = sys.argv[1:] != ["unlogged"]
if logged:
    with Path(os.environ["PEER_DOUBLE"]).open("a") as log:
        log.write(json.dumps(request | {"inside": inside, "omp": os.environ["OMP_NUM_THREADS"]}) + "\n")
failure = os.environ.get("PEER_FAILS") if logged else None
if failure == "exit":
    sys.exit("no such model")
if failure == "repacking" and request["repacking"]:
    os.kill(os.getpid(), 11)
if failure == "memory":
    hoard = b"1" * (2 << 30)
if failure == "silence":
    sys.exit()
if request.get("saves_state"):
    Path(request["state"]).write_text("state")
if request["popularity"]:
    print(json.dumps({"counts": [[4, 0, 0, 0, 0, 0, 0, 0], [1] * 8]}))
else:
    steps = range(request["new_tokens"])
    answer = {
        "load_s": 1.0,
        "token_times": [8.0 + 2.0 * i for i in steps],
        "tokens": list(steps),
        "versions": {},
    }
    print("something else first")
    print(json.dumps(answer))
