"""Models from a double of the Hub give the store of a directory, with one shard on disk at a time."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_checkpoint
from faults import HALTING
from hub_double import COMMIT, HubDouble, point
from huggingface_hub import constants
from programs import ForkedPython, run_forked
from safetensors.torch import save_file

from edgemoe.errors import DamagedData, DoesNotFit, EdgemoeError, ModelRefused, UserError
from edgemoe.families.table import family_of
from edgemoe.hub import repository as hub
from edgemoe.hub.checkpoint import open_streamed
from edgemoe.hub.name import HubModel
from edgemoe.hub.shards import layer_of
from edgemoe.models.cache import downloads_directory
from edgemoe.models.conversion import calibration_run, first_codes, first_use
from edgemoe.models.conversion.run import convert_checkpoint, convert_from_hub
from edgemoe.models.resolve import resolve_store, store_or_headers
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.record.layout import LAYOUTS

pytestmark = pytest.mark.e2e

REPO = "acme/tiny"
FIRST, SECOND = small_checkpoint.SHARDS
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return small_checkpoint.save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def straight(source, tmp_path_factory) -> dict[str, bytes]:
    """Name -> bytes of the store of the same checkpoint, converted from a directory."""
    store = tmp_path_factory.mktemp("straight")
    convert(
        source,
        store,
        family_of(small_checkpoint.CONFIG),
        max_level=8,
        layout=LAYOUTS["cpu-generic"],
        dense_bits=16,
        progress=lambda done, total: None,
    )
    return contents(store)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


@pytest.fixture
def served(source, tmp_path, monkeypatch) -> Iterator[HubDouble]:
    """A double of the Hub that serves the checkpoint to this process, and an empty cache."""
    directory = Path(shutil.copytree(source, tmp_path / "served"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubDouble(directory, REPO).serving() as double:
        point(monkeypatch, double.endpoint)
        yield double


def get(store: Path, name: str = REPO, **options: object) -> None:
    model = HubModel.parse(name)
    assert model is not None
    convert_from_hub(model, store, **{"max_level": 8, "layout": "cpu-generic", "dense_bits": 16} | options)


def downloads(tmp_path: Path) -> list[Path]:
    parent = tmp_path / "cache" / "edgemoe" / "downloads"
    return list(parent.iterdir()) if parent.exists() else []


@pytest.mark.parametrize("name", [REPO, f"{REPO}@v1", f"{REPO}@{COMMIT}"])
def test_the_store_equals_the_one_from_a_directory(served, straight, tmp_path, name):
    """The store has the same bytes and fingerprint, for every form of the name; no download is left."""
    get(tmp_path / "store", name)
    assert contents(tmp_path / "store") == straight
    assert downloads(tmp_path) == []
    assert served.downloads(FIRST)[-1] is None
    get(tmp_path / "store", name)
    assert served.downloads(FIRST).count(None) == 1, "a finished store needs no shard"


def test_one_file_of_weights_is_a_shard_too(served, straight, tmp_path):
    """A model in a single model.safetensors gives the same records."""
    for path in served.directory.glob("model*"):
        path.unlink()
    save_file(small_checkpoint.tensors(), served.directory / "model.safetensors", {"format": "pt"})
    get(tmp_path / "store")
    made = contents(tmp_path / "store")
    assert all(made[n] == straight[n] for n in straight if n.endswith(".safetensors"))


def test_the_whole_checkpoint_can_be_kept(served, straight, tmp_path):
    """With keep_source every file stays, equal to the Hub's."""
    get(tmp_path / "store", keep_source=True)
    (kept,) = downloads(tmp_path)
    assert {n: c for n, c in contents(kept).items() if n[0] != "."} == contents(served.directory)
    assert contents(tmp_path / "store") == straight
    get(tmp_path / "store")
    assert downloads(tmp_path) == [kept], "a kept checkpoint is not removed by another run"
    get(tmp_path / "again")
    assert served.downloads(FIRST).count(None) == 1, "a kept checkpoint is not downloaded again"


class StoppedError(Exception):
    """Stands for a kill."""


