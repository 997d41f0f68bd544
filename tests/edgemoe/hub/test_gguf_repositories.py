"""GGUF files of a double of the Hub: one model is chosen, refused by its header or converted as from a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Kind, blocks, write_model
from hub_double import HubDouble, point
from small_tokenizer import a_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe.errors import BadHeader, DamagedData, ModelRefused
from edgemoe.hub.gguf_files import choose_gguf, gguf_head
from edgemoe.hub.name import HubModel
from edgemoe.hub.repository import HubRepository
from edgemoe.models.cache import cached_names
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.resolve import resolve_store, store_or_headers
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.store.manifest import MANIFEST_NAME

pytestmark = pytest.mark.e2e

REPO = "acme/tiny-GGUF"
WHOLE = "tiny-Q4_K_M.gguf"
PARTS = [f"tiny-Q8_0-{part:05d}-of-00006.gguf" for part in range(1, 7)]

Experts = tuple[np.ndarray, Kind]


def of_type(kind: Kind):
    """Experts of one type, with random codes."""

    def make(name: str, weight: torch.Tensor) -> Experts:
        return blocks(kind, tuple(weight.shape), sum(name.encode())), kind

    return make


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    """2 layers of 4 experts of 256. Read-only."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes,
            **experts,
            vocab_size=300,
            head_dim=64,
            max_position_embeddings=64,
            eos_token_id=2,
            pad_token_id=0,
            bos_token_id=None,
        )
    )


@pytest.fixture(scope="module")
def files(model, tmp_path_factory) -> Path:
    """A repository of the model in Q4_K, and in Q8_0 in six parts in a folder. Read-only."""
    directory = tmp_path_factory.mktemp("repository")
    write_model(directory / WHOLE, model, a_tokenizer(), of_type(Kind.Q4_K))
    (directory / "Q8_0").mkdir()
    write_model(directory / "Q8_0/tiny-Q8_0.gguf", model, a_tokenizer(), of_type(Kind.Q8_0), part_tensors=5)
    assert sorted(path.name for path in (directory / "Q8_0").iterdir()) == PARTS
    (directory / "mmproj-F16.gguf").write_bytes(b"no language model")
    (directory / "README.md").write_text("text")
    return directory


