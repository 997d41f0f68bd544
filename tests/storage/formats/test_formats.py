"""Quantized checkpoints: files of the formats' own libraries, against these libraries' own dequantization.

How they were made is in tests/data/formats/make_*.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from format_data import DATA, EXPERT, opened, rewrite, settings_of
from safetensors.torch import load_file, save_file

from edgemoe.errors import DamagedData, MissingTensor, ModelRefused
from edgemoe.storage.formats import FORMATS
from edgemoe.storage.formats.mxfp4 import VALUES
from edgemoe.storage.record.encode import quantize_matrix
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.record.planes import dequantize

EXACT = {
    "gptq": 32,
    "gptq-asymmetric": 32,
    "gptq-autogptq": 32,
    "awq": 32,
    "awq-autoawq": 32,
    "awq-autoawq-128": 128,
    "autoround-gptq": 32,
    "autoround-gptqmodel": 32,
    "autoround-awq": 32,
    "compressed-int4-group": 32,
    "compressed-int4-asymmetric": 32,
    "compressed-int4-channel": None,
    "gptq-autogptq-2": 32,
    "compressed-int8-group": 32,
}
"""Checkpoint of codes -> group of its records; None: the shape decides."""

INEXACT = (
    "gptq-autogptq-act-order",
    "gptq-autogptq-act-order-8",
    "compressed-int8-channel",
    "compressed-fp8-channel",
    "compressed-fp8-tensor",
)
ROWS = {"gptq": "GPTQ", "awq": "AWQ", "autoround": "AutoRound", "compressed": "compressed-tensors"}


def marked(names):
    """The checkpoints as parameters, each with the mark of its row in the support table."""
    return [pytest.param(name, marks=pytest.mark.covers(ROWS[name.split("-")[0]])) for name in names]


@pytest.mark.parametrize("name", marked([*EXACT, *INEXACT]))
def test_weights_are_those_of_the_formats_own_library(name):
    """Every matrix, dequantized in float32, equals the library's; the sets of tensors are equal."""
    row, weights = opened(DATA / name, settings_of(name))
    expected = load_file(DATA / name / "expected.safetensors")
    assert row == ROWS[name.split("-")[0]]
    assert set(weights) == set(expected)
    for matrix, value in expected.items():
        assert weights[matrix].shape == value.shape
        # The library rounds to bf16 or fp16, the type of its computation.
        torch.testing.assert_close(weights[matrix].read(), value, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", marked(EXACT))
def test_codes_are_kept_to_the_bit(name):
    """Codes of up to 4 bits are level 4's, others level 8's; parameters alone are rounded to bf16."""
    _, weights = opened(DATA / name, settings_of(name))
    for matrix, value in load_file(DATA / name / "expected.safetensors").items():
        codes = weights[matrix].codes()
        assert EXACT[name] in (None, codes.group)
        torch.testing.assert_close(codes.weights(), weights[matrix].read(), rtol=1e-5, atol=1e-6)
        spec, level = MatrixSpec.of("m", *value.shape, codes.group), 4 if codes.bits <= 4 else 8
        stored, parameters = quantize_matrix(codes, spec, level, level)
        assert torch.equal(stored[: spec.rows, : spec.cols] >> (8 - codes.bits), codes.codes)
        error = (dequantize(stored, parameters, level)[: spec.rows, : spec.cols] - codes.weights()).norm()
        assert error < 2**-8 * codes.weights().norm()


@pytest.mark.parametrize("name", marked(["awq-autoawq", "awq-autoawq-128"]))
def test_stored_codes_are_those_that_autoawq_unpacks(name):
    """A record's upper nibbles equal the codes that the library unpacks, output by output."""
    _, weights = opened(DATA / name, settings_of(name))
    for matrix, expected in load_file(DATA / name / "codes.safetensors").items():
        codes = weights[matrix].codes()
        stored, _ = quantize_matrix(codes, MatrixSpec.of("m", *expected.shape, codes.group))
        assert torch.equal(stored[: expected.shape[0], : expected.shape[1]] >> 4, expected)


@pytest.mark.parametrize("name", ["gptq-autogptq-act-order", "gptq-autogptq-act-order-8"])
def test_the_act_order_checkpoints_are_out_of_order(name):
    """Groups are full, and most inputs are not in group k / 32: a reader that ignores g_idx fails."""
    groups = load_file(DATA / name / "model.safetensors")[f"{EXPERT}gate_proj.g_idx"]
    in_order = torch.arange(len(groups)) // 32
    assert settings_of(name)["desc_act"]
    assert torch.equal(groups.sort().values, in_order.int())
    assert (groups != in_order).sum() > len(groups) // 2


@pytest.mark.parametrize("name", marked(INEXACT))
def test_other_sources_offer_no_codes(name):
    """Sources without 4-bit codes are dequantized and keep level 8."""
    _, weights = opened(DATA / name, settings_of(name))
    assert {weight.group for weight in weights.values()} == {None}


def test_the_bytes_of_a_weight_are_those_of_its_parts():
    """The bytes of all weights count every stored tensor once."""
    for name in (*EXACT, *INEXACT):
        _, weights = opened(DATA / name, settings_of(name))
        stored = load_file(DATA / name / "model.safetensors")
        assert sorted(part for weight in weights.values() for part in weight.parts) == sorted(stored)
        assert sum(weight.nbytes for weight in weights.values()) == sum(t.nbytes for t in stored.values())


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    """A copy of the GPTQ checkpoint that a test may change."""
    return Path(shutil.copytree(DATA / "gptq", tmp_path / "gptq"))


@pytest.mark.covers("GPTQ")
def test_act_order_is_read_input_by_input_and_keeps_level_8(gptq):
    """With desc_act, g_idx gives every input's scale; codes are not offered, since groups are scattered."""
    matrix = f"{EXPERT}gate_proj"
    plain = opened(gptq, settings_of("gptq"))[1][f"{matrix}.weight"].read()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))

    def permute(tensors):
        # Inputs in another order: every code moves together with the number of its group.
        raw = tensors[f"{matrix}.qweight"].T.contiguous().view(torch.uint8)
        codes = torch.stack((raw & 15, raw >> 4), -1).view(64, 64)[:, order]
        packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
        tensors[f"{matrix}.qweight"] = packed.view(torch.int32).T
        tensors[f"{matrix}.g_idx"] = (torch.arange(64) // 32)[order].to(torch.int32)

    rewrite(gptq, permute)
    for name in ("up_proj", "down_proj"):
        rewrite(
            gptq, lambda t, name=name: t.update({f"{EXPERT}{name}.g_idx": (torch.arange(64) // 32).int()})
        )
    _, weights = opened(gptq, settings_of("gptq") | {"desc_act": True})
    assert weights[f"{matrix}.weight"].group is None
    torch.testing.assert_close(weights[f"{matrix}.weight"].read(), plain[:, order])
    _, lying = opened(gptq, settings_of("gptq") | {"desc_act": False})
    with pytest.raises(DamagedData, match="g_idx"):
        lying[f"{matrix}.weight"].codes()


@pytest.mark.parametrize("low", [-1, 2])
def test_a_group_that_is_not_there_is_damage(gptq, low):
    """The values of g_idx are checked before they index the scales."""
    name = f"{EXPERT}gate_proj.g_idx"
    rewrite(gptq, lambda tensors: tensors.update({name: torch.full((64,), low, dtype=torch.int32)}))
    _, weights = opened(gptq, settings_of("gptq"))
    with pytest.raises(DamagedData, match="g_idx"):
        weights[f"{EXPERT}gate_proj.weight"].read()


def test_gptq_v2_has_plain_zero_points(gptq):
    """Equal tensors marked v2 are one scale step higher: their zero points have no offset."""
    matrix = f"{EXPERT}gate_proj"
    first = opened(gptq, settings_of("gptq"))[1][f"{matrix}.weight"].read()
    second = opened(gptq, settings_of("gptq") | {"checkpoint_format": "gptq_v2"})[1][
        f"{matrix}.weight"
    ].read()
    scales = load_file(gptq / "model.safetensors")[f"{matrix}.scales"].float()
    torch.testing.assert_close(second - first, scales.T.repeat_interleave(32, 1), rtol=1e-4, atol=1e-6)


PARTS = {
    "gptq": ("qzeros", "scales"),
    "awq": ("qzeros", "scales"),
    "compressed-int4-group": ("weight_scale",),
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
@pytest.mark.parametrize("how", ["missing", "shorter", "type"])
def test_a_part_of_the_wrong_shape_is_named_before_any_read(tmp_path, name, part, how):
    """Packed shapes must agree with each other, with the group and the bits; the message names the part."""
    directory = Path(shutil.copytree(DATA / name, tmp_path / name))
    whole = f"{EXPERT}gate_proj.{part}"

    def damage(tensors):
        part_tensor = tensors.pop(whole)
        if how != "missing":
            tensors[whole] = part_tensor[..., :-1] if how == "shorter" else part_tensor.to(torch.int64)

    rewrite(directory, damage)
    with pytest.raises(MissingTensor, match=part):
        opened(directory, settings_of(name))


def test_a_matrix_in_two_forms_is_refused(gptq):
    """A matrix with a packed and a plain form is ambiguous and refused."""
    rewrite(gptq, lambda tensors: tensors.update({f"{EXPERT}gate_proj.weight": torch.zeros(64, 64)}))
    with pytest.raises(ModelRefused, match=r"gate_proj\.weight"):
        opened(gptq, settings_of("gptq"))


HOSTILE = [
    ("gptq", {"bits": 3}),
    ("gptq", {"bits": 10**30}),
    ("gptq", {"bits": True}),
    ("gptq", {"bits": "4"}),
    ("gptq", {"bits": 0}),
    ("gptq", {"group_size": 0}),
    ("gptq", {"group_size": -2}),
    ("gptq", {"group_size": 10**12}),
    ("gptq", {"group_size": 32.0}),
    ("gptq", {"desc_act": "yes"}),
    ("gptq", {"checkpoint_format": "marlin"}),
    ("gptq", {"dynamic": {"+:.*": {"bits": 3}}}),
    ("gptq", {"dynamic": {"+:.*": 8}}),
    ("gptq", {"dynamic": {"+:.*": {"rotation": 1}}}),
    ("autoround-gptq", {"extra_config": {"a": {"bits": 5}}}),
    ("autoround-gptq", {"extra_config": ["a"]}),
    ("gptq", {"dynamic": [1]}),
    ("awq", {"bits": 8}),
    ("awq", {"version": "gemv"}),
    ("awq", {"group_size": 1 << 40}),
    ("autoround-gptq", {"packing_format": "auto_round:mlx"}),
    ("autoround-gptq", {"packing_format": None}),
    ("autoround-gptq", {"data_type": "nv_fp"}),
    ("compressed-int4-group", {"config_groups": None}),
    ("compressed-int4-group", {"config_groups": {}}),
    ("compressed-int4-group", {"config_groups": {"a": 1}}),
    ("compressed-int4-group", {"quant_method": ["compressed-tensors"]}),
    ("compressed-int4-group", {"quant_method": "exl3"}),
    ("compressed-int4-group", {"quant_method": None}),
]


@pytest.mark.parametrize(("name", "change"), HOSTILE)
def test_settings_out_of_bounds_are_refused(name, change):
    """Every value of quantization_config is bounded before any allocation or read."""
    with pytest.raises(ModelRefused):
        opened(DATA / name, settings_of(name) | change)


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 3},
        {"num_bits": 1 << 31},
        {"strategy": "tensor_group"},
        {"group_size": -5},
        {"type": "complex"},
        {"strategy": "block", "block_structure": [128]},
        {"strategy": "block", "block_structure": [128, 10**9]},
    ],
)
def test_schemes_out_of_bounds_are_refused(weights):
    """Values in a group of compressed-tensors' config are bounded, too."""
    settings = settings_of("compressed-int4-group")
    settings["config_groups"]["group_0"]["weights"] |= weights
    with pytest.raises(ModelRefused):
        opened(DATA / "compressed-int4-group", settings)


@pytest.mark.parametrize("settings", [[], "gptq", 4, True])
def test_a_quantization_config_that_is_no_object_is_refused(settings):
    """A quantization_config that is not an object is refused."""
    with pytest.raises(ModelRefused, match="quantization_config"):
        opened(DATA / "gptq", settings)


def test_a_shape_that_contradicts_its_tensor_is_damage(tmp_path):
    """The stored shape of a compressed-tensors matrix must equal its tensor's shape."""
    directory = Path(shutil.copytree(DATA / "compressed-int4-group", tmp_path / "copy"))
    name = f"{EXPERT}gate_proj.weight_shape"
    rewrite(directory, lambda tensors: tensors.update({name: torch.tensor([32, 1 << 40])}))
    _, weights = opened(directory, settings_of("compressed-int4-group"))
    with pytest.raises(DamagedData, match="weight_shape"):
        weights[f"{EXPERT}gate_proj.weight"].read()


def test_outputs_that_do_not_fill_a_word_are_read(tmp_path):
    """Zero points of 4 outputs take half a word of 4-bit fields; the other half is padding."""
    tensors = {
        "a.qweight": torch.full((8, 4), 0x21212121, dtype=torch.int32),
        "a.qzeros": torch.zeros(2, 1, dtype=torch.int32),
        "a.scales": torch.ones(2, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    _, weights = opened(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    expected = torch.tensor([0.0, 1.0]).repeat(4, 32)
    assert torch.equal(weights["a.weight"].read(), expected)


@pytest.mark.parametrize(("group", "columns"), [(1024, 2048), (-1, 96), (48, 96), (-1, 40)])
def test_wide_groups_are_split_and_others_dequantized(tmp_path, group, columns):
    """A source's group is split into whole record groups; where none fits, codes are not offered."""
    groups = columns // group if group > 0 else 1
    generator = torch.Generator().manual_seed(group + columns)
    codes = torch.randint(0, 16, (8, columns), generator=generator)
    scales = torch.rand(groups, 8, generator=generator) + 0.5
    words = torch.zeros(columns // 8, 8, dtype=torch.int64)
    for column in range(columns):
        words[column // 8] |= codes[:, column] << 4 * (column % 8)
    tensors = {"a.qweight": (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32), "a.scales": scales}
    tensors["a.qzeros"] = torch.full((groups, 1), 0x77777777, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    _, weights = opened(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": group})
    expected = (codes - 8) * scales.T.repeat_interleave(columns // groups, 1)
    torch.testing.assert_close(weights["a.weight"].read(), expected)
    assert weights["a.weight"].group == {(1024, 2048): 256, (-1, 96): 32}.get((group, columns))
    if weights["a.weight"].group:
        torch.testing.assert_close(weights["a.weight"].codes().weights(), expected)


@pytest.mark.covers("FP8")
def test_fp8_blocks_have_a_scale_each(tmp_path):
    """DeepSeek's layout: 128 x 128 blocks, incomplete at the matrix's end, with scales as factors."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator) + 0.1
    save_file(
        {"a.weight": weight, "a.weight_scale_inv": scales, "norm.weight": torch.ones(3)},
        tmp_path / "model.safetensors",
    )
    row, weights = opened(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    expected = weight.float()
    for i in range(200):
        for block in range(3):
            expected[i, 128 * block : 128 * (block + 1)] *= scales[i // 128, block]
    assert row == "FP8"
    assert set(weights) == {"a.weight", "norm.weight"}
    torch.testing.assert_close(weights["a.weight"].read(), expected, rtol=0, atol=0)


@pytest.mark.covers("FP8")
def test_fused_fp8_experts_are_read_one_by_one(tmp_path):
    """[E, N, K] with [E, blocks, blocks] scales and no suffix: a slice is that expert's matrix."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 130, 64, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 1, generator=generator) + 0.1
    save_file({"gate_up_proj": weight, "gate_up_proj_scale_inv": scales}, tmp_path / "model.safetensors")
    _, weights = opened(tmp_path, {"quant_method": "fp8"})
    whole = weights["gate_up_proj"].read()
    for expert in range(3):
        expected = weight[expert].float() * scales[expert].repeat_interleave(128, 0)[:130]
        assert torch.equal(weights["gate_up_proj"].read_slice(expert), expected)
        assert torch.equal(whole[expert], expected)


@pytest.mark.parametrize("scales", [None, (2, 2), (3,)])
def test_fp8_without_its_scales_is_refused(tmp_path, scales):
    """A matrix without scales, or with scales of another shape, is refused."""
    tensors = {"a.weight": torch.zeros(200, 300).to(torch.float8_e4m3fn)}
    if scales:
        tensors["a.weight_scale_inv"] = torch.ones(scales)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match="weight_scale_inv"):
        opened(tmp_path, {"quant_method": "fp8"})


@pytest.mark.parametrize("block", [[128], [0, 128], [128, 10**9], "128", [128.0, 128.0], [1, 2, 3]])
def test_fp8_blocks_out_of_bounds_are_refused(tmp_path, block):
    """Block sides are bounded, since they determine the size of an allocation."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelRefused, match="weight_block_size"):
        opened(tmp_path, {"quant_method": "fp8", "weight_block_size": block})


@pytest.mark.covers("MXFP4")
def test_mxfp4_equals_transformers_dequantization(tmp_path):
    """Blocks and scales of gpt-oss give the [E, K, N] of transformers' dequantization."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (2, 6, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, 6, 4), generator=generator, dtype=torch.uint8)
    save_file(
        {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}, tmp_path / "model.safetensors"
    )
    row, weights = opened(tmp_path, {"quant_method": "mxfp4"})
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32).float()
    weight = weights["e.gate_up_proj"]
    assert (row, weight.group, weight.shape) == ("MXFP4", None, tuple(expected.shape))
    assert torch.equal(weight.read(), expected)
    assert torch.equal(weight.read_slice(1), expected[1])
    assert len(set(VALUES)) == 15


@pytest.mark.parametrize(
    ("blocks", "scales"), [((2, 6, 4, 15), (2, 6, 4)), ((2, 6, 4, 16), (2, 6, 3)), ((6, 16), (6,))]
)
def test_mxfp4_parts_must_fit(tmp_path, blocks, scales):
    """Blocks other than 16 bytes, or without a scale each, are refused."""
    tensors = {
        "e_blocks": torch.zeros(blocks, dtype=torch.uint8),
        "e_scales": torch.zeros(scales, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match="e_"):
        opened(tmp_path, {"quant_method": "mxfp4"})


def test_every_format_has_a_unique_name():
    """Names of formats are unique."""
    assert len(set(FORMATS)) == len(FORMATS) >= 8
