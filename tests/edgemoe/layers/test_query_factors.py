"""Queries with a factor of their position (Mistral 4), against transformers' model."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native
from folder_models import folder_model, save_folder_model

from edgemoe.kv.step import Segment, Step
from edgemoe.models.conversion.run import convert_checkpoint

pytestmark = needs_native

PROMPT, NEW = 20, 20


def test_new_tokens_and_prompts_have_the_factor_of_their_position(tmp_path, open_engine):
    """Logits are near transformers', whose factor begins at position 16, and far from the ones without factors."""
    model, tokens = folder_model("mistral3"), [(7 * i + 5) % 300 for i in range(PROMPT + NEW)]
    for name, weight in model.named_parameters():
        if "q_b_proj" in name or "kv_b_proj" in name:
            weight.data.mul_(8)  # else attention is about equal for all tokens
    source = save_folder_model(model, tmp_path / "source")
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    engine = open_engine(tmp_path / "store")
    sequence = engine.sequences.new()
    rows = [engine.all_logits(sequence, tokens[:PROMPT], decode=False)]
    rows += [engine.step(Step((Segment(sequence, (token,)),))) for token in tokens[PROMPT:]]
    assert engine.runner.fused is not None
    distances = []
    for beta in (0.5, 0.0):
        model.config.text_config.rope_parameters["llama_4_scaling_beta"] = beta
        with torch.inference_mode():
            want = model(input_ids=torch.tensor([tokens])).logits[0].float()
        distances.append((torch.cat(rows) - want).norm(dim=1) / want.norm(dim=1))
    near, without = (each[16:].median() for each in distances)
    assert near < 0.05
    assert without > 3 * near
    assert distances[1][:16].median() == pytest.approx(distances[0][:16].median())
