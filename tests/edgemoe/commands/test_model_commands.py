"""The commands `models`, `rm` and `doctor`, and their messages."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import small_checkpoint
from safetensors.torch import load_file

from edgemoe.commands import doctor
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.hub.name import HubModel
from edgemoe.memory.overhead import suggested_limits
from edgemoe.models import cache as model_cache
from edgemoe.models.cache import aliases, cached_names, find_cached, remove, stores_directory
from edgemoe.models.listing import cached_models
from edgemoe.models.place import by_name
from edgemoe.models.published.short_names import SHORT_NAMES
from edgemoe.models.resolve import resolve_store
from edgemoe.speed.disk import PIECE, measure_disk
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.writer import MARKER_NAME


@pytest.fixture
def run(run, monkeypatch, tmp_path):
    """Runs a command in this process, with an empty cache and an empty stdin: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return partial(run, stdin="")


@pytest.fixture
def store(run, tmp_path) -> Path:
    """A cached store."""
    return resolve_store(small_checkpoint.save(tmp_path / "small"))


@pytest.mark.e2e
def test_models_lists_the_cache(run, store, tmp_path):
    """Name, family, parameters, bytes on disk, levels, layout, last use; of unfinished and damaged stores too."""
    for state, name in (("unfinished", MARKER_NAME), ("damaged", MANIFEST_NAME)):
        (store.parent / state).mkdir()
        (store.parent / state / name).write_text("{")
    os.utime(store, (5000, 5000))
    code, out, _ = run("models", "--json")
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert (code, set(rows)) == (0, {store.name, "unfinished", "damaged"})
    whole = rows[store.name]
    assert (whole["state"], whole["levels"], whole["last_used"]) == ("ready", [8, 4, 2], 5000)
    assert whole["layout"] == Manifest.load(store).layout
    assert whole["bytes"] == sum(path.lstat().st_blocks * 512 for path in store.iterdir())
    source = [
        tensor for path in (tmp_path / "small").glob("*.safetensors") for tensor in load_file(path).values()
    ]
    assert whole["parameters"] == sum(tensor.numel() for tensor in source)
    assert whole["family"] == json.loads((tmp_path / "small" / "config.json").read_text())["model_type"]
    assert (rows["unfinished"]["state"], rows["damaged"]["state"]) == ("unfinished", "damaged")
    table = run("models")[1].splitlines()
    assert len(table) == 4
    assert table[-1].split()[:2] == ["small", whole["family"]]
    assert "8/4/2" in table[-1]


def test_an_empty_cache_lists_models_to_begin_with(run):
    """Exit 0, with a line for each short name on stderr and an empty stdout."""
    code, out, err = run("models")
    assert (code, out, "no models yet" in err) == (0, "", True)
    assert re.search(r"^qwen3 +18.6 GB  Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M$", err, re.M)


