"""Look-ups of a table's rows, whose weights stay in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.storage.store import dense_groups


class DenseEmbedding(nn.Module):
    """Rows of a table bf16 [V, H], int8 [V, H] with a scale per row, or of 4 to 6 bits (storage.store.dense_groups).

    Args:
        weight, scale: the table; the scale is None where the table is not int8.
        factor: is multiplied with all rows, [] on their device; None: nothing is.
    """

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor | None, factor: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale, self.factor = scale, None if factor is None else factor.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks up the rows of ids, int64 [...], as bf16 [..., H]."""
        if self.weight.dtype == torch.uint8:
            found = dense_groups.looked_up(self.weight, ids.reshape(-1))
            rows = found.to(torch.bfloat16).view(*ids.shape, -1)
        else:
            rows = F.embedding(ids, self.weight)
        if self.scale is not None:
            rows = rows.to(self.scale.dtype) * self.scale[ids].unsqueeze(-1)
        return rows if self.factor is None else rows * self.factor
