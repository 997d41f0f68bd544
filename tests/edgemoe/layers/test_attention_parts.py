"""Parts of attention that random weights near zero hide: factors of far positions, and halves of a projection."""

from __future__ import annotations

import torch
from availability import needs_native
from family_models import random_model, save

from edgemoe.families.traits import TRAITS
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.rotations import Rotations
from edgemoe.models.conversion.run import convert_checkpoint

POSITIONS = [0, 15, 16, 5000, 90_000]


def test_factors_of_far_positions_are_the_published_ones():
    """Beam's queries have (1 + (p + 1) / 2048) ** 0.1, Mistral 4's 1 + beta log(1 + p // size).

    At the few positions of other tests Beam's factor is about 1.
    """
    model = random_model("beam")
    rotations = Rotations(model, TRAITS["beam"].fused_gqa)
    layer = rotations.layers[1]
    cosine, sine = rotations.of(torch.zeros(1, len(POSITIONS), 64).bfloat16(), POSITIONS)[layer.number]
    factors = (1 + (torch.tensor(POSITIONS) + 1) / 2048) ** 0.1
    assert layer.form.queries_alone
    assert factors[-1] > 1.4
    torch.testing.assert_close(cosine[0], factors[:, None].expand(-1, layer.rotated))
    assert not sine.any()

    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "mscale": 0.7, "mscale_all_dim": 0.7}
    own = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
    rotations = Rotations(random_model("mistral4", rope_parameters=yarn | own), TRAITS["mistral4"].fused_gqa)
    number = rotations.layers[0].factors.number
    made = rotations.of(torch.zeros(1, len(POSITIONS), 64).bfloat16(), POSITIONS)[number][0]
    factors = 1 + 0.5 * torch.log(1 + torch.tensor(POSITIONS) // 16)
    assert torch.equal(made[0, :, 0], factors.bfloat16())


@needs_native
def test_queries_and_their_gate_are_the_halves_that_transformers_takes(tmp_path, open_engine):
    """Qwen3-Next's q_proj has both for each head: with loud gates and results, swapped halves are far away."""
    model, tokens = random_model("qwen3_next"), [(7 * i + 5) % 300 for i in range(12)]
    for name, weight in model.named_parameters():
        if "self_attn" in name and ("q_proj" in name or "o_proj" in name):
            weight.data.mul_(16)  # else each gate is about a half, and attention adds little
    source = save(model, tmp_path / "source", fused=True)
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    engine = open_engine(tmp_path / "store")
    sequence = engine.sequences.new()
    rows = [engine.all_logits(sequence, tokens[:8], decode=False)]
    rows += [engine.step(Step((Segment(sequence, (token,)),))) for token in tokens[8:]]
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([tokens])).logits[0].float()
    distances = (torch.cat(rows) - want).norm(dim=1) / want.norm(dim=1)
    assert distances.median() < 0.05, distances
