"""tools/eviction/replay_eviction.py and routing_trace.py: hand-computed traces, and the recording of a model."""

from __future__ import annotations

import functools
import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.cache.policies import POLICIES, make_policy
from edgemoe.errors import DamagedData, UserError
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey
from tools.eviction.replay_eviction import Belady, blocks_for, compare, main, replay
from tools.eviction.routing_trace import Group, Trace, TraceSource, read_trace, record, write_trace

SOURCE = TraceSource("8/4", 0.75, "ceil", layers=2, experts=8, top_k=4)


def one_at_a_time(experts: str, level: int = 4) -> list[Group]:
    """A trace of one layer that requests one expert a step, by letter."""
    return [{ExpertKey(0, ord(letter) - ord("a")): level} for letter in experts]


def hits(name: str, trace: list[Group], places: int) -> int:
    policy = partial(Belady, trace) if name == "belady" else partial(make_policy, name)
    return replay(trace, policy, {"base": places, "d4": places})[0]


@pytest.mark.parametrize(
    ("name", "expected"), [("lru-planes", 2), ("lru-experts", 2), ("lfru", 4), ("belady", 4)]
)
def test_hits_of_a_trace_replayed_by_hand(name: str, expected: int) -> None:
    """With two places every policy hits the second and third a; later only frequency and foresight keep it."""
    # LRU: c drives out a, a drives out b, d c, e a again, and the last a is a miss.
    # The other policies: c drives out b, a is a hit, d drives out c, e drives out d, a is a hit.
    assert hits(name, one_at_a_time("aaabcadea"), 2) == expected


def test_hits_and_bits_of_mixed_levels() -> None:
    """A promotion is a miss that reads only the missing bits; a level below the resident one is a hit."""
    a, b = ExpertKey(0, 0), ExpertKey(0, 1)
    trace = [{a: 2, b: 8}, {a: 4, b: 4}, {a: 8}, {b: 2}]
    blocks = {"base": 2, "d4": 2, "d8": 1}
    # a's promotion to 8 takes b's d8, and b at 4 is a hit at 2; or it evicts all of b, which is then read again.
    read = 2.5 + 8.5 + 2 + 4
    whole = (1, read + 2.5)
    wanted = {"lru-planes": (2, read), "lru-experts": whole, "lru-pool": whole, "lfru": (2, read)}
    assert {name: replay(trace, partial(make_policy, name), blocks) for name in POLICIES} == wanted
    assert replay(trace, partial(Belady, trace), blocks) == (2, read)


def test_rates_are_fractions_of_the_requests() -> None:
    """Where everything fits, each expert is read once: rates follow from the requests of the trace."""
    a, b = ExpertKey(0, 0), ExpertKey(0, 1)
    rows = compare(Trace(SOURCE, [{a: 4, b: 8}, {a: 4}, {a: 8, b: 4}]), [2.0])
    assert {(o.requests, o.hits, o.hit_rate, o.read_share) for o in rows} == {(5, 2, 2 / 5, 17 / 30.5)}


def test_group_larger_than_the_tier_is_served_in_parts() -> None:
    """The oldest leases are released, every expert is read, and the last is a hit in the next step."""
    trace: list[Group] = [{ExpertKey(0, e): 4 for e in range(3)}] * 2
    for name in POLICIES:
        assert replay(trace, partial(make_policy, name), {"base": 1, "d4": 1}) == (1, 5 * 4.5)


def test_promotion_reads_only_the_missing_plane() -> None:
    """Raising the only expert of a tier from 2 to 4 bits keeps its base and reads two bits."""
    trace: list[Group] = [{ExpertKey(0, 0): 2}, {ExpertKey(0, 0): 4}]
    assert replay(trace, partial(make_policy, "lru-planes"), {"base": 1, "d4": 1}) == (0, 2.5 + 2)


def test_a_tier_without_blocks_is_refused() -> None:
    """A request that no eviction can serve ends the replay with an error."""
    with pytest.raises(UserError, match="--resident"):
        replay(one_at_a_time("a"), partial(make_policy, "lfru"), {"base": 1, "d4": 0})


def most_hits(trace: str, places: int) -> int:
    """The maximum hits over all ways to serve a trace, tried one by one."""

    @functools.cache
    def best(at: int, resident: frozenset[str]) -> int:
        if at == len(trace):
            return 0
        wanted = trace[at]
        if wanted in resident:
            return 1 + best(at + 1, resident)
        if len(resident) < places:
            return best(at + 1, resident | {wanted})
        return max(best(at + 1, resident - {gone} | {wanted}) for gone in resident)

    return best(0, frozenset())


@settings(max_examples=60)
@given(trace=st.text("abcde", min_size=1, max_size=12), places=st.integers(1, 4))
def test_belady_has_the_most_hits(trace: str, places: int) -> None:
    """Foresight has as many hits as the best choice of victims, and no policy has more."""
    best = most_hits(trace, places)
    assert hits("belady", one_at_a_time(trace), places) == best
    assert all(hits(name, one_at_a_time(trace), places) <= best for name in POLICIES)


