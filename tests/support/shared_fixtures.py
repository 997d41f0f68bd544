"""Fixtures of all tests: a tiny random Qwen3-MoE checkpoint, its stores and engines, and the command line."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest import python
from hypothesis import settings
from roomy_stack import roomy

from edgemoe.machine.model_code import without_compiler

# Until the tests have been collected nothing that is made goes again.
gc.disable()

with without_compiler():
    import small_checkpoint
    from counted_engine import CountedEngine
    from short_probes import probe_briefly
    from small_conversion import contents
    from small_conversion import run as convert_small
    from small_tokenizer import a_tokenizer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from edgemoe.cli import main
    from edgemoe.engine.engine import Engine, StoreModel
    from edgemoe.errors import EdgemoeError
    from edgemoe.families.base import Family
    from edgemoe.kernels import probe
    from edgemoe.kv.formats import KVFormat
    from edgemoe.layers import skeleton
    from edgemoe.machine.process import disk_read_bytes
    from edgemoe.memory.split import MINIMUM_EXPERTS
    from edgemoe.models import runnable, tokenizer
    from edgemoe.models.conversion import first_codes
    from edgemoe.models.conversion.run import convert_checkpoint
    from edgemoe.models.demo import DEMO
    from edgemoe.models.resolve import resolve_store
    from edgemoe.policy.settings import RunSettings
    from edgemoe.storage.convert.config import Config, bounded_config
    from edgemoe.storage.files.untrusted import read_json
    from edgemoe.storage.store.calibration import CALIBRATION_NAME
    from edgemoe.storage.store.manifest import MANIFEST_NAME

# A busy machine takes any time for an example; pytest's timeout ends a test that hangs.
settings.register_profile("edgemoe", deadline=None, max_examples=40)
settings.load_profile("edgemoe")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each of several test processes has a core. Tests of several threads start pools or programs of their own.
    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves what imports and the collection have made out of Python's garbage collection.

    pytest adds two handlers to each logger that passes nothing on, three times for every test; torch has fifty of them.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Calls a test function where the frames of its calls have room."""
    return roomy(lambda: python.pytest_pyfunc_call(pyfuncitem))


