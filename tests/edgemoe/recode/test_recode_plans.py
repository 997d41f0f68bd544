"""recode.plans: a run without limits takes free memory alone, and says how much; a kernel's limit agrees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cgroups import needs_cgroup

from edgemoe.console.sizes import parse_size
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import DoesNotFit
from edgemoe.machine import process
from edgemoe.memory.overhead import PROCESS_BYTES
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.demo import DEMO
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.coding_memory import CodingMemory
from edgemoe.recode.plans import coding_room, plan_for_run
from edgemoe.recode.request import WINDOW, RecodeRequest
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from tools.checkout import child_environment

MIB = 1 << 20


def test_a_plan_leaves_other_memory_of_the_run_free(tiny_store, monkeypatch, capsys):
    """With all of it free every expert is resident; with less, fewer; with too little, a refusal names both."""
    store, settings = StoreModel.open(tiny_store), RunSettings.uniform(8)
    monkeypatch.setattr(process, "resident_bytes", lambda: 10**12)
    monkeypatch.setattr(process, "available_memory", lambda: 10**12)
    request = RecodeRequest(None, 0, "low")
    whole = plan_for_run(store, request, settings, MIB, "logits")
    resident = store.plan(vram_limit=1 << 40, settings=settings, context=WINDOW)
    assert whole.vram_blocks == resident.vram_blocks
    used, each = whole.used_bytes(store.form), store.form.bytes_at(8)
    assert "for the model, 1.05 MB for logits" in capsys.readouterr().err
    monkeypatch.setattr(process, "available_memory", lambda: MIB + used - 3 * each)
    less = plan_for_run(store, request, settings, MIB, "logits")
    assert less.used_bytes(store.form) <= used - 3 * each
    assert less.vram_limit_bytes >= less.minimum_vram_bytes
    monkeypatch.setattr(process, "available_memory", lambda: MIB + whole.minimum_vram_bytes // 2)
    with pytest.raises(DoesNotFit, match=r"of free memory, 1\.05 MB of it for logits"):
        plan_for_run(store, request, settings, MIB, "logits")
    given = RecodeRequest(None, 0, "low", vram_limit=whole.minimum_vram_bytes)
    assert plan_for_run(store, given, settings, MIB, "logits").vram_limit_bytes == whole.minimum_vram_bytes


def test_a_layer_and_one_expert_always_fit_where_experts_are_coded():
    """Counted by hand for [128, 64] and [64, 64], 3 levels and 100 tokens."""
    geometry = RecordGeometry((MatrixSpec.of("gate_up", 128, 64), MatrixSpec.of("down", 64, 64)), 8)
    memory = CodingMemory(geometry, 3, 100)
    assert memory.layer == 10 * 100 * 64 + 2 * 2 * 4 * 64 * 64
    coded = 4 * (128 + 64) * 64 + 4 * 5 * 128 * 64 + 16 * 64 * 64
    assert memory.expert(0) == coded + geometry.record_bytes
    assert memory.expert(7) - memory.expert(0) == 7 * 4 * (64 + 64 + 128 + 64 + 64)
    assert memory.least == memory.layer + memory.expert(100)


def test_coding_takes_free_memory_alone(monkeypatch):
    """Up to a limit; the largest matrix is always allowed where it fits, and else refused by name."""
    monkeypatch.setattr(process, "available_memory", lambda: 5 * MIB)
    assert [coding_room(MIB, limit) for limit in (3 * MIB, 9 * MIB, 0)] == [3 * MIB, 5 * MIB, MIB]
    with pytest.raises(DoesNotFit, match="for the largest matrix that is coded, got 5"):
        coding_room(6 * MIB, 9 * MIB)


CODING = """
import json, sys
from pathlib import Path
from edgemoe.errors import DoesNotFit
from edgemoe.machine import process
from edgemoe.machine.cgroups import cgroups
from edgemoe.memory.overhead import PROCESS_BYTES
from edgemoe.models.options.groups import Opening
from edgemoe.models.open import open_model
from edgemoe.policy.settings import RunSettings
from edgemoe.recode import run
from edgemoe.recode.coding_memory import CodingMemory
from edgemoe.recode.request import WINDOW, RecodeRequest

folder, source, text = map(Path, sys.argv[1:])
store, request = open_model(Opening(folder)), RecodeRequest(text, 4 * WINDOW, "low", threads=2)
(group, version), *_ = cgroups("memory")
file = group / ("memory.limit_in_bytes" if version == 1 else "memory.max")

def leave(room):
    file.write_text(str(int(file.read_text()) - process.available_memory() + room))