@pytest.fixture
def served(files, tmp_path, monkeypatch) -> Iterator[HubDouble]:
    """A double of the Hub that serves the repository to this process, and an empty cache."""
    directory = Path(shutil.copytree(files, tmp_path / "served"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubDouble(directory, REPO).serving() as double:
        point(monkeypatch, double.endpoint)
        yield double


def straight(source: Path, store: Path) -> dict[str, bytes]:
    """Name -> bytes of the store of a file on this disk."""
    convert_checkpoint(source, store, max_level=None, layout="auto", dense_bits=8)
    return contents(store)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def whole_downloads(double: HubDouble) -> set[str]:
    """The files of which all bytes were requested."""
    return {name for method, name, start in double.requests if method == "GET" and start is None}


@pytest.mark.parametrize(
    ("name", "first", "file"),
    [
        (REPO, WHOLE, {WHOLE}),
        (f"{REPO}:q4_k_m", WHOLE, {WHOLE}),
        (f"{REPO}:tiny-Q4_K_M@v1", WHOLE, {WHOLE}),
        (f"{REPO}:Q8_0", f"Q8_0/{PARTS[0]}", {f"Q8_0/{part}" for part in PARTS}),
    ],
)
def test_the_store_is_that_of_the_file(served, files, tmp_path, name, first, file):
    """By quantization, by file name, and without either, the bytes are as from a conversion of the file on disk."""
    store = resolve_store(Path(name))
    assert contents(store) == straight(files / first, tmp_path / "straight")
    assert whole_downloads(served) == file
    assert list((tmp_path / "cache/edgemoe/downloads").iterdir()) == []
    assert [each.short for each in cached_names()] == [name]
    served.down = True
    assert resolve_store(Path(name)) == store, "a finished store needs no Hub"


def test_a_repository_with_safetensors_too_needs_the_quantization(served, checkpoint):
    """Without a quantization the safetensors are the model."""
    shutil.copytree(checkpoint, served.directory, dirs_exist_ok=True)
    with store_or_headers(Path(REPO), "auto") as found:
        assert found.format == "safetensors"
    with store_or_headers(Path(f"{REPO}:Q4_K_M"), "auto") as found:
        assert found.format == "GGUF"


def test_a_plan_reads_headers_only(served):
    """The shape of a later store is known from ranges of the files; no weight is downloaded."""
    with store_or_headers(Path(f"{REPO}:Q8_0"), "auto") as found:
        planned = StoreModel.planned(found)
    assert whole_downloads(served) == set()
    store = StoreModel.open(resolve_store(Path(f"{REPO}:Q8_0")))
    assert (planned.shape, planned.manifest.geometry) == (store.shape, store.manifest.geometry)


def test_a_header_longer_than_a_request_is_read_whole(served, monkeypatch):
    """A header arrives by several ranges one after another, and no byte is requested twice."""
    monkeypatch.setattr("edgemoe.hub.gguf_files._PIECE", 1000)
    repository = HubRepository.find(HubModel(REPO))
    raw, start = gguf_head(repository, repository.file(WHOLE))
    whole = (served.directory / WHOLE).read_bytes()
    places = [tensor.data_offset for tensor in gguf.GGUFReader(served.directory / WHOLE).tensors]
    assert start == min(places)
    assert whole.startswith(raw)
    begun = served.downloads(WHOLE)
    assert len(begun) > 5
    assert begun == [1000 * n for n in range(len(begun))]


def refuse_type(double: HubDouble, model: Qwen3MoeForCausalLM) -> str:
    """Writes a file of a type that no conversion reads."""

    def make(name: str, weight: torch.Tensor) -> Experts:
        return np.zeros((*weight.shape[:2], weight.shape[2] // 32 * 40), np.uint8), Kind.Q8_1

    write_model(double.directory / "tiny-Q8_1.gguf", model, a_tokenizer(), make)
    return f"{REPO}:Q8_1"


def refuse_architecture(double: HubDouble, model: Qwen3MoeForCausalLM) -> str:
    """Writes a file of a model without experts."""
    write_model(double.directory / "tiny-F16.gguf", model, a_tokenizer(), change={"expert_count": 0})
    return f"{REPO}:F16"


def refuse_tokenizer(double: HubDouble, model: Qwen3MoeForCausalLM) -> str:
    """Writes a file without a tokenizer."""
    write_model(double.directory / "tiny-F16.gguf", model)
    return f"{REPO}:F16"


def refuse_template(double: HubDouble, model: Qwen3MoeForCausalLM) -> str:
    """Writes a file with a template that cannot be rendered."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = "{{ 1 // 0 }}"
    write_model(double.directory / "tiny-F16.gguf", model, tokenizer)
    return f"{REPO}:F16"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (refuse_type, "Q8_1"),
        (refuse_architecture, "0 experts"),
        (refuse_tokenizer, "tokenizer"),
        (refuse_template, "chat template"),
    ],
)
def test_what_cannot_work_is_refused_by_the_header(served, model, tmp_path, run, write, message):
    """Type, architecture, tokenizer and template end the command before a file is downloaded."""
    code, _, err = run("pull", write(served, model))
    assert (code, message in err) == (2, True), err
    assert whole_downloads(served) == set()
    assert list((tmp_path / "cache").rglob("experts-*")) == []


def test_a_limit_and_a_disk_too_small_are_refused_by_the_header(served, free_disk, run):
    """Exit 3 before a file is downloaded; a plan needs no disk."""
    assert run("chat", "-m", f"{REPO}:Q8_0", "-p", "x", "--vram-limit", "1KB")[0] == 3
    free_disk(100_000)
    assert run("pull", f"{REPO}:Q8_0")[0] == 3
    assert run("plan", "-m", f"{REPO}:Q8_0")[0] == 0
    assert whole_downloads(served) == set()


@pytest.mark.parametrize("name", [WHOLE, f"Q8_0/{PARTS[3]}"])
def test_a_corrupt_file_is_not_used(served, files, tmp_path, name):
    """The hash of the Hub's list detects a changed byte in any part; the next run downloads the file again."""
    served.corrupt.add(name)
    chosen = Path(REPO if name == WHOLE else f"{REPO}:Q8_0")
    with pytest.raises(DamagedData, match=name):
        resolve_store(chosen)
    served.corrupt.clear()
    first = WHOLE if name == WHOLE else f"Q8_0/{PARTS[0]}"
    assert contents(resolve_store(chosen)) == straight(files / first, tmp_path / "straight")


def without_tensors(path: Path) -> None:
    """Moves a file's fields into a first part without tensors, as llama-gguf-split --no-tensor-first-split does."""
    reader = gguf.GGUFReader(path)
    parts = [path.with_name(f"{path.stem}-{part:05d}-of-00002.gguf") for part in (1, 2)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "qwen3moe")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kinds = field.types
                sub_type = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kinds[0], sub_type)
        for tensor in reader.tensors if number == 1 else ():
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()


def test_a_first_part_without_tensors_is_compared_with_its_hash_too(served, tmp_path):
    """Its fields are the model's config and tokenizer, so that it is downloaded whole; a changed byte is refused."""
    without_tensors(served.directory / WHOLE)
    first = "tiny-Q4_K_M-00001-of-00002.gguf"
    served.corrupt.add(first)
    with pytest.raises(DamagedData, match=first):
        resolve_store(Path(REPO))
    served.corrupt.clear()
    expected = straight(served.directory / first, tmp_path / "straight")
    assert contents(resolve_store(Path(REPO))) == expected


def test_a_header_that_is_none_is_refused(served):
    """A file that only has the name of a GGUF file ends the command after one range."""
    (served.directory / WHOLE).write_bytes(b"<html>" * 100_000)
    with pytest.raises(BadHeader, match=f"{WHOLE} of {REPO}"):
        resolve_store(Path(REPO))
    assert len(served.downloads(WHOLE)) == 1


def test_a_kept_file_stays_as_it_is_on_the_hub(served, tmp_path):
    """With keep_source the file stays in the cache, equal to the Hub's."""
    store = resolve_store(Path(REPO), keep_source=True)
    (kept,) = (tmp_path / "cache/edgemoe/downloads").iterdir()
    assert (kept / WHOLE).read_bytes() == (served.directory / WHOLE).read_bytes()
    assert Checkpoint.open(kept).format == "GGUF"
    assert (store / MANIFEST_NAME).exists()


HALVES = ["x/m-F16-00001-of-00002.gguf", "x/m-F16-00002-of-00002.gguf"]


def names(*quantizations: str) -> list[str]:
    return [f"tiny-{each}.gguf" for each in quantizations]


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("a/b", ["tiny.gguf"], ["tiny.gguf"]),
        ("a/b", ["tiny.GGUF"], ["tiny.GGUF"]),
        ("a/b", names("Q8_0", "Q4_K_M", "Q2_K"), names("Q4_K_M")),
        ("a/b", names("Q5_K_S"), names("Q5_K_S")),
        ("a/b:q5_k_s", names("Q5_K_S", "Q4_K_M"), names("Q5_K_S")),
        ("a/b:Q4_K_M", names("UD-Q4_K_M", "Q4_K_M"), names("Q4_K_M")),
        ("a/b:UD-Q4_K_M", names("UD-Q4_K_M", "Q4_K_M"), names("UD-Q4_K_M")),
        ("a/b:bf16", names("BF16", "F16"), names("BF16")),
        ("a/b:other-Q8_0", ["other-Q8_0.gguf", *names("Q8_0")], ["other-Q8_0.gguf"]),
        ("a/b", ["mmproj-F16.gguf", "imatrix.gguf", *names("Q8_0")], names("Q8_0")),
        ("a/b", HALVES[::-1], HALVES),
        ("a/b", ["../tiny.gguf", "a\\tiny.gguf", ".gguf", "README.md"], []),
    ],
)
def test_one_model_is_chosen_by_its_quantization(name, files, expected):
    """Without case; of a repository that is named alone Q4_K_M, or the only model."""
    model = HubModel.parse(name)
    assert model is not None
    assert choose_gguf(model, set(files)) == expected


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("a/b", names("Q8_0", "IQ4_XS"), "got IQ4_XS, Q8_0: name one, such as a/b:IQ4_XS"),
        ("a/b:Q3_K@v1", names("Q8_0"), "got Q8_0: name one, such as a/b:Q8_0@v1"),
        (
            "a/b:Q8_0",
            ["x/1-Q8_0.gguf", "2-Q8_0.gguf"],
            "got 2-Q8_0.gguf, x/1-Q8_0.gguf: name one, such as a/b:2-Q8_0",
        ),
        ("a/b:Q8_0", ["README.md"], "got no GGUF file: choose a repository"),
        ("a/b", HALVES[1:], f"got no {HALVES[0]}"),
    ],
)
def test_a_choice_that_is_none_is_refused_with_the_names(name, files, message):
    """No model, several, or a missing part: the message names what there is and how to choose it."""
    model = HubModel.parse(name)
    assert model is not None
    with pytest.raises(ModelRefused, match=message):
        choose_gguf(model, set(files))
