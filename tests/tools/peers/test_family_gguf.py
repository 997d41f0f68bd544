"""A GGUF that gets more experts than it was converted with."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tools.peers.family_gguf import widened
from tools.peers.rewrite_gguf import rewrite


@pytest.fixture
def small(tmp_path):
    """A file with two experts of a layer, their biases, a router with a bias, and a norm."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "gpt-oss")
    writer.add_expert_count(2)
    writer.add_string("general.name", "small")
    random = np.random.default_rng(1)
    for name, shape in {
        "ffn_up_exps.bias": (2, 4),
        "ffn_gate_inp.weight": (2, 8),
        "attn_norm.weight": (8,),
    }.items():
        writer.add_tensor(f"blk.0.{name}", random.normal(size=shape).astype(np.float32))
    codes = gguf.quants.quantize(random.normal(size=(2, 4, 32)).astype(np.float32), Kind.Q4_0)
    writer.add_tensor("blk.0.ffn_up_exps.weight", codes, raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(tmp_path / "small.gguf")


def test_experts_are_repeated_and_routers_drawn_anew(small, tmp_path):
    """Of two experts become five; codes keep their type, the header has the new number, other tensors their bytes."""
    random = np.random.default_rng(0)
    rewrite(
        small, tmp_path / "wide.gguf", lambda each: widened(each, 2, 5, random), {"gpt-oss.expert_count": 5}
    )
    wide = gguf.GGUFReader(tmp_path / "wide.gguf")
    before, after = ({each.name: each for each in file.tensors} for file in (small, wide))
    assert (wide.fields["gpt-oss.expert_count"].contents(), wide.fields["general.name"].contents()) == (
        5,
        "small",
    )
    for name in ("blk.0.ffn_up_exps.weight", "blk.0.ffn_up_exps.bias"):
        own = before[name].data
        assert np.array_equal(after[name].data, np.stack([own[0], own[1], own[0], own[1], own[0]]))
    assert after["blk.0.ffn_up_exps.weight"].tensor_type is Kind.Q4_0
    assert len(np.unique(after["blk.0.ffn_gate_inp.weight"].data, axis=0)) == 5
    assert np.array_equal(after["blk.0.attn_norm.weight"].data, before["blk.0.attn_norm.weight"].data)