memory = CodingMemory(store.manifest.geometry, 3, request.tokens)
leave(max(PROCESS_BYTES - process.resident_bytes(), 0) + memory.least - (1 << 20))
try:
    run.recode(store, source, request)
    refusal = ""
except DoesNotFit as error:
    refusal = str(error)
begun = (folder / run.FOLDER).exists()
own = process.resident_bytes()
plan = store.plan(vram_limit=1 << 62, settings=RunSettings.uniform(8), context=WINDOW)
least = max(PROCESS_BYTES - own, 0) + memory.least + plan.minimum_vram_bytes
leave(least + (plan.used_bytes(store.form) - plan.minimum_vram_bytes) // 2)
process.reset_peak()
codes = run.recode(store, source, request).codes
print(json.dumps([refusal, begun, own, process.peak_resident_bytes(), str(codes)]))
"""


@needs_cgroup
@pytest.mark.folders
@pytest.mark.e2e
def test_coding_experts_stays_inside_its_plan_and_a_kernels_limit(tmp_path):
    """Refused by name before a file is made where a layer does not fit; else within what was printed, and finished."""
    convert_checkpoint(DEMO, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    text, report = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text((DEMO / "README.md").read_text() * 8)
    child = limited(CODING, report, tmp_path / "store", DEMO, text)
    assert child.returncode == 0, child.stderr
    refusal, begun, own, peak, codes = json.loads(child.stdout)
    assert "for a layer of experts that is coded" in refusal
    assert not begun
    assert "calibrated on 2,048 tokens of text.txt" in codes
    said = " ".join(child.stderr.split())
    printed = {
        name: size(said, rf"(\S+ \S+) for {name}") for name in ("the model", "choices", "experts that are")
    }
    assert peak <= max(PROCESS_BYTES, own) + sum(printed.values())
    usage = json.loads(report.read_text())
    assert usage["oom_kills"] == 0
    assert usage["peak_bytes"] is None or usage["peak_bytes"] <= usage["limit_bytes"]


def size(said: str, pattern: str) -> int:
    """Bytes that a line of a plan gives."""
    (found,) = set(re.findall(pattern, said))
    return parse_size(found.replace(" ", ""))


def limited(program: str, report: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program in a memory cgroup of 3 GB, which it makes smaller by itself."""
    command = ["-m", "tools.peers.limited", "--memory", "3G", "--keep-cache", "--json", report, "--"]
    return subprocess.run(
        [sys.executable, *command, sys.executable, "-c", program, *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


CHILD = """
import json, sys
from pathlib import Path
from edgemoe.machine import process
from edgemoe.machine.cgroups import cgroups
from edgemoe.memory.overhead import PROCESS_BYTES
from edgemoe.models.options.groups import Opening
from edgemoe.models.open import open_model
from edgemoe.policy.settings import RunSettings
from edgemoe.recode import dense_choice
from edgemoe.recode.plans import logit_bytes
from edgemoe.recode.request import WINDOW, RecodeRequest

dense_choice.WINDOWS, dense_choice.CANDIDATES = 1, (4,)
store = open_model(Opening(Path(sys.argv[1])))
whole = store.plan(vram_limit=1 << 62, settings=RunSettings.uniform(8), context=WINDOW)
used, least = whole.used_bytes(store.form), whole.minimum_vram_bytes
room = (used + least) // 2 + logit_bytes(store) + max(PROCESS_BYTES - process.resident_bytes(), 0)
(folder, version), *_ = cgroups("memory")
file = folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")
file.write_text(str(int(file.read_text()) - process.available_memory() + room))
made = dense_choice.DenseTrial(store, Path(sys.argv[2]), RecodeRequest(None, 0, "low"), ()).run()
print(json.dumps([used, made.dense_choice.tokens]))
"""


@needs_cgroup
@pytest.mark.folders
@pytest.mark.e2e
def test_a_choice_of_dense_bits_stays_inside_a_kernels_limit(tmp_path):
    """In a memory cgroup with room for some of the experts the choice ends, and nothing is killed.

    The experts of the demo are tens of MB, next to which it does not matter how much the process grows meanwhile.
    """
    convert_checkpoint(DEMO, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    report = tmp_path / "report.json"
    child = limited(CHILD, report, tmp_path / "store", DEMO)
    assert child.returncode == 0, child.stderr
    used, tokens = json.loads(child.stdout)
    assert tokens == WINDOW
    said = re.findall(r"at most (\S+ \S+) for the model", " ".join(child.stderr.split()))
    assert said
    assert all(parse_size(size.replace(" ", "")) < used for size in said[:1])
    usage = json.loads(report.read_text())
    assert usage["oom_kills"] == 0
    assert usage["peak_bytes"] is None or usage["peak_bytes"] <= usage["limit_bytes"]
