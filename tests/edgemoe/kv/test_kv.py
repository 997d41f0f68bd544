"""The state of a sequence: its size in bytes, the writes of a step, and cropping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_models import small_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from edgemoe.errors import ContextExceeded, ModelRefused
from edgemoe.families.table import family_of
from edgemoe.kv.formats import KINDS, KVFormat
from edgemoe.kv.rows import rotate
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape, LinearState
from edgemoe.kv.step import Segment, Step, StepKV

CONTEXT = 16
PLAIN = KVShape((0, 2), heads=2, key_dim=4, value_dim=3)
LATENT = KVShape((0, 1), heads=1, key_dim=6, value_dim=0, latent=4)
HYBRID = KVShape(
    (1,), 2, 4, 4, linear=LinearState((0, 2), channels=5, kernel=3, heads=2, key_dim=4, value_dim=6)
)
MIXED = KVShape(
    *((0, 2), 2, 4, 4),
    others=(KVShape((1,), 1, 8, 8), KVShape((3,), 1, 6, 0, latent=4)),
    index=KVShape((0, 3), 1, 5, 0),
)


def allocated(sequence: SequenceKV) -> int:
    """Bytes of the storages of a sequence's tensors, each once."""
    tensors = list(sequence.stored)
    if sequence.states:
        tensors += [value for value in vars(sequence.states).values() if isinstance(value, torch.Tensor)]
        tensors += sequence.states.checkpoints._stored
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("keys", KINDS)
@pytest.mark.parametrize("shape", [PLAIN, LATENT, HYBRID, MIXED], ids=["plain", "latent", "hybrid", "mixed"])
def test_bytes_for_equals_the_allocation(shape, keys):
    """bytes_for is the size of torch's storages of a sequence, in every format."""
    shape = shape.stored_as(KVFormat(keys, keys))
    assert allocated(SequenceKV(shape, CONTEXT)) == shape.bytes_for(CONTEXT)


@pytest.mark.parametrize(
    ("model_type", "nbytes"),
    [
        ("mixtral", 2 * 32 * 8 * (128 + 128)),
        ("deepseek_v3", 2 * 61 * (512 + 64)),
        ("gpt_oss", 2 * 36 * 8 * (64 + 64)),
        ("qwen3_next", 2 * 12 * 2 * (256 + 256)),
        ("mimo_v2_flash", 2 * (9 * 4 + 39 * 8) * (192 + 192)),
        ("deepseek_v32", 2 * 61 * (512 + 64 + 128)),
    ],
)
def test_bytes_of_a_token_by_hand(model_type, nbytes):
    """Bytes of published shapes, such as 61 layers of one latent and rotary key, or layers of two kinds."""
    shape = family_of(CONFIG_MAPPING[model_type]().to_dict()).kv
    assert shape.bytes_for(2) - shape.bytes_for(1) == nbytes


@pytest.mark.parametrize(
    ("model_type", "nbytes"),
    [("gpt_oss", 2 * 18 * 8 * (64 + 64)), ("mimo_v2_flash", 2 * 9 * 4 * (192 + 192))],
)
def test_a_token_beyond_all_windows_takes_the_bytes_of_layers_without_one(model_type, nbytes):
    """On a device, whose memory is taken as a whole, it takes all layers' bytes; gpt-oss has layers of one kind."""
    shape = family_of(CONFIG_MAPPING[model_type]().to_dict()).kv
    assert shape.bytes_for(100_001) - shape.bytes_for(100_000) == nbytes
    plain = shape.without_windows()
    assert plain.bytes_for(100_001) - plain.bytes_for(100_000) == shape.bytes_for(2) - shape.bytes_for(1)
    assert model_type != "gpt_oss" or plain == KVShape(tuple(range(36)), 8, 64, 64)