def test_blocks_are_those_of_the_engine() -> None:
    """Half of 16 experts' bytes at 4 bits, for planes of 5, 4 and 8 units: 72 units.

    At 8/4 and r = 0.75 layers keep ceil(4), ceil(2) of 4 experts at 8 bits: 0.75. So one base and one d4 go with three
    quarters of a d8: 72 / 15 = 4.8, in whole blocks 4, 4 and 3, which leaves 12 units: two bases more.
    """
    assert blocks_for(SOURCE, 0.5) == {"base": 6, "d4": 4, "d8": 3}
    assert blocks_for(SOURCE, 10) == {"base": 16, "d4": 16, "d8": 16}
    with pytest.raises(UserError, match=r"--resident 0\.2\d* or more"):
        blocks_for(SOURCE, 0.1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the lazy dog thinks about another quick fox " * 8, encoding="utf-8")
    return path


def test_recorded_trace_has_the_routers_choices(checkpoint: Path, text: Path, tiny_model) -> None:
    """A prompt's step has the experts of all its tokens, a decoded token's step its own, in every MoE layer."""
    from transformers import AutoTokenizer

    trace = record(checkpoint, text, RunSettings.uniform(4), tokens=20, context=12, prompt=8)
    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint)(text.read_text())["input_ids"][:20]])
    expected = []
    for window in (ids[:, :12], ids[:, 12:]):
        with torch.inference_mode():
            logits = tiny_model(window, output_router_logits=True).router_logits
        chosen = [[set(row.topk(2).indices.tolist()) for row in of_layer] for of_layer in logits]
        steps = [range(8), *([row] for row in range(8, window.shape[1]))]
        for rows, (layer, of_layer) in itertools.product(steps, zip((0, 2), chosen, strict=True)):
            experts = set().union(*(of_layer[row] for row in rows))
            expected.append({ExpertKey(layer, e): 4 for e in experts})
    assert trace.groups == expected
    assert trace.source == TraceSource("4", 0.75, "carry", layers=3, experts=8, top_k=2)


def test_levels_follow_the_settings(checkpoint: Path, text: Path) -> None:
    """At 4/2 with retention 0.5 two experts a token have one level each; at 4/0 the second is skipped."""
    settings = RunSettings(levels=(4, 2), retention=0.5, depth="equal")
    trace = record(checkpoint, text, settings, tokens=6, context=8, prompt=0)
    assert [sorted(group.values()) for group in trace.groups] == [[2, 4]] * 12
    skipping = record(checkpoint, text, settings.with_(levels=(4, 0)), tokens=6, context=8, prompt=0)
    assert skipping.groups == [
        {key: 4 for key, level in group.items() if level == 4} for group in trace.groups
    ]


def test_trace_round_trips_through_a_file(tmp_path: Path) -> None:
    """read_trace returns the trace that write_trace wrote."""
    trace = Trace(SOURCE, [{ExpertKey(0, 3): 8, ExpertKey(0, 1): 2}, {ExpertKey(2, 0): 4}])
    write_trace(trace, tmp_path / "trace.jsonl")
    first, *lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert json.loads(first)["levels"] == "8/4"
    assert lines == ["[[0, 3, 8], [0, 1, 2]]", "[[2, 0, 4]]"]
    assert read_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    "line", ["", "[]", "{}", "[[0, 1]]", "[[0, 1, 3]]", "[[0, 1, 0]]", '[["0", 1, 4]]', "7"]
)
def test_damaged_trace_is_refused(tmp_path: Path, line: str) -> None:
    """A line that is no group stops the reading with its number."""
    path = tmp_path / "trace.jsonl"
    write_trace(Trace(SOURCE, [{ExpertKey(0, 1): 4}]), path)
    path.write_text(path.read_text() + f"{line}\n")
    with pytest.raises(DamagedData, match="line 3 of"):
        read_trace(path)


@pytest.mark.parametrize(
    "first", ["", "[[0, 1, 4]]", "{}", "7", json.dumps(vars(SOURCE) | {"levels": "2/8"})]
)
def test_a_trace_of_unknown_source_is_refused(tmp_path: Path, first: str) -> None:
    """A file whose first line does not name settings and model is no trace; nor is one without requests."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{first}\n[[0, 1, 4]]\n")
    with pytest.raises(DamagedData, match="line 1 of"):
        read_trace(path)
    write_trace(Trace(SOURCE, []), path)
    with pytest.raises(DamagedData, match="requests in"):
        read_trace(path)


def test_command_records_saves_and_replays(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A saved trace gives the rows of its recording, one a policy and size, and the table has their hit rates."""
    saved = tmp_path / "trace.jsonl"
    how = ["--model", str(checkpoint), "--text", str(text), "--tokens", "24", "--prompt", "4"]
    sizes = ["--resident", "0.25", "0.5"]
    assert main([*how, *sizes, "--save-trace", str(saved), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["resident"], row["policy"]) for row in rows] == list(
        itertools.product((0.25, 0.5), (*POLICIES, "belady"))
    )
    assert main(["--trace", str(saved), *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert main(["--trace", str(saved), *sizes]) == 0
    table = capsys.readouterr().out
    assert all(f"{row['hit_rate']:.3f}" in table for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "trace.jsonl", "--levels", "4"], "levels"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "nowhere"], "--text"),
        (["--model", "nowhere", "--text", "text.txt"], "nowhere"),
        (["--model", ".", "--text", "text.txt", "--levels", "2/4"], "2/4"),
        (["--model", ".", "--text", "text.txt", "--prompt", "512"], "512"),
        (["--model", ".", "--text", "text.txt", "--tokens", "0"], "0 tokens"),
        (["--model", ".", "--text", "text.txt", "--save-trace", "no/where.jsonl"], "no/where.jsonl"),
        (["--trace", "trace.jsonl", "--resident", "0"], "--resident"),
    ],
)
def test_contradicting_options_are_refused(
    arguments: list[str],
    message: str,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options without effect and missing files exit 2 with their names."""
    monkeypatch.chdir(text.parent)
    write_trace(Trace(SOURCE, one_at_a_time("ab")), Path("trace.jsonl"))
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_store_is_refused_as_a_checkpoint(tiny_store: Path, text: Path) -> None:
    """transformers cannot load a store's experts."""
    with pytest.raises(UserError, match="a checkpoint at"):
        record(tiny_store, text, RunSettings.uniform(4), tokens=4, context=8, prompt=0)
