"""Dense weights of 4 to 8 bits that were coded again: their products, and their bytes after an interruption."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from edgemoe.calibrate.windows import Window, spread_windows
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.layers.dense import DenseLinear
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.dense_inputs import hessians_of
from edgemoe.recode.request import RecodeRequest
from edgemoe.recode.run import recode
from edgemoe.storage.store import dense_groups
from edgemoe.storage.store.contents import describe
from edgemoe.storage.store.manifest import DENSE_NAME, Manifest
from edgemoe.storage.store.recoded import RecodedLayers
from edgemoe.storage.store.verify import verify

pytestmark = pytest.mark.e2e

TOKENS = 1024
"""Two windows."""


def recoded(store: Path, source: Path, text: Path) -> Manifest:
    return recode(StoreModel.open(store), source, RecodeRequest(text, TOKENS, "low"))


@pytest.fixture(scope="module", params=[4, 8])
def grouped(request, checkpoint, tmp_path_factory) -> Path:
    """The tiny model with dense weights of 4 or 8 bits. Read-only."""
    directory = tmp_path_factory.mktemp("grouped") / "store"
    convert_checkpoint(checkpoint, directory, max_level=8, layout="auto", dense_bits=request.param)
    return directory


def weights_of(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A matrix of groups, or of 8 bits with scales."""
    if tensors[name].dtype == torch.uint8:
        return dense_groups.decoded(tensors[name])
    return tensors[name].float() * tensors[f"{name}_scale"].float().unsqueeze(1)


def inputs_of(store: Path, text: Path, window: Window | None = None) -> dict[str, torch.Tensor]:
    """Matrix -> its inputs in a window, by default one of the text between the sampled ones, float64."""
    opened, settings = StoreModel.open(store), RunSettings.uniform(8)
    found: dict[str, torch.Tensor] = {}
    window = window or spread_windows(load_tokenizer(store), text, 1536, 512)[1]
    plan = opened.plan(vram_limit=None, settings=settings, context=512)

    def keep(layer: DenseLinear, x: torch.Tensor) -> None:
        found.update(dict.fromkeys(layer.names, x.double()))

    with Engine(opened, plan, settings) as engine, engine.watched(keep):
        engine.all_logits(engine.sequences.new(), window, decode=False)
    return {name: x.reshape(-1, x.shape[-1]) for name, x in found.items()}


def test_hessians_of_a_shared_input_are_counted_once(grouped, foxes_text):
    """Queries, keys and values share one of two Hessians, the output projection has the other one."""
    store, size = StoreModel.open(grouped), 4 * 64 * 64
    name = "model.layers.0.self_attn.{}_proj.weight".format
    windows = spread_windows(load_tokenizer(grouped), foxes_text, 512, 512)
    sizes = {name(each): size for each in "qkvo"}
    found = hessians_of(store, windows, sizes, RecodeRequest(foxes_text, 512, "low"), 2 * size)
    assert list(found) == list(sizes)
    assert found[name("q")] is found[name("k")] is found[name("v")]
    x = inputs_of(grouped, foxes_text, windows[0])
    for each in "qo":
        rows = x[name(each)]
        assert torch.allclose(found[name(each)].double(), rows.t() @ rows, rtol=1e-4, atol=1e-4)
    assert list(hessians_of(store, windows, sizes, RecodeRequest(foxes_text, 512, "low"), size)) == [
        name(each) for each in "qkv"
    ]


def test_products_lose_less_and_a_stopped_run_ends_with_the_same_bytes(
    grouped, checkpoint, foxes_text, tmp_path
):
    """On other tokens of the text than the sampled ones. A second run changes nothing."""
    store, stopped = tmp_path / "store", tmp_path / "stopped"
    for copy in (store, stopped):
        shutil.copytree(grouped, copy)
    made, source = recoded(store, checkpoint, foxes_text), load_file(checkpoint / "model.safetensors")
    assert [path.name for path in store.glob("dense*")] == [made.dense_name]
    assert made.dense_name != DENSE_NAME
    assert describe(grouped)["dense_codes"] is None
    assert describe(store)["dense_codes"] == str(made.codes)
    assert not verify(store, lambda done, total: None).damage
    before, after = load_file(grouped / DENSE_NAME), load_file(store / made.dense_name)
    lost = {"before": 0.0, "after": 0.0}
    inputs = inputs_of(grouped, foxes_text)
    matrices = {name for name, tensor in before.items() if tensor.dtype in (torch.uint8, torch.int8)}
    matrices.remove("model.embed_tokens.weight")  # it is looked up, and has no inputs
    assert matrices <= inputs.keys()
    for name in matrices:
        for when, tensors in (("before", before), ("after", after)):
            off = weights_of(tensors, name).double() - source[name].double()
            lost[when] += float((inputs[name] @ off.t()).square().sum())
    assert lost["after"] < 0.8 * lost["before"]
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - matrices)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecodedLayers, "write_dense", stop)
        with pytest.raises(KeyboardInterrupt):
            recoded(stopped, checkpoint, foxes_text)
    assert Manifest.load(stopped) == Manifest.load(grouped)
    assert recoded(stopped, checkpoint, foxes_text) == made == recoded(store, checkpoint, foxes_text)
    assert (stopped / made.dense_name).read_bytes() == (store / made.dense_name).read_bytes()