def test_bytes_of_linear_states_by_hand():
    """Qwen3-Next: 36 layers, four times 8192 channels of 4 inputs in bf16, and 32 heads of 128 x 128 in float32."""
    shape = family_of(type(small_config("qwen3_next"))().to_dict()).kv
    assert shape.bytes_for(0) == 4 * 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("deepseek_v2", "kv_lora_rank", None),
        ("deepseek_v2", "qk_rope_head_dim", 1 << 40),
        ("qwen3_next", "linear_num_value_heads", "many"),
        ("qwen3_next", "layer_types", ["full_attention"]),
    ],
)
def test_absurd_sizes_are_refused(model_type, key, value):
    """A cached dimension that is missing or absurd is refused before anything is allocated."""
    with pytest.raises(ModelRefused, match=r"config\.json"):
        _ = family_of(small_config(model_type).to_dict() | {key: value}).kv


def test_without_layer_types_the_interval_counts():
    """Every fourth layer has attention by default."""
    config = small_config("qwen3_next").to_dict() | {"layer_types": None, "num_hidden_layers": 9}
    assert family_of(config).kv.layers == (3, 7)
    assert family_of(config | {"full_attention_interval": 3}).kv.layers == (2, 5, 8)


def test_layers_of_several_kinds_keep_their_own_keys():
    """Each layer reads what it wrote, shorter values padded; copied prefixes and stored rows have all of them."""
    generator = torch.Generator().manual_seed(0)
    whole, copied, restored = (SequenceKV(MIXED, CONTEXT) for _ in range(3))
    written = {}
    for layer, heads, key_dim, value_dim in ((0, 2, 4, 3), (2, 2, 4, 4), (1, 1, 8, 8), (3, 1, 4, 2)):
        pair = [torch.randn(heads, 5, size, generator=generator).bfloat16() for size in (key_dim, value_dim)]
        whole.write(layer, *pair)
        written[layer] = pair
    for layer in (0, 3):
        whole.index[layer][:5] = torch.randn(5, 5, generator=generator)
    whole.commit(5)
    assert copied.copy_prefix(whole, 4) == 4
    for to, row in zip(restored.rows(0, 5).views, whole.rows(0, 5).views, strict=True):
        to[:] = bytes(row)
    assert sum(map(len, whole.rows(0, 5).views)) == MIXED.bytes_for(5)
    for sequence, count in ((whole, 5), (copied, 4), (restored, 5)):
        for layer in (0, 1, 2):
            keys, values = sequence.read(layer, 0, count)
            own_keys, own_values = written[layer]
            assert torch.equal(keys, own_keys[:, :count])
            assert torch.equal(values[..., : own_values.shape[2]], own_values[:, :count])
            assert not values[..., own_values.shape[2] :].any()
            assert layer or torch.equal(sequence.index[0][:count], whole.index[0][:count])
        latents, _ = sequence.read(3, 0, count)
        assert torch.equal(latents, torch.cat(written[3], -1)[:, :count])