def test_keep_source_completes_an_earlier_download(served, tmp_path, monkeypatch):
    """After a finished or interrupted conversion, keep_source downloads the missing shards."""
    get(tmp_path / "store")
    get(tmp_path / "store", keep_source=True)
    (kept,) = downloads(tmp_path)
    assert {n: c for n, c in contents(kept).items() if n[0] != "."} == contents(served.directory)
    shutil.rmtree(kept)

    def stop(self, count: int, total: int) -> None:
        if count > total * 5 // 8:  # in the second layer: experts are most of the weights
            raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr("edgemoe.hub.progress.ConversionProgress.converted", stop)
        with pytest.raises(StoppedError):
            get(tmp_path / "other")
    assert contents(kept)[FIRST] != contents(served.directory)[FIRST]
    get(tmp_path / "other", keep_source=True)
    assert {n: c for n, c in contents(kept).items() if n[0] != "."} == contents(served.directory)
    assert contents(tmp_path / "other") == contents(tmp_path / "store")


def test_a_chat_keeps_the_source_as_convert_does(served, tmp_path):
    """resolve_store with keep_source leaves the checkpoint in the cache; a directory is refused."""
    store = resolve_store(Path(REPO), "cpu-generic", keep_source=True)
    (kept,) = downloads(tmp_path)
    assert {n: c for n, c in contents(kept).items() if n[0] != "."} == contents(served.directory)
    with pytest.raises(UserError, match=f"{store}, and a directory is never removed"):
        resolve_store(store, keep_source=True)


def test_a_store_of_another_model_is_not_taken_for_it(served, tmp_path):
    """A finished store of another source in the destination is refused and stays unchanged."""
    get(tmp_path / "store")
    before = contents(tmp_path / "store")
    changed = {name: tensor + 1 for name, tensor in small_checkpoint.tensors().items()}
    for path in served.directory.glob("model*"):
        path.unlink()
    save_file(changed, served.directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="source"):
        get(tmp_path / "store")
    assert contents(tmp_path / "store") == before


def test_a_broken_connection_is_resumed(served, straight, tmp_path, monkeypatch):
    """Only the rest of the shard is requested, and the store is the same."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    served.cut[SECOND] = 5000
    get(tmp_path / "store")
    assert served.downloads(SECOND)[-2:] == [None, 5000]
    assert contents(tmp_path / "store") == straight


@pytest.mark.parametrize("error", [KeyError("sha"), TypeError("a list"), ValueError("no JSON")], ids=repr)
def test_an_answer_that_no_hub_gives_is_refused(served, tmp_path, monkeypatch, error):
    """Whatever huggingface_hub raises about an answer is one error that names the model."""

    def model_info(*arguments: object, **keywords: object) -> None:
        raise error

    monkeypatch.setattr("edgemoe.hub.repository.model_info", model_info)
    with pytest.raises(UserError, match=f"{REPO}.*{type(error).__name__}"):
        get(tmp_path / "store")


def test_a_model_that_chat_would_refuse_is_not_downloaded(served, tmp_path):
    """Generation settings that no sampler can use end the conversion before the first shard."""
    (served.directory / "generation_config.json").write_text('{"do_sample": true, "temperature": "x"}')
    with pytest.raises(ModelRefused, match="temperature"):
        get(tmp_path / "store")
    for shard in small_checkpoint.SHARDS:
        assert served.downloads(shard).count(None) == 0, "only headers are requested before the check"
    assert not (tmp_path / "store").exists()


def test_a_corrupt_shard_is_not_used(served, straight, tmp_path):
    """The shard's hash detects a changed byte; the next run downloads the shard again."""
    served.corrupt.add(SECOND)
    with pytest.raises(DamagedData, match=SECOND):
        get(tmp_path / "store")
    served.corrupt.clear()
    get(tmp_path / "store")
    assert contents(tmp_path / "store") == straight


@pytest.mark.parametrize("name", ["config.json", small_checkpoint.INDEX])
def test_a_corrupt_small_file_is_not_used(served, straight, tmp_path, name):
    """git's blob id detects a changed byte of a file outside LFS; the next run downloads the file again."""
    served.corrupt.add(name)
    with pytest.raises(
        DamagedData, match=rf"{name} of {REPO} with git blob id [0-9a-f]{{40}}, got git blob id"
    ):
        get(tmp_path / "store")
    served.corrupt.clear()
    get(tmp_path / "store")
    assert contents(tmp_path / "store") == straight


