"""SIGKILL at random moments of a real conversion: the next run ends with the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_checkpoint

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[3]

KILLS = 200

TRIALS = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from small_conversion import contents, run

source, work, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def forked(store):
    # One import for all: every converter is a child of this process, which computes nothing itself.
    child = os.fork()
    if not child:
        code = 1
        try:
            run(source, store, threads=2)
            code = 0
        finally:
            os._exit(code)
    return child

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def timed(store):
    start = time.perf_counter()
    assert ended(forked(store)) == 0
    return time.perf_counter() - start

whole = sorted(timed(work / str(i)) for i in range(5))[2]
straight = contents(work / "0")
random.seed(5)
killed, found, left, wrong = 0, set(), 0, []
for trial in range(20 * kills):
    store = work / "store"
    shutil.rmtree(store, ignore_errors=True)
    child = forked(store)
    # Evenly over the whole time: the k-th kill comes at a random moment of the k-th part.
    time.sleep((killed + random.random()) / kills * whole)
    os.kill(child, signal.SIGKILL)
    if ended(child) != -signal.SIGKILL:
        left += 1
        whole *= 0.99  # it takes less time by now than when it was timed
        continue
    killed += 1
    found.add(tuple(sorted(contents(store))) if store.exists() else ())
    assert ended(forked(store)) == 0
    if contents(store) != straight:
        wrong.append(killed)
    if killed == kills:
        break
print(json.dumps({"killed": killed, "states": len(found), "finished": left, "wrong": wrong, "seconds": whole}))
"""


def test_two_hundred_kills_at_random_moments(tmp_path, request):
    """A conversion that is killed at any moment resumes to the bytes of an uninterrupted one."""
    source = small_checkpoint.save(tmp_path / "model")
    memory = Path("/dev/shm")
    work = memory / f"edgemoe-kills-{os.getpid()}" if os.access(memory, os.W_OK) else tmp_path / "work"
    work.mkdir()
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", str(work)], check=True))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support", ROOT / "tests" / "support" / "files")))
    done = subprocess.run(
        [sys.executable, "-c", TRIALS, str(source), str(work), str(KILLS)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["killed"], result["wrong"]) == (KILLS, [])
    assert result["states"] >= 6, "the kills did not fall into different moments"
