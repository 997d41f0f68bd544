"""Routers' choices and inputs: against numpy by hand, and against the tiny model as transformers runs it."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
import typer
from counted_engine import CountedEngine
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from edgemoe.commands.eval import EXAMPLES, eval_command
from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.observations import Observations, observe
from edgemoe.experts.step import Routed
from edgemoe.policy.settings import RunSettings

WINDOWS = torch.randint(3, 300, (2, 48), generator=torch.Generator().manual_seed(2)).tolist()


def test_loads_and_correlations_by_hand():
    """Four tokens, three experts: token 1 is the one heavy hitter at 0.2 and below, tokens 1 and 3 are at 0.5."""
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 2]])
    ranks = torch.tensor([0.75, 0.0, 0.5, 0.25])
    observed = Observations(3)
    observed.add({4: Routed(torch.ones(4, 2), chosen, torch.ones(4, 2), ranks)})
    rows = {row.heavy_hitters: row for row in observed.routing()}
    assert list(rows) == [0.05, 0.1, 0.2, 0.5]
    assert {row.layer for row in rows.values()} == {4}
    all_ = np.array([3, 3, 2])
    for share, heavy in ((0.2, [1, 0, 1]), (0.5, [1, 1, 2])):
        assert (rows[share].load, rows[share].heavy_load) == (all_.tolist(), heavy)
        assert rows[share].correlation == pytest.approx(np.corrcoef(heavy, all_)[0, 1])
        assert rows[share].correlation_rest == pytest.approx(np.corrcoef(heavy, all_ - heavy)[0, 1])
        assert rows[share].correlation_windows is None
    assert observed.similarity() == []


def test_windows_are_compared_with_the_next():
    """Equal heavy hitters correlate fully with the window before; a layer without attention has no row."""
    chosen, ranks = torch.tensor([[0, 1], [2, 0]]), torch.tensor([0.0, 0.5])
    observed = Observations(3)
    for _ in range(2):
        seen = Routed(torch.ones(2, 2), chosen, torch.ones(2, 2), ranks)
        observed.add({0: seen, 3: Routed(torch.ones(2, 2), chosen, torch.ones(2, 2), None)})
    rows = observed.routing()
    assert {row.layer for row in rows} == {0}
    assert rows[0].correlation_windows == pytest.approx(1)
    assert rows[0].load == [4, 2, 2]


def test_an_even_load_has_no_correlation():
    """Where all experts are loaded alike, Pearson's r is undefined."""
    seen = Routed(torch.ones(1, 2), torch.tensor([[0, 1]]), torch.ones(1, 2), torch.zeros(1))
    observed = Observations(2)
    observed.add({0: seen})
    assert {row.correlation for row in observed.routing()} == {None}


def test_likeness_by_hand():
    """States at 0 and 90 degrees: mean 0.5, standard deviation 0.5, between layers that follow one another."""
    chosen, states = torch.tensor([[0], [0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    observed = Observations(1)
    observed.add(
        {5: Routed(states, chosen, chosen, None), 2: Routed(states[:1].expand(2, 2), chosen, chosen, None)}
    )
    (row,) = observed.similarity()
    assert (row.layer, row.next_layer, row.tokens) == (2, 5, 2)
    assert (row.similarity, row.std) == (0.5, 0.5)


def run_transformers(model, window: list[int]) -> dict[int, tuple[torch.Tensor, ...]]:
    """Layer -> the router's input [T, H], its choice [T, 2], and attention received [T] (eq. 1), of one window."""
    inputs: dict[int, torch.Tensor] = {}
    gates = {i: model.model.layers[i].mlp.gate for i in (0, 2)}

    def keep(layer: int, module, arguments, result) -> None:
        inputs[layer] = arguments[0].reshape(-1, 64).float()

    hooks = [gate.register_forward_hook(partial(keep, i)) for i, gate in gates.items()]
    with torch.inference_mode():
        received = [each[0].float().mean(0).sum(0) for each in model(torch.tensor([window])).attentions]
        chosen = {i: (x @ gates[i].weight.float().T).topk(2).indices for i, x in inputs.items()}
    for hook in hooks:
        hook.remove()
    return {i: (x, chosen[i], received[i]) for i, x in inputs.items()}


@pytest.fixture(scope="module")
def of_transformers(checkpoint):
    """The inputs and choices of the tiny model's routers in each window."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="eager", output_attentions=True
    ).eval()
    return [run_transformers(model, window) for window in WINDOWS]


@pytest.mark.e2e
def test_rows_are_those_of_transformers(tiny_store, of_transformers):
    """Loads of all tokens and of heavy hitters, and cosines, as transformers' own attention and routers give them."""
    store = StoreModel.open(tiny_store)
    settings = RunSettings.uniform(8)
    done: list[None] = []
    with CountedEngine(store, store.plan(vram_limit=None, settings=settings, context=64), settings) as engine:
        found = observe(engine, engine.sequences.new(), WINDOWS, lambda: done.append(None))
    assert len(done) == 2
    for row in found.routing():
        load, heavy = torch.zeros(8), torch.zeros(8)
        for window in of_transformers:
            _, chosen, received = window[row.layer]
            load += torch.bincount(chosen.flatten(), minlength=8)
            most = received.argsort(descending=True)[: int(np.ceil(row.heavy_hitters * 48))]
            heavy += torch.bincount(chosen[most].flatten(), minlength=8)
        # Eight bits move a few choices and ranks across a border.
        assert sum(row.load) == load.sum() == 2 * 48 * 2
        assert sum(row.heavy_load) == heavy.sum()
        assert (torch.tensor(row.load) - load).abs().sum() <= 0.05 * load.sum()
        assert (torch.tensor(row.heavy_load) - heavy).abs().sum() <= 0.25 * heavy.sum()
    (row,) = found.similarity()
    cosines = torch.cat([torch.cosine_similarity(w[0][0], w[2][0], dim=1) for w in of_transformers])
    assert (row.layer, row.next_layer, row.tokens) == (0, 2, 96)
    assert row.similarity == pytest.approx(cosines.mean().item(), abs=0.01)
    assert row.std == pytest.approx(cosines.std(correction=0).item(), abs=0.01)


@pytest.mark.e2e
def test_the_studies_in_one_command(tiny_store, tmp_path):
    """JSON rows, tables and a picture, and nothing of a study that was not wanted."""
    pytest.importorskip("matplotlib")
    app = typer.Typer()
    app.command(epilog=EXAMPLES)(eval_command)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, while another one sleeps. " * 2, "utf-8")
    words = ("--model", tiny_store, "--text", text, "--tokens", 48, "--window", 24, "--levels", 4)
    out = CliRunner().invoke(app, [*map(str, words), "--study", "routing", "--json"])
    assert out.exception is None
    report = json.loads(out.stdout)
    assert [(row["layer"], row["heavy_hitters"]) for row in report["routing"]] == [
        (layer, share) for layer in (0, 2) for share in (0.05, 0.1, 0.2, 0.5)
    ]
    assert report["similarity"] == []
    assert all(sum(row["load"]) == report["environment"]["tokens"] * 2 for row in report["routing"])
    words += ("--study", "similarity", "--plot", tmp_path / "kl.png")
    out = CliRunner().invoke(app, [*map(str, words), "--study", "routing"])
    assert "study: similarity" in out.stdout
    assert "study: routing" in out.stdout
    assert "(figure 6)" in out.stdout
    # Without a reference there is no KL to draw.
    assert [path.name for path in tmp_path.glob("*.png")] == ["kl-routing.png"]