@pytest.mark.parametrize("name", ["config.json", small_checkpoint.INDEX, SECOND])
def test_a_file_whose_hash_is_another_is_not_used(served, tmp_path, name):
    """A hash of other bytes in the Hub's list refuses every kind of file, exit 4."""
    served.other_hashes[name] = "0" * (64 if name == SECOND else 40)
    with pytest.raises(DamagedData, match=name) as caught:
        get(tmp_path / "store")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("digest", [None, "", "not hexadecimal"])
def test_a_file_without_a_hash_is_compared_by_size(served, straight, tmp_path, digest):
    """Where the Hub gives no hash of a small file, the model is converted all the same."""
    served.other_hashes["config.json"] = digest
    get(tmp_path / "store")
    assert contents(tmp_path / "store") == straight


@pytest.mark.parametrize(
    ("content", "digits"),
    [
        (b"", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"),
        (b"hello\n", "ce013625030ba8dba906f756967f9e9ca394464a"),
    ],
)
def test_the_blob_id_is_gits(tmp_path, content, digits):
    """The ids are what `git hash-object` prints."""
    (tmp_path / "file").write_bytes(content)
    assert hub._hash(tmp_path / "file", hub.BLOB_ID) == digits


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ([{"rfilename": "config.json"}, {"rfilename": "model.safetensors"}], "the size of config.json"),
        ([{"name": "config.json"}], "an answer that cannot be read"),
        (["config.json"], "an answer that cannot be read"),
        ([], "weights as safetensors"),
    ],
)
def test_a_list_of_files_that_is_not_understood_is_refused(served, tmp_path, listing, message):
    """A server that answers without names or sizes gets exit 2, not a traceback."""
    served.listing = listing
    with pytest.raises(UserError, match=message) as caught:
        get(tmp_path / "store")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("status", "message"), [(200, "the list of the files"), (404, "an error of the Hub")]
)
def test_an_answer_without_an_end_is_refused(served, tmp_path, monkeypatch, status, message):
    """Neither a list nor an error is read beyond a bound."""
    monkeypatch.setattr("edgemoe.hub.answers.LISTING_BYTES", 300_000)
    served.endless = status
    with pytest.raises(UserError, match=f"{message}.* of at most .* bytes, got more"):
        get(tmp_path / "store")


def test_a_list_that_comes_too_slowly_is_refused(served, tmp_path, monkeypatch):
    """The time for all of it is bounded, however often a piece comes."""
    monkeypatch.setattr("edgemoe.hub.answers.LISTING_SECONDS", 0.0)
    with pytest.raises(UserError, match="within 0 s, got a part of it"):
        get(tmp_path / "store")


def test_a_file_that_is_longer_than_the_hub_said_is_refused(served, tmp_path):
    """Its bytes are not written beyond that."""
    files = served.siblings()
    served.listing = [
        each | {"size": each["size"] - 1, "blobId": None} if each["rfilename"] == "config.json" else each
        for each in files
    ]
    with pytest.raises(EdgemoeError, match="more"):
        get(tmp_path / "store")


def test_disk_holds_one_shard_beside_the_store(served, tmp_path, monkeypatch):
    """At every step the disk has at most the largest shard and the tensors still to be read."""
    wide = {"num_hidden_layers": 6, "num_experts": 8, "hidden_size": 256, "moe_intermediate_size": 128}
    monkeypatch.setattr(
        small_checkpoint, "CONFIG", small_checkpoint.CONFIG | wide | {"num_attention_heads": 8}
    )
    for key, value in {"LAYERS": 6, "EXPERTS": 8, "HIDDEN": 256, "INNER": 128}.items():
        monkeypatch.setattr(small_checkpoint, key, value)
    shutil.rmtree(served.directory)
    save_in_shards(served.directory, 8)
    shards = sorted(path.stat().st_size for path in served.directory.glob("*.safetensors"))
    peak, seen = 0, []

    def watch(count: int, total: int) -> None:
        nonlocal peak
        taken = sum(p.stat().st_blocks * 512 for d in downloads(tmp_path) for p in d.rglob("*"))
        seen.append(taken)
        peak = max(peak, taken)

    monkeypatch.setattr(
        "edgemoe.hub.progress.ConversionProgress.converted", lambda self, *counts: watch(*counts)
    )
    monkeypatch.setattr(
        "edgemoe.hub.progress.ConversionProgress.downloaded", lambda self, size: watch(size, 0)
    )
    get(tmp_path / "store")
    dense = (tmp_path / "store/dense.safetensors").stat().st_size
    layer = 8 * 3 * 256 * 128 * 2
    stand_ins = len(shards) * (3 * 65536 + 16384)
    assert len(seen) > 48
    assert peak <= shards[-1] + dense + layer + stand_ins + 65536
    assert peak < sum(shards) / 2