@pytest.fixture(scope="session", autouse=True)
def default_sigint() -> None:
    """Restores Python's handler of SIGINT, which a shell's background jobs ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def codes_as_they_are_rounded() -> Iterator[None]:
    """Leaves the calibration of a first use out, which takes seconds, except in the tests that show it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_codes, "LONGEST", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_measurement() -> Iterator[None]:
    """Measures the paths of kernels once, and not for each of the caches that tests make: half a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "measure", cache(probe.measure))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_trial_a_config() -> Iterator[None]:
    """Leaves out the trial step of a model without weights whose config has passed it: thousands of engines open."""
    passed, try_step = set[str](), skeleton.try_step

    def try_once(model: Any, family: Family, config: Config) -> None:
        key = json.dumps(config, sort_keys=True)
        if key not in passed:
            try_step(model, family, config)
            passed.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skeleton, "try_step", try_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_trial_a_tokenizer() -> Iterator[None]:
    """Leaves out the trial of a tokenizer, in a copy of this process, that has passed it for as many ids."""
    passed, check = set[tuple[bytes | int, ...]](), tokenizer.check_tokenizer
    names = sorted({"tokenizer_config.json", "special_tokens_map.json", *tokenizer.VOCABULARIES})

    def check_once(directory: Path) -> None:
        paths = [directory / name for name in names]
        files = [path.read_bytes() if path.is_file() else b"" for path in paths]
        words = 0
        with suppress(EdgemoeError):  # of a config that the check will refuse
            words = bounded_config(read_json(directory, "config.json"))["vocab_size"]
        if (key := (*files, words)) not in passed:
            check(directory)
            passed.add(key)

    with pytest.MonkeyPatch.context() as patch:
        for module in (tokenizer, runnable):
            patch.setattr(module, "check_tokenizer", check_once)
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Qwen3MoeForCausalLM:
    """3 layers, the middle one dense; 8 experts of 32, 2 per token; bf16. Read-only."""
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                # At the initial 0.02 the experts' part of the output would be below rounding.
                parameter.mul_(10)
    return model.to(torch.bfloat16).eval()


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, one tensor per expert's matrix, in one file. Read-only."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model.save_pretrained(directory)
    a_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def fused_checkpoint(tiny_model: Qwen3MoeForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with one tensor for all experts of a layer, in several files. Read-only."""
    directory = tmp_path_factory.mktemp("model") / "tiny-fused"
    tiny_model.save_pretrained(directory, save_original_format=False, max_shard_size="100KB")
    a_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_store(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the tiny model, up to level 8, dense weights in bf16. Read-only."""
    directory = tmp_path_factory.mktemp("store") / "tiny"
    convert_checkpoint(checkpoint, directory, max_level=8, layout="auto", dense_bits=16)
    return directory


@pytest.fixture(scope="session")
def foxes_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of sentences about foxes, dogs and sums."""
    chance = random.Random(0)
    words = (
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "dog",
        "and",
        "12",
        "+",
        "30",
        "makes",
        "42",
        ".",
    )
    path = tmp_path_factory.mktemp("texts") / "foxes.txt"
    path.write_text(" ".join(chance.choices(words, k=6000)))
    return path


@pytest.fixture
def damageable(tiny_store: Path, tmp_path: Path) -> Path:
    """A copy of the tiny store, without what other tests' engines have measured, for tests that change it."""
    ignore = shutil.ignore_patterns(CALIBRATION_NAME)
    return Path(shutil.copytree(tiny_store, tmp_path / "store", ignore=ignore))


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory (XDG_CACHE_HOME) in which the demo model is converted. Read-only."""
    directory = tmp_path_factory.mktemp("demo-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        resolve_store(DEMO)
    return directory


@pytest.fixture(scope="session")
def demo_store(demo_cache: Path) -> Path:
    """The demo's store in demo_cache. Read-only."""
    (manifest,) = demo_cache.rglob(MANIFEST_NAME)
    return manifest.parent


@pytest.fixture
def one_short_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Leaves one name in the list that `doctor` plans, as each imports a model's class; the cache is another one.

    It measures bandwidths for a moment, with few bytes.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    probe_briefly(monkeypatch)
    monkeypatch.setattr("edgemoe.commands.doctor.PROBE", 4 << 20)
    from edgemoe.models.plans import short_list

    monkeypatch.setattr(short_list, "SHORT_NAMES", {"qwen3": short_list.SHORT_NAMES["qwen3"]})
    return "qwen3"


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of small_checkpoint.py. Read-only."""
    return small_checkpoint.save(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def straight_files(small_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Name -> bytes of its store's files, from an undisturbed conversion by small_conversion.py."""
    directory = tmp_path_factory.mktemp("straight")
    convert_small(small_source, directory)
    return contents(directory)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    """Opens engines with blocks for `experts` and `dram_experts` in each tier (None: all); closes them at the end."""
    with ExitStack() as stack:

        def open_one(
            directory: Path,
            *,
            experts: int | None = None,
            dram_experts: int = 0,
            level: int = 8,
            context: int = 64,
            parallel: int = 1,
            kv: str = "bf16",
            prefill_rows: int | None = None,
            **changes: Any,
        ) -> Engine:
            """Opens one.

            `kv` is the format of keys and values, `changes` settings, by default every expert at exactly `level`.
            """
            settings = RunSettings(**{"levels": (level,), "exact": True, "readers": 4} | changes)
            store = StoreModel.open(directory).with_kv(KVFormat(kv, kv))
            each, limit = store.form.bytes_at(settings.levels[0]), None
            plan_of = partial(
                store.plan, settings=settings, context=context, parallel=parallel, prefill_rows=prefill_rows
            )
            if experts is not None:
                limit = plan_of(vram_limit=None).minimum_vram_bytes + (experts - MINIMUM_EXPERTS) * each
            plan = plan_of(vram_limit=limit, dram_limit=dram_experts * each)
            return stack.enter_context(CountedEngine(store, plan, settings))

        yield open_one


@pytest.fixture
def fast() -> Iterator[Path]:
    """A directory in memory where the system has one, for tests whose hundreds of runs sync thousands of files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def accounted(tmp_path: Path) -> None:
    """Skips the test where the system does not count reads from this filesystem."""
    path, size = tmp_path / "probe", 1 << 20
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
    before = disk_read_bytes()
    path.read_bytes()
    after = disk_read_bytes()
    if before is None or after is None or after - before < size:
        pytest.skip("reads from this filesystem are not counted")


@pytest.fixture
def free_disk(monkeypatch) -> Callable[[int], None]:
    """Makes every disk have so many free bytes."""
    return lambda size: monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process, with text on its stdin if some is given; returns (exit code, stdout, stderr)."""

    def run_main(*arguments: object, stdin: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edgemoe", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        code = main()
        return code, *capsys.readouterr()

    return run_main
