"""kernels.probe: measurements, kept, repeated and refused ones; and the paths that `--kernel` forces."""

from __future__ import annotations

import json
import logging

import pytest
from availability import needs_native
from native_paths import forced

from edgemoe.errors import UserError
from edgemoe.kernels import probe, registry
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.probe import Timing, choose_fastest, measure, preferred
from edgemoe.models.options import groups

pytestmark = needs_native


@pytest.fixture(autouse=True)
def restored():
    """The choice of this process is the same after a test."""
    before = paths.choice()
    yield
    paths.choose(before)


@pytest.fixture
def timings(monkeypatch) -> list[Timing]:
    """Counts measurements, in which the path that was measured first is the fastest."""
    made = []

    def counted() -> list[Timing]:
        made.append(True)
        return [
            Timing(*key, path, 1.0 + i, 1.0)
            for key in paths.choice()
            for i, path in enumerate(paths.candidates(*key))
        ]

    monkeypatch.setattr(probe, "measure", counted)
    return made


def test_the_fastest_path_of_each_kind_of_work_is_taken():
    """By least time, whatever the order of measurement; a narrower path by a tenth, or the widest is taken."""
    of = [
        *(("experts", "1", "avx2", 3.0), ("experts", "1", "avx512-vnni", 2.0)),
        ("dense", "1", "avx2", 1.0),
        *(("dense", "2 to 12", "avx512-vnni", 2.0), ("dense", "2 to 12", "avx2", 1.85)),
        *(("experts", "2 to 12", "avx512-vnni", 2.0), ("experts", "2 to 12", "avx2", 1.75)),
    ]
    assert preferred([Timing(*one, 1.0) for one in of]) == {
        ("experts", "1"): "avx512-vnni",
        ("dense", "1"): "avx2",
        ("dense", "2 to 12"): "avx512-vnni",
        ("experts", "2 to 12"): "avx2",
    }


@pytest.fixture
def sample(monkeypatch):
    """Yields a kind of work with several paths, and a function that gives it so many seconds by (path, turn)."""
    key = next(key for key in paths.choice() if len(paths.candidates(*key)) > 1)
    now, turns = [0.0], []

    def of(seconds) -> None:
        def run() -> None:
            path = paths.choice()[key]
            turns.append(path)
            now[0] += seconds(path, turns.count(path))

        monkeypatch.setattr(probe, "samples", lambda: iter([(*key, 6, run)]))

    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])
    return key, of


def test_a_turn_at_a_higher_clock_decides_nothing(sample):
    """A narrow path with two turns that are three times as fast as its others is no faster than the widest."""
    key, give = sample
    narrow, *_, widest = paths.candidates(*key)
    give(lambda path, turn: {narrow: 0.001 if turn in (3, 5) else 0.003}.get(path, 0.002))
    found = {one.path: one for one in measure()}
    assert found[narrow].seconds == pytest.approx(0.003)
    assert found[widest].rate == pytest.approx(3000)
    assert preferred(list(found.values()))[key] == widest


@pytest.mark.parametrize("always", [True, False])
def test_a_narrower_path_wins_if_it_wins_twice(sample, always):
    """A clock that is higher for a whole measurement of one path decides nothing either."""
    key, give = sample
    narrow, *_, widest = paths.candidates(*key)
    give(lambda path, turn: 0.001 if path == narrow and (always or turn <= 6) else 0.002)
    assert preferred(measure())[key] == (narrow if always else widest)


@pytest.mark.e2e
def test_a_measurement_has_every_candidate_and_changes_no_choice():
    """Every kind of work, number of rows and path, with a time above 0, in a second at most of times in all."""
    with forced("avx2"):
        found = measure()
        assert set(paths.choice().values()) == {"avx2"}
    want = [(*key, path) for key in paths.choice() for path in paths.candidates(*key)]
    assert sorted((one.work, one.rows, one.path) for one in found) == sorted(want)
    assert all(0 < one.seconds < 1 for one in found)


def test_a_machine_is_measured_once(tmp_path, timings):
    """The file of the first start serves the next one; there is no other file."""
    first = choose_fastest(tmp_path / "new")
    assert set(paths.choice().values()) == {"avx2"}
    assert (choose_fastest(tmp_path / "new"), len(timings)) == (first, 1)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


@pytest.mark.parametrize("change", ["threads", "library", "cpu"])
def test_another_machine_is_measured_anew(tmp_path, timings, monkeypatch, change):
    """A measurement holds for one processor, library and number of threads."""
    choose_fastest(tmp_path)
    other = probe.machine() | {change: "another"}
    monkeypatch.setattr(probe, "machine", lambda: other)
    choose_fastest(tmp_path)
    assert (len(timings), len(list(tmp_path.iterdir()))) == (2, 2)