def save_in_shards(directory: Path, count: int) -> None:
    """Saves the checkpoint in `count` shards, whose borders cut layers."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(small_checkpoint.CONFIG))
    small_checkpoint.save_tokenizer(directory)
    everything = small_checkpoint.tensors()
    names = list(everything)
    parts = [names[i * len(names) // count : (i + 1) * len(names) // count] for i in range(count)]
    files = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: everything[name] for name in part}, directory / file)
        files |= dict.fromkeys(part, file)
    (directory / small_checkpoint.INDEX).write_text(json.dumps({"weight_map": files}))


KILLED = """
import os, signal, sys
from pathlib import Path
from edgemoe.hub import progress, repository as hub
from edgemoe.hub.name import HubModel
from edgemoe.models.conversion.run import convert_from_hub

at, count = int(sys.argv[2]), 0

def step(*args):
    global count
    count += 1
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)

for name in ("converted", "downloaded"):
    setattr(progress.ConversionProgress, name, step)
convert_from_hub(HubModel.parse("acme/tiny"), Path(sys.argv[1]), max_level=8, layout="cpu-generic", dense_bits=16)
print(count)
"""


def killed_at(step: int, store: Path) -> int:
    done = run_forked("-c", KILLED, store, step)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def test_a_killed_conversion_resumes_to_the_same_store(served, straight, tmp_path):
    """After SIGKILL during download or conversion another run gives the same bytes and leaves no download."""
    for step in (1, 3, 6):
        assert killed_at(step, tmp_path / "store") == -signal.SIGKILL
    get(tmp_path / "store")
    assert contents(tmp_path / "store") == straight
    assert downloads(tmp_path) == []


def test_a_missing_network_fails_at_once(tmp_path, monkeypatch):
    """A refused connection gives exit 2 within seconds with the model's name, and creates no store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    point(monkeypatch, "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(UserError, match=rf"{REPO} .*cannot be reached") as caught:
        get(tmp_path / "store")
    assert time.monotonic() - start < 3
    assert caught.value.exit_code == 2
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"down": True}, REPO, "cannot be reached"),
        ({"gated": True}, REPO, "gated"),
        ({}, "acme/nothing", "no such model"),
        ({}, f"{REPO}@v9", "no revision v9"),
    ],
)
def test_a_refusal_by_the_hub_exits_2(served, tmp_path, change, name, message):
    """A server that is down, a gated model, an unknown model, an unknown revision: one message each."""
    for attribute, value in change.items():
        setattr(served, attribute, value)
    with pytest.raises(UserError, match=message):
        get(tmp_path / "store", name)
    assert list(downloads_directory().glob("*")) == []


def test_a_model_without_safetensors_is_refused_before_anything_is_downloaded(served, tmp_path):
    """The message names the missing format; no weights are downloaded."""
    for path in served.directory.glob("model*"):
        path.unlink()
    (served.directory / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelRefused, match="safetensors"):
        get(tmp_path / "store")
    assert [method for method, *_ in served.requests if method == "GET"] == []
    assert list(downloads_directory().glob("*")) == []


def test_a_family_that_is_not_known_is_refused_after_its_config(served, tmp_path):
    """Only config.json is downloaded."""
    config = small_checkpoint.CONFIG | {"model_type": "llama"}
    (served.directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="llama"):
        get(tmp_path / "store")
    assert {name for method, name, _ in served.requests if method == "GET"} == {"config.json"}


@pytest.mark.parametrize("target", ["../../outside.safetensors", "a/b.safetensors", "pytorch_model.bin", 3])
def test_an_index_that_leads_elsewhere_is_refused(served, tmp_path, target):
    """Every name in the index must be a safetensors file of the repository, next to the index."""
    index = served.directory / small_checkpoint.INDEX
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": target}}))
    with pytest.raises(ModelRefused, match="names"):
        get(tmp_path / "store")