def test_a_narrow_terminal_has_names_on_their_own_lines(run, monkeypatch):
    """No line of the table is wider than a terminal of 60 columns, where the whole row would be."""
    (stores_directory() / f"{'long-' * 9}name-0123456789abcdef-cpu-avx2").mkdir(parents=True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = run("models")[1].splitlines()
    assert len(out) == 4
    assert max(map(len, out)) <= 60
    assert out[2].startswith("long-")


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_a_short_name_is_a_model_of_the_hub(name, monkeypatch, tmp_path):
    """It stands for its repository with 4-bit files; a model of the cache that begins so goes first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    resolved = by_name(Path(name.upper()))
    assert HubModel.parse(str(resolved)) is not None
    assert str(resolved) == SHORT_NAMES[name].repository
    (stores_directory() / f"{name}-x-0123456789abcdef-cpu-avx2").mkdir(parents=True)
    with pytest.raises(UserError, match="a finished conversion"):
        by_name(Path(name))


@pytest.mark.e2e
def test_the_demo_is_described_before_its_first_use(run):
    """`inspect demo` and `verify demo` convert it where the cache is empty; then the conversion is used."""
    code, out, err = run("inspect", "demo", "--json")
    assert (code, json.loads(out)["experts"], "converting demo" in err) == (0, 192, True)
    code, _, err = run("inspect", "demo")
    assert (code, "converting" in err) == (0, False)


@pytest.mark.e2e
def test_the_demo_beside_an_earlier_versions(run, demo_store):
    """With two stores that begin with demo- in the cache, `demo` is the one of this version."""
    shutil.copytree(demo_store, stores_directory() / demo_store.name)
    first = run("inspect", "demo", "--json")[1]
    shutil.copytree(demo_store, stores_directory() / "demo-0123456789abcdef")
    code, out, err = run("inspect", "demo", "--json")
    assert (code, out, "converting" in err) == (0, first, False)


def test_using_a_store_moves_it_to_the_front(run, store):
    """The last use of a store is the time of the last command that opened it."""
    os.utime(store, (5000, 5000))
    assert run("plan", "--model", store)[0] in (0, 4)
    assert cached_models()[0].last_used > 5000


@pytest.mark.e2e
@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("what\nYES\n", 0), ("n\n", 1), ("\n", 1), ("", 2)])
def test_rm_needs_confirmation(run, store, answer, code):
    """Only yes removes, no exits 1, and the end of the input is a mistake of the command line."""
    got, out, err = run("rm", store.name, stdin=answer)
    assert (got, "Remove" in err) == (code, True)
    assert store.exists() == (code != 0)
    assert ("removed" in out) == (code == 0)


def test_rm_takes_an_unambiguous_prefix(run, store):
    """A prefix of two names removes neither and prints both."""
    twin = Path(shutil.copytree(store, store.with_name(store.name + "-twin")))
    code, _, err = run("rm", "sma", "--yes")
    assert (code, twin.name in err, twin.exists()) == (2, True, True)
    assert run("rm", store.name, "--yes")[0] == 0
    assert run("rm", "small", "--yes")[0] == 0
    assert cached_models() == []
    code, _, err = run("rm", "small", "--yes")
    assert (code, "the cache has nothing" in err) == (2, True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_names(layout):
    """Every layout is left out of a short name; main is left out of a name on the Hub, other revisions are not."""
    assert aliases(f"my-cpu-model-1f2e3d4c5b6a7988-{layout}")[0] == "my-cpu-model"
    assert aliases(f"acme--tiny-cpu@main-{layout}")[0] == "acme/tiny-cpu"
    assert aliases(f"acme--tiny@v1--b-{layout}")[0] == "acme/tiny@v1/b"
    assert aliases("by-hand") == ("by-hand",)


@pytest.mark.e2e
def test_every_command_takes_the_printed_name(run, store, tmp_path, monkeypatch):
    """Each name that `models` prints, and its beginning, is a model for every command that takes one."""
    monkeypatch.chdir(tmp_path / "cache")
    (name,) = (line.split()[0] for line in run("models")[1].splitlines()[1:])
    assert name == "small"
    for given in (name, "sm", store.name):
        assert run("inspect", given, "--json")[0] == 0
        assert run("verify", given)[0] == 0
        assert run("plan", "--model", given, "--json")[0] == 0
    shutil.copytree(store, store.with_name("smaller-0123456789abcdef-cpu-avx2"))
    for command in (("inspect",), ("verify",), ("rm",), ("calibrate",), ("plan", "--model")):
        code, out, err = run(*command, "sm")
        assert (code, out, "2 of them, small, smaller:" in err) == (2, "", True)
        code, out, err = run(*command, "large")
        assert (code, out, "the cache has small, smaller:" in err) == (2, "", True)
    assert run("inspect", "small")[0] == 0


def test_a_path_goes_before_a_name(run, store, tmp_path, monkeypatch):
    """A directory that is called as a model of the cache is not hidden by it."""
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "small").is_dir()
    code, _, err = run("inspect", "small")
    assert (code, "a store in small" in err) == (2, True)


def test_the_name_of_an_unfinished_conversion(run, store, tmp_path, monkeypatch):
    """It is refused with what resumes it; one of the Hub is opened by its name there, which resumes it."""
    monkeypatch.chdir(tmp_path / "cache")
    (store / MANIFEST_NAME).unlink()
    code, _, err = run("plan", "--model", "small")
    assert (code, "the conversion resumes" in err) == (2, True)
    (model_cache.downloads_directory() / "acme--tiny@main-cpu-avx2").mkdir(parents=True)
    assert by_name(Path("tiny")) == Path("acme/tiny")


def test_names_that_two_models_have(run, store):
    """Each of two stores of one checkpoint is printed by a name of its own, which finds it."""
    shutil.copytree(store, store.with_name("small-0123456789abcdef-cuda"))
    (store.parent / "small").mkdir()
    names = cached_names()
    assert len({name.short for name in names}) == 3
    assert [find_cached(name.short) for name in names] == names


@pytest.mark.e2e
def test_pull_prints_the_line_of_a_chat(run, tmp_path, monkeypatch):
    """A checkpoint is converted, and the printed line, without its first word, runs."""
    source = small_checkpoint.save(tmp_path / "my model")
    code, out, err = run("pull", source)
    assert (code, "converting" in err) == (0, True)
    words = shlex.split(out)
    assert words[:3] == ["edgemoe", "chat", "-m"]
    monkeypatch.chdir(tmp_path / "cache")
    assert run("plan", *words[2:])[0] == 0
    assert json.loads(run("pull", source, "--json")[1])["name"] == words[3]


def test_a_published_model_is_planned_without_a_download(run, tmp_path, monkeypatch):
    """plan and pull --dry-run know its sizes; the Hub's model is what its name stands for, unless the cache has one."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    code, out, err = run("plan", "-m", "gpt-oss-20b", "--vram-limit", "12GB", "--json")
    plan = json.loads(out)
    assert (code, "published sizes" in err) == (0, True)
    fits = json.loads(run("pull", "GPT-OSS-20B", "--dry-run", "--json")[1])
    assert fits["smallest_limit"] == plan["minimum_vram_bytes"]
    assert fits["download_bytes"] == pytest.approx(13.8e9, rel=0.01)
    assert "13.8 GB to download" in run("pull", "gpt-oss-20b", "--dry-run")[1]
    assert by_name(Path("gpt-oss-20b")) == Path("openai/gpt-oss-20b")
    (stores_directory() / "gpt-oss-20b-0123456789abcdef-cpu-avx2").mkdir(parents=True)
    with pytest.raises(UserError, match="finished conversion"):
        by_name(Path("gpt-oss-20b"))


def test_rm_by_the_hubs_name_takes_store_and_download(run, store):
    """A model's name on the Hub finds its store and its download, and both are removed."""
    name = "acme--tiny@main-cpu-avx2"
    store.rename(store.with_name(name))
    download = model_cache.downloads_directory() / name
    download.mkdir(parents=True)
    (download / "config.json").write_text("{}")
    assert find_cached("acme/tiny").paths == (store.with_name(name), download)
    assert run("rm", "acme/tiny", "--yes")[0] == 0
    assert not download.exists()
    assert cached_models() == []


def test_rm_of_files_of_another_user(run, store, monkeypatch):
    """A refusal by the system is one line and exit 2."""

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    code, _, err = run("rm", "small", "--yes")
    assert (code, "Permission denied" in err, err.count("\n")) == (2, True, 1)


@pytest.mark.parametrize("place", ["file", "file/store", "proc"])
def test_a_destination_that_is_no_directory_exits_2(run, tmp_path, place):
    """It is refused as a mistake of the command line, where possible before the source is read."""
    (tmp_path / "file").write_text("mine")
    source = tmp_path / "none" if place != "proc" else small_checkpoint.save(tmp_path / "small")
    code, _, err = run("convert", source, Path("/proc/store") if place == "proc" else tmp_path / place)
    assert (code, "store" in err) == (2, True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.e2e
@pytest.mark.parametrize("exclusive", [True, False])
def test_rm_refuses_what_is_in_use(run, store, exclusive):
    """The lock of a chat or of a conversion keeps the store complete."""
    with StoreLock(store, exclusive=exclusive):
        code, _, err = run("rm", store.name, "--yes")
        assert (code, "another process" in err) == (2, True)
    Manifest.load(store)
    assert run("rm", store.name, "--yes")[0] == 0


def test_a_removal_that_was_killed_is_finished_later(run, store, monkeypatch):
    """The store leaves the list at once, and the next listing removes the rest of its files."""

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model_cache.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(find_cached(store.name))
    assert not store.exists()
    assert len(list(store.parent.iterdir())) == 1
    assert cached_models() == []
    assert list(store.parent.iterdir()) == []


@pytest.mark.e2e
def test_doctor_reports_every_finding(run, tmp_path, monkeypatch, one_short_name):
    """JSON and text contain every finding, and the suggested limit leaves memory free."""
    monkeypatch.setattr(doctor, "PROBE", 4 * PIECE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    options = tmp_path / "edgemoe" / "config.toml"
    options.parent.mkdir()
    options.write_text("[doctor]\njson = true\n")
    code, out, _ = run("doctor", tmp_path / "not" / "yet")
    found = json.loads(out)
    assert code == 0
    assert found["directory"] == str(tmp_path)
    assert found["disk"]["read"] > 1e6
    assert found["disk"]["write"] > 1e6
    assert found["kernel"] in ("native", "torch")
    times = found["kernel_times"]
    assert {"torch", "avx2"} <= {one["path"] for one in times} or found["kernel"] == "torch"
    assert all(one["seconds"] > 0 and one["rate"] > 1e6 for one in times)
    assert found["vector_width"] in ("AVX512", "AVX2", "DEFAULT")
    assert 0 < found["vram_limit"] < found["ram_free"]
    assert {"lockable", "vram_free", "disk_free", "kv_bytes", "cores", "layout"} <= set(found)
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "edgemoe"}
    assert found["options_file"] == str(options)
    (model,) = found["models"]
    assert (model["name"], model["download_bytes"]) == (one_short_name, 18_600_000_000)
    assert model["fitting"] is None or 0 < model["tok_s"][0] < model["tok_s"][1]
    rates = json.loads(run("plan", "demo", "--device", "cpu", "--json")[1])["expected"]["rates"]
    assert (rates["ssd"], rates) == (found["disk"]["read"], found["rates"]["cpu"])
    options.unlink()
    code, out, _ = run("doctor", tmp_path)
    assert code == 0
    assert f"options file none; {options} would be read" in " ".join(out.split())
    for word in (
        "direct reads",
        "to be locked",
        "GPU",
        "layout",
        "--vram-limit",
        "tokens per second",
        *(["--full has the rates", " for experts"] if times else []),
    ):
        assert word in out
    assert ("experts, 1 rows: " in run("doctor", tmp_path, "--full")[1]) == bool(times)


def test_suggested_limits():
    """Without a GPU the only tier is in RAM; with one, RAM is the second tier."""
    vram, dram = suggested_limits(8_000_000_000, None)
    assert 6_000_000_000 < vram < 7_500_000_000
    assert dram is None
    assert suggested_limits(8_000_000_000, 10_000_000_000) == (9_000_000_000, vram)
    assert suggested_limits(100_000_000, None) == (0, None)


def test_a_disk_that_is_too_full_is_not_measured(tmp_path, free_disk):
    """No file is written to a disk that the probe would fill."""
    free_disk(PIECE)
    with pytest.raises(DoesNotFit):
        measure_disk(tmp_path, 2 * PIECE)
    assert list(tmp_path.iterdir()) == []


def test_keep_source_of_a_directory_is_refused(run, tmp_path):
    """The option has no effect on a directory, so it exits 2."""
    source = small_checkpoint.save(tmp_path / "small")
    code, _, err = run("convert", source, tmp_path / "store", "--keep-source")
    assert (code, "never removed" in err) == (2, True)
    assert not (tmp_path / "store").exists()


def test_a_missing_directory_exits_2(run, tmp_path):
    """A path that is no name of the Hub is refused without a request to the network."""
    code, _, err = run("plan", "--model", tmp_path / "none")
    assert (code, "no such file or directory" in err) == (2, True)
    (tmp_path / "notes.txt").touch()
    code, _, err = run("plan", "--model", tmp_path / "notes.txt")
    assert (code, "a file that is no GGUF" in err) == (2, True)


@pytest.mark.e2e
def test_a_lora_adapter_is_refused_by_name(run, tmp_path):
    """A folder that peft has written holds no model."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}', encoding="utf-8")
    code, _, err = run("bench", "--model", str(tmp_path))
    assert (code, "a LoRA adapter: merge it" in err) == (2, True)


def test_a_linked_store_is_not_removed(run, store, tmp_path):
    """rm refuses a link in the cache in one line, and touches neither it nor its target."""
    moved = store.rename(tmp_path / "elsewhere")
    store.symlink_to(moved)
    code, _, err = run("rm", store.name, "--yes")
    assert (code, err.count("\n")) == (2, 1)
    assert f"a link to {moved}" in err
    assert store.is_symlink()
    assert (moved / MANIFEST_NAME).exists()


def test_the_cache_is_its_users_alone(run, store, tmp_path):
    """The cache's root is made with mode 0700."""
    assert (tmp_path / "cache" / "edgemoe").stat().st_mode & 0o777 == 0o700