@pytest.mark.parametrize("shape", [PLAIN, LATENT], ids=["plain", "latent"])
def test_a_step_writes_behind_the_valid_tokens_and_commit_makes_them_valid(shape):
    """Two sequences of one step get their own rows; until commit their lengths stay, and values follow latents."""
    sequences = [SequenceKV(shape, CONTEXT) for _ in range(2)]
    sequences[1].length = 3
    step = Step((Segment(sequences[0], (1, 2)), Segment(sequences[1], (3,))))
    kv = StepKV(step)
    generator = torch.Generator().manual_seed(0)
    widths = (
        (shape.latent, shape.key_dim - shape.latent) if shape.latent else (shape.key_dim, shape.value_dim)
    )
    keys, values = (torch.randn(1, shape.heads, 3, width, generator=generator).bfloat16() for width in widths)
    layer = shape.layers[1]
    assert kv.update(keys, values, layer) == (keys, values)
    assert [sequence.length for sequence in sequences] == [0, 3]
    stored = torch.cat((keys, values), -1) if shape.latent else keys
    assert torch.equal(sequences[0].keys[1, :, :2], stored[0, :, :2])
    assert torch.equal(sequences[1].keys[1, :, 3:4], stored[0, :, 2:])
    wanted = keys if shape.latent else values
    assert torch.equal(sequences[1].values[1, :, 3:4], wanted[0, :, 2:])
    kv.commit()
    assert [sequence.length for sequence in sequences] == [2, 4]


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("shape", [PLAIN, LATENT], ids=["plain", "latent"])
def test_quantized_rows_are_read_back_copied_and_cropped(shape, kind):
    """Tokens are read as they were written, but for rounding; a copied prefix has the same bits, no token more."""
    shape = replace(shape, format=KVFormat(kind, kind))
    one, two = SequenceKV(shape, CONTEXT), SequenceKV(shape, CONTEXT)
    generator = torch.Generator().manual_seed(1)
    widths = (
        (shape.latent, shape.key_dim - shape.latent) if shape.latent else (shape.key_dim, shape.value_dim)
    )
    keys, values = (torch.randn(shape.heads, 6, width, generator=generator).bfloat16() for width in widths)
    layer = shape.layers[1]
    one.write(layer, keys, values)
    one.commit(6)
    stored = torch.cat((keys, values), -1) if shape.latent else keys
    read, of_values = one.read(layer, 1, 6)
    allowed = 0.02 if kind == "q8_0" else 0.3
    assert 0 < (rotate(read, shape.rotation) - stored[:, 1:].float()).abs().max() < allowed
    if shape.latent:
        assert torch.equal(of_values, read[..., : shape.latent])
    else:
        assert 0 < (of_values - values[:, 1:].float()).abs().max() < allowed
    two.keys.fill_(7)
    assert two.copy_prefix(one, 4) == two.length == 4
    assert all(map(torch.equal, two.read(layer, 0, 4), one.read(layer, 0, 4)))
    assert (two.keys[:, :, 4:] == 7).all()
    assert one.crop(2) == 2
    one.write(layer, keys[:, 2:3], values[:, 2:3])
    assert torch.equal(one.keys[1, :, 2], two.keys[1, :, 2])


def test_a_step_beyond_the_context_is_refused():
    """The message has both counts."""
    sequence = SequenceKV(PLAIN, 2)
    with pytest.raises(ContextExceeded, match=r"3 tokens.*one of 2"):
        StepKV(Step((Segment(sequence, (1, 2, 3)),)))


def test_a_sequence_with_linear_layers_goes_back_to_its_start_only():
    """crop returns the tokens that are left: the requested length, or 0 where a state cannot be rewound."""
    plain, hybrid = SequenceKV(PLAIN, CONTEXT), SequenceKV(HYBRID, CONTEXT)
    for sequence, left in ((plain, 4), (hybrid, 0)):
        sequence.length = 6
        assert sequence.crop(6) == sequence.length == 6
        assert sequence.crop(4) == sequence.length == left


def test_linear_states_are_those_of_the_last_commit():
    """A step's state is not seen by the next one until it is committed; a fresh sequence has none."""
    states = SequenceKV(HYBRID, CONTEXT).states
    assert states is not None
    fresh = states.of(2, fresh=True)
    assert fresh.get_conv_state(2) is None
    assert fresh.get_recurrent_state(2) is None
    inputs = torch.arange(10.0).view(1, 5, 2).bfloat16()
    assert torch.equal(fresh.update_conv_state(inputs, 2)[..., -2:], inputs)
    fresh.update_recurrent_state(torch.ones(1, 2, 4, 6), 2)
    states.commit()
    for value in (7.0, 8.0):
        state = states.of(2, fresh=False)
        kept = state.get_conv_state(2)
        assert torch.equal(kept, torch.nn.functional.pad(inputs, (1, 0)))
        before = state.get_recurrent_state(2)
        assert torch.equal(before, torch.ones(1, 2, 4, 6))
        kept.fill_(value)
        before.fill_(5.0)  # as a kernel that computes in place, in a step that fails the first time
        state.update_recurrent_state(torch.full((1, 2, 4, 6), value), 2)
    states.commit()
    assert float(states.of(2, fresh=False).get_recurrent_state(2).unique()) == 8.0
    assert float(states.of(0, fresh=False).get_recurrent_state(0).unique()) == 0.0