def test_a_disk_too_small_for_a_shard_is_refused(served, tmp_path, free_disk):
    """Store and largest shard have to fit, or no shard is downloaded."""
    free_disk(100_000)
    with pytest.raises(DoesNotFit):
        get(tmp_path / "store")
    assert served.downloads(FIRST).count(None) == 0


def test_stand_ins_have_the_checkpoints_fingerprint(served, source, tmp_path):
    """Before any download the checkpoint opens with the same names and the same fingerprint."""
    model = HubModel(REPO)
    shards, total = open_streamed(model, tmp_path / "work", keep=False, progress=lambda size: None)
    there, whole = Checkpoint.open(tmp_path / "work"), Checkpoint.open(source)
    assert there.names() == whole.names()
    assert there.fingerprint(shards.contents) == whole.fingerprint()
    assert total == sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert shards.peak_bytes == max(path.stat().st_size for path in source.glob("*.safetensors"))
    assert served.downloads(FIRST).count(None) == 0


def test_what_no_part_of_a_finished_store_needs_is_not_downloaded(served, tmp_path):
    """Once all weights are released except one, its shard alone is fetched."""
    shards, _ = open_streamed(HubModel(REPO), tmp_path / "work", keep=False, progress=lambda size: None)
    shards.release(None, {"model.norm.weight"})
    shards.require(None)
    counts = [served.downloads(file).count(None) for file in (FIRST, SECOND)]
    assert sorted(counts) == [0, 1]


