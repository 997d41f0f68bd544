"""Norms of rows by Triton's kernel, against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from edgemoe.layers import device_norm
from edgemoe.layers.dense import is_rms_norm
from edgemoe.layers.device_norm import TritonNorm

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]

FORMS = {
    Qwen3MoeRMSNorm: (False, True),
    GptOssRMSNorm: (False, False),
    Gemma4RMSNorm: (False, False),
    Qwen3_5MoeRMSNorm: (True, False),
}


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(device_norm, "triton_runs", lambda place: True)  # the interpreter's is the CPU


def norm_of(kind: Any, size: int) -> Any:
    norm = kind(size, eps=1e-6).to(torch.bfloat16)
    norm.weight.data.normal_(0.9, 0.2, generator=torch.Generator().manual_seed(size))
    return norm.to(DEVICE)


def numbers(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 5).bfloat16().to(DEVICE)


@pytest.mark.parametrize("size", [24, 128, 2048])
@pytest.mark.parametrize("kind", FORMS)
def test_norms_are_transformers_own(kind, size):
    """All forms, sizes that fill no tile, and rows of several heads; squares are added up in another order."""
    norm, x = norm_of(kind, size), numbers(1, 2, 3, size)
    own = TritonNorm.try_from(norm)
    assert own is not None
    assert (own.plus_one, own.rounded) == FORMS[kind]
    result, want = own(x), norm(x)
    assert result.dtype == torch.bfloat16
    assert (result != want).sum() <= max(1, 0.002 * want.numel())
    assert torch.allclose(result, want, rtol=2**-7)


def test_no_rows_and_rows_in_float32():
    """An empty batch, bf16 numbers that a caller has converted, and rows that do not lie next to each other."""
    norm = norm_of(Qwen3_5MoeRMSNorm, 24)
    own, x = TritonNorm.try_from(norm), numbers(5, 48)
    assert own is not None
    assert own(x[:0, :24]).shape == (0, 24)
    assert torch.equal(own(x[:, :24].float()), own(x[:, :24].contiguous()))
    assert torch.equal(own(x[:, 24:]), own(x[:, 24:].contiguous()))


def test_graphs_take_plain_norms_alone():
    """The captured launches have a kernel for weight * bf16(x / ...), not for the other forms."""
    for kind, form in FORMS.items():
        assert is_rms_norm(TritonNorm.try_from(norm_of(kind, 24))) == (form == (False, True))


class OtherRMSNorm(Qwen3MoeRMSNorm):
    """Computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + hidden_states


def test_other_modules_are_left_to_transformers(monkeypatch):
    """Norms without weights, with another name, of other numbers or types, and places without Triton."""
    wide = norm_of(Qwen3MoeRMSNorm, 24).float()
    for module in (
        torch.nn.LayerNorm(24),
        Gemma4RMSNorm(24, with_scale=False),
        norm_of(OtherRMSNorm, 24),
        wide,
    ):
        assert TritonNorm.try_from(module) is None
    monkeypatch.setattr(device_norm, "triton_runs", lambda place: False)
    assert TritonNorm.try_from(norm_of(Qwen3MoeRMSNorm, 24)) is None