def damage_text(content: str) -> str:
    return content[: len(content) // 2]


def damage_path(content: str) -> str:
    return content.replace("avx2", "avx3")


def damage_timing(content: str) -> str:
    found = json.loads(content)
    del found["timings"][0]
    return json.dumps(found | {"timings": found["timings"][:1]})


def damage_work(content: str) -> str:
    found = json.loads(content)
    return json.dumps(found | {"timings": [*found["timings"], found["timings"][0] | {"work": "tea"}]})


def damage_seconds(content: str) -> str:
    found = json.loads(content)
    return json.dumps(found | {"timings": [one | {"seconds": "soon"} for one in found["timings"]]})


def damage_depth(content: str) -> str:
    return "[" * 100_000


@pytest.mark.parametrize(
    "damage", [damage_text, damage_path, damage_timing, damage_work, damage_seconds, damage_depth]
)
def test_a_damaged_file_is_measured_anew(tmp_path, timings, caplog, damage):
    """With a warning that names the file."""
    choose_fastest(tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_text()
    key = json.loads(content)["machine"]
    damaged = json.loads(content)
    del damaged["machine"]
    file.write_text(damage(json.dumps({"machine": key, **damaged})))
    with caplog.at_level(logging.WARNING, "edgemoe"):
        choose_fastest(tmp_path)
    assert len(timings) == 2
    assert damage is damage_path or str(file) in caplog.text
    assert json.loads(file.read_text())["timings"] == json.loads(content)["timings"]


def test_another_version_s_file_is_measured_anew_in_silence(tmp_path, timings, caplog, monkeypatch):
    """A file of another version is no damage."""
    choose_fastest(tmp_path)
    monkeypatch.setattr(probe, "VERSION", probe.VERSION + 1)
    choose_fastest(tmp_path)
    assert (len(timings), caplog.text) == (2, "")


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path, timings):
    """The choice is made all the same."""
    place = tmp_path / "file"
    place.write_text("")
    choose_fastest(place)
    assert set(paths.choice().values()) == {"avx2"}


@pytest.mark.parametrize("name", paths.available())
def test_a_forced_path_is_taken_where_it_has_code(name, tmp_path, timings):
    """Nothing is measured; AMX leaves single rows to other paths, AVX-VNNI attention, AVX512-BF16 all else."""
    registry.select(name, tmp_path)
    for key, path in paths.choice().items():
        assert path == name or name not in paths.candidates(*key)
    assert (timings, list(tmp_path.iterdir())) == ([], [])


def test_torch_s_kernel_is_forced_for_experts_and_given_back(tmp_path, timings):
    """`auto` later in the process gives the compiled kernel again."""
    try:
        registry.select("torch", tmp_path)
        assert registry.compute().name == "torch"
    finally:
        registry.select("auto", tmp_path)
    assert registry.compute().name == "native"


def test_on_arm_8_bit_products_are_taken_where_they_have_code(monkeypatch):
    """Dense products, experts at levels 4 and 2, and single rows at level 8; the rest has 14-bit or float32 numbers."""
    arm = "neon", "neon-dotprod", "neon-i8mm"
    monkeypatch.setattr(paths, "_found", lambda: sum(1 << paths.PATHS.index(path) for path in arm))
    assert paths.available() == [*arm]
    for name, others in (("neon", "neon"), ("neon-dotprod", "neon"), ("neon-i8mm", "neon")):
        choice = paths.forced(name)
        own = {key for key, path in choice.items() if path == name}
        both = {(work, rows) for work in ("experts", "dense") for rows in paths.ROWS}
        assert own >= both | {("experts at 8 bits", "1")}
        assert {
            choice["experts at 8 bits", "2 to 12"],
            choice["attention", paths.ROWS[-1]],
        } == {others}


@pytest.mark.parametrize("name", ["amx", "avx9", "neon", paths.EMULATED])
def test_a_kernel_that_is_not_here_is_refused(name, tmp_path):
    """The message names the kernels that are."""
    if name in paths.available():
        pytest.skip(f"the processor has {name}")
    with pytest.raises(UserError, match=f"one of auto, {', '.join(paths.available())}, torch for --kernel"):
        registry.select(name, tmp_path)


def test_the_command_line_s_names_are_the_registry_s():
    """A shell completes the names without importing the registry."""
    assert groups.KERNELS == registry.NAMES


@pytest.mark.parametrize(("work", "bucket", "path"), [(9, 0, 0), (0, 9, 0), (0, 0, 9), (-1, 0, 0)])
def test_the_library_refuses_a_choice_outside_its_table(work, bucket, path):
    """C writes nothing beyond its table."""
    before = paths.choice()
    assert native.library().edgemoe_choose_path(work, bucket, path) == -1
    assert paths.choice() == before


def test_a_kernel_of_the_cpu_is_refused_on_a_gpu(tmp_path):
    """It would have no effect there."""
    with pytest.raises(UserError, match=r"--kernel, got a GPU.*--device cpu"):
        registry.select("torch", tmp_path, on_gpu=True)
    registry.select("auto", tmp_path, on_gpu=True)