def test_what_cannot_work_is_refused_before_a_download(served, source, tmp_path, run):
    """A limit, and a template, are checked by small files and headers; no shard is downloaded and no store is begun."""
    assert run("chat", "-m", REPO, "-p", "x", "--vram-limit", "1KB")[0] == 3
    assert run("bench", "-m", REPO, "--vram-limit", "1KB")[0] == 3
    served.directory = Path(shutil.copytree(source, tmp_path / "wrong"))
    (served.directory / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    shutil.rmtree(tmp_path / "cache" / "edgemoe" / "downloads")
    code, _, err = run("pull", REPO)
    assert (code, "chat template" in err) == (2, True)
    assert [start for shard in (FIRST, SECOND) for start in served.downloads(shard) if start is None] == []
    assert list((tmp_path / "cache").rglob("experts-*")) == []


def test_a_plan_reads_headers_only(served, tmp_path):
    """The shape that a plan needs is the later store's; no weight is downloaded and no file is left."""
    with store_or_headers(Path(REPO), "auto") as found:
        planned = StoreModel.planned(found)
    assert served.downloads(FIRST).count(None) == 0
    assert downloads(tmp_path) == []
    store = StoreModel.open(resolve_store(Path(REPO)))
    assert (planned.shape, planned.manifest.geometry) == (store.shape, store.manifest.geometry)
    with store_or_headers(Path(REPO), "auto") as found:
        assert found == store.directory


def test_a_model_option_may_be_a_hubs_name(served, tmp_path, monkeypatch, capsys):
    """`--model org/name` gives a cached store, which later runs use without the network; a directory goes first.

    A big model is announced once.
    """
    monkeypatch.setattr(first_use, "BIG_BYTES", 1)
    store = resolve_store(Path(REPO))
    assert f"{REPO} is used for the first time" in capsys.readouterr().err
    assert store.parent == tmp_path / "cache" / "edgemoe" / "stores"
    before = len(served.requests)
    assert resolve_store(Path(REPO)) == store
    assert len(served.requests) == before
    assert capsys.readouterr().err == ""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme/tiny").mkdir(parents=True)
    with pytest.raises(UserError, match=r"neither store\.json nor config\.json"):
        resolve_store(Path(REPO))


def test_damaged_records_of_a_download(served, straight, tmp_path):
    """Without its commit a download stops with the way to start again; a shard's own record can be missing."""
    killed_at(6, tmp_path / "store")
    (work,) = downloads(tmp_path)
    for record in (work / ".edgemoe").glob("*.here.json"):
        record.write_text("[")
    commit = (work / ".edgemoe" / "commit.json").read_text()
    (work / ".edgemoe" / "commit.json").write_text("{}")
    with pytest.raises(DamagedData, match=f"edgemoe rm {REPO}"):
        get(tmp_path / "store")
    (work / ".edgemoe" / "commit.json").write_text(commit)
    get(tmp_path / "store")
    assert contents(tmp_path / "store") == straight


def test_a_second_use_goes_on_after_the_first_is_killed(served, source, tmp_path, capsys):
    """It waits for the process that downloads and converts, names it, and resumes once that is killed."""
    gate = tmp_path / "gate"
    gate.touch()
    first = ForkedPython("-c", HALTING, gate, "pull", REPO, "--plain-codes")
    deadline = time.monotonic() + 60
    while not gate.with_suffix(".halted").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    threading.Timer(0.5, first.kill).start()
    store = resolve_store(Path(REPO))
    assert first.wait(timeout=60) == -signal.SIGKILL
    err = capsys.readouterr().err
    assert f"{REPO} is being converted by process {first.pid} into {store}: waiting" in err
    assert f"process {first.pid} ended before the store was finished: the conversion is resumed here" in err
    convert_checkpoint(source, tmp_path / "straight", max_level=None, layout="auto", dense_bits=8)
    assert contents(store) == contents(tmp_path / "straight")
    assert downloads(tmp_path) == []


def test_two_runs_at_once_do_not_mix(served, tmp_path, monkeypatch):
    """A second run fails while the first downloads the model."""
    started, go_on = threading.Event(), threading.Event()
    download = hub.HubRepository.download

    def wait(self, *args, **kwargs):
        started.set()
        assert go_on.wait(timeout=60)
        return download(self, *args, **kwargs)

    monkeypatch.setattr(hub.HubRepository, "download", wait)
    first = threading.Thread(target=get, args=(tmp_path / "store",))
    first.start()
    assert started.wait(timeout=60)
    with pytest.raises(UserError, match="another process"):
        get(tmp_path / "other")
    go_on.set()
    first.join()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-30B-A3B", ("Qwen/Qwen3-30B-A3B", "main")),
        ("a/b@refs/pr/3", ("a/b", "refs/pr/3")),
        ("a/b@v1.0", ("a/b", "v1.0")),
        ("a/b:Q4_K_M", ("a/b", "main", "Q4_K_M")),
        ("a/b:Q4_K_M@v1", ("a/b", "v1", "Q4_K_M")),
        ("a/b:", None),
        ("a/b:../x", None),
        ("a/b:c/d", None),
        ("a:b/c", None),
        ("a", None),
        ("a/b/c", None),
        ("../b", None),
        ("a/..", None),
        ("/a/b", None),
        ("a/b@../x", None),
        ("./a/b", None),
        ("a--x/b", None),
        ("", None),
    ],
)
def test_names_of_the_hub_differ_from_paths(text, expected):
    """org/name[:file][@revision] is a name; anything that could be a path is none. A slug has all of a name."""
    found = HubModel.parse(text)
    assert found == (expected and HubModel(*expected))
    assert found is None or (HubModel.from_slug(found.slug), found.name) == (found, text)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.12.mlp.experts.3.up_proj.weight", 12), ("lm_head.weight", None), ("mtp.layers.0.x", 0)],
)
def test_the_layer_of_a_tensor_is_the_first_number_in_its_name(name, layer):
    """This holds for every family."""
    assert layer_of(name) == layer


@pytest.mark.e2e
def test_a_checkpoint_stays_until_its_codes_are_calibrated(served, monkeypatch, capsys, tmp_path):
    """All of it is on the disk while they are, which a line says before; then it is removed.

    test_first_codes has the calibration itself.
    """
    monkeypatch.setattr(first_codes, "LONGEST", 1e9)
    seen = []

    def watched(source: Path, store: Path, bits: str) -> int:
        seen.append(sum(path.stat().st_blocks * 512 for path in source.glob("*.safetensors")))
        return 3

    monkeypatch.setattr(calibration_run, "run", watched)
    store = resolve_store(Path(REPO), calibrate=True)
    assert "stay on the disk until then" in capsys.readouterr().err
    assert seen[0] >= sum(path.stat().st_size for path in served.directory.glob("*.safetensors"))
    assert downloads(tmp_path) == []
    assert resolve_store(Path(REPO), calibrate=True) == store
