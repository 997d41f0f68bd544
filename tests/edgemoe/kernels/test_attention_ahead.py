"""Attention of a prompt whose pictures' tokens attend to each other in both directions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from availability import needs_native
from native_paths import PATHS, forced, running

from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV, Received

pytestmark = needs_native

HEADS, KV_HEADS, DIM, PAST, ROWS = 6, 2, 48, 5, 150
PICTURES = (range(3, 40), range(40, 44), range(60, 140))
"""Rows of pictures: two neighbours, and one of more rows than a task of the kernel."""


def ahead_of_rows() -> torch.Tensor:
    """How many later rows each row sees."""
    ahead = torch.zeros(ROWS, dtype=torch.int32)
    for picture in PICTURES:
        ahead[picture.start : picture.stop] = torch.arange(len(picture)).flip(0).int()
    return ahead


class Case:
    """Random projections without norms and rotation, and keys and values before them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.qkv = torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).bfloat16()
        self.kv = torch.randn(2, KV_HEADS, PAST + ROWS, DIM, generator=generator).bfloat16()
        self.rotation = torch.ones(ROWS, DIM).bfloat16(), torch.zeros(ROWS, DIM).bfloat16()
        self.attention = NativeAttention(HEADS, KV_HEADS, DIM, None, DIM**-0.5)

    def attended(
        self,
        window: int,
        ahead: torch.Tensor | None,
        rows: range = range(ROWS),
        received: Received | None = None,
        kv: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The kernel's results for some rows."""
        keys, values = kv if kv is not None else self.kv.clone()
        part = slice(rows.start, rows.stop)
        rotation = self.rotation[0][part], self.rotation[1][part]
        own = None if ahead is None else ahead[part]
        of = LayerKV(keys, values, PAST + rows.start)
        return self.attention(self.qkv[part].clone(), rotation, of, window, received, own)

    def expected(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Results by torch in float64, [rows, heads * dim]; and the attention that each token receives."""
        q, k, v = self.qkv.double().split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
        own = [each.view(ROWS, KV_HEADS, DIM).transpose(0, 1) for each in (k, v)]
        keys, values = (
            torch.cat((before[:, :PAST].double(), each), 1).repeat_interleave(HEADS // KV_HEADS, 0)
            for before, each in zip(self.kv, own, strict=True)
        )
        row = torch.arange(ROWS)[:, None] + PAST
        token = torch.arange(PAST + ROWS)[None]
        seen = (token <= row + ahead_of_rows()[:, None]) & (token > row - window)
        scores = q.view(ROWS, HEADS, DIM).transpose(0, 1) @ keys.mT * DIM**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1).reshape(ROWS, -1), weights.mean(0).sum(0)


@pytest.mark.parametrize("path", running(PATHS))
def test_rows_of_pictures_see_their_whole_picture(path):
    """Within a window of fewer tokens than a picture, and of more; the attention that tokens receive counts it too."""
    case = Case()
    for window in (20, 100):
        received = Received(torch.empty(PAST + ROWS), 0)
        want, sums = case.expected(window)
        with forced(path):
            out = case.attended(window, ahead_of_rows(), received=received)
        torch.testing.assert_close(out.double(), want, atol=0.03, rtol=0.03)
        torch.testing.assert_close(received.sums.double(), sums, atol=0.02, rtol=0.02)


def test_bits_do_not_depend_on_a_split_between_pictures():
    """Also where the first rows of a picture have run before."""
    case = Case()
    kv = case.kv.clone()
    whole = case.attended(100, ahead_of_rows(), kv=kv)
    for cuts in ((0, 3, 60, 150), (0, 40, 44, 140, 150)):
        written, out = case.kv.clone(), []
        for start, end in pairwise(cuts):
            out.append(case.attended(100, ahead_of_rows(), range(start, end), kv=written))
        assert torch.equal(torch.cat(out), whole)
    assert torch.equal(case.attended(100, ahead_of_rows(), range(70, 150), kv=kv), whole[70:])


@pytest.mark.parametrize(
    "ahead",
    [
        torch.tensor([0, 2, 0], dtype=torch.int32),
        torch.tensor([2, 0, 0], dtype=torch.int32),
        torch.tensor([-1, 0, 0], dtype=torch.int32),
        torch.tensor([0, 0, 0]),
        torch.zeros(2, dtype=torch.int32),
    ],
    ids=["beyond the call", "an end that falls", "negative", "int64", "too few"],
)
def test_counts_that_do_not_fit_are_refused(ahead):
    """A divided picture among them: its rows would not see all of it."""
    case = Case()
    with pytest.raises(ValueError, match="expected"):
        case.attended(20, ahead, range(3))
