"""`edgemoe compensate` and `convert --compensate`: their output, and where compensators are listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_checkpoint
from small_conversion import run as convert_small

from edgemoe.models.resolve import resolve_store
from edgemoe.storage.store.manifest import Manifest


@pytest.fixture
def store(small_source, tmp_path) -> Path:
    convert_small(small_source, tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.e2e
def test_compensate_prints_what_it_made(run, small_source, store):
    """One object with --json, one line without; progress with the time left on stderr; at once the second time."""
    code, out, err = run("compensate", store, "--reference", small_source, "--rank", 4, "--json")
    index = Manifest.load(store).compensators
    assert index
    made = json.loads(out)
    assert (code, made["store"], made["bytes"]) == (0, str(store), index.nbytes)
    assert (made["rule"], made["mean_rank"], made["base_level"]) == ("error", 4, 2)
    assert made["reference"] == index.reference == Manifest.load(store).source
    assert made["left_error"] == index.error
    assert "compensating store: 12 of 12 (100 %), 0 s left" in err
    code, out, err = run("compensate", store, "--reference", small_source, "--rank", 4)
    assert (code, err) == (0, "")
    assert out.startswith(
        f"{store}: level 2 compensated at mean rank 4 by error, 24.6 KB, 5.33 bits per weight, "
    )
    assert out.endswith(" of the error left\n")


def test_compensate_takes_its_options(run, store):
    """Another rule and level, from the store's own highest level."""
    code, out, _ = run("compensate", store, "--rank", 2, "--ranks", "uniform", "--residual", 4, "--json")
    made = json.loads(out)
    assert code == 0
    assert (made["rule"], made["mean_rank"], made["base_level"]) == ("uniform", 2, 4)
    assert made["reference"] == "level 8"


@pytest.mark.e2e
def test_convert_compensates(run, small_source, tmp_path):
    """The store of `convert` and `compensate`, one after the other, byte by byte; `inspect` and `verify` show it."""
    code, out, _ = run(
        "convert", small_source, tmp_path / "one", "--compensate", 4, "--ranks", "kurtosis", "--json"
    )
    assert code == 0
    assert json.loads(out)["compensators"]["rule"] == "kurtosis"
    assert run("convert", small_source, tmp_path / "two")[0] == 0
    options = ("--reference", small_source, "--rank", 4, "--ranks", "kurtosis")
    assert run("compensate", tmp_path / "two", *options)[0] == 0
    one, two = (Manifest.load(tmp_path / name) for name in ("one", "two"))
    assert one == two
    assert one.compensators
    code, out, _ = run("inspect", tmp_path / "one")
    assert code == 0
    assert "rule kurtosis" in out
    code, out, _ = run("verify", tmp_path / "one", "--json")
    stored = sum(entry.size for entry in one.files.values()) + one.expert_bytes + one.compensators.nbytes
    assert (code, json.loads(out)["bytes"]) == (0, stored)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "uniform"), "--compensate RANK with --ranks and --residual"),
        (("--compensate", 4, "--ranks", "best"), "choose --ranks error, kurtosis or uniform"),
        (("--compensate", 4, "--residual", 8), "choose --residual 2 or 4"),
    ],
)
def test_wrong_options_are_refused_before_a_conversion(run, small_source, tmp_path, options, words):
    """Exit 2, and no store."""
    code, _, err = run("convert", small_source, tmp_path / "store", *options)
    assert (code, words in " ".join(err.split())) == (2, True)
    assert not (tmp_path / "store").exists()


def test_a_damaged_factor_fails_verification(run, small_source, store):
    """Exit 4 with layer and expert."""
    assert run("compensate", store, "--rank", 4)[0] == 0
    index = Manifest.load(store).compensators
    assert index
    path = store / "compensators" / index.layers[0].file
    raw = bytearray(path.read_bytes())
    raw[index.layers[0].entries[1].offset] ^= 1
    path.write_bytes(raw)
    code, out, _ = run("verify", store)
    assert (code, "the compensator of layer 0, expert 1" in out.replace("\n", " ")) == (4, True)


@pytest.mark.e2e
def test_compensated_models_are_listed(run, tmp_path, monkeypatch):
    """The list has the mean rank next to the levels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = resolve_store(small_checkpoint.save(tmp_path / "small"))
    assert json.loads(run("models", "--json")[1])["compensated"] is None
    assert run("compensate", "small", "--rank", 3)[0] == 0
    assert json.loads(run("models", "--json")[1])["compensated"] == 3
    assert "8/4/2 + rank 3" in run("models")[1]
    assert Manifest.load(store).compensators


def test_a_reference_that_is_no_checkpoint_is_refused(run, store, tmp_path):
    """Exit 2, with the path."""
    code, out, err = run("compensate", store, "--reference", tmp_path / "nothing")
    assert (code, out) == (2, "")
    assert str(tmp_path / "nothing") in err.replace("\n", " ")
