"""A head for further tokens that is trained on a model: its modules, its loss, and how often its guesses are right.

The form is DeepSeek-V3's: norms of a state and an embedding, one matrix that joins them, and one decoder layer with
experts. Embedding and output are the model's. The modules are the ones that edgemoe runs (edgemoe/layers/head.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.masking_utils import create_causal_mask

from edgemoe.families.head import PROJECTION, STATE_NORM, TOKEN_NORM
from edgemoe.layers.decoder_parts import outer_parts
from edgemoe.layers.head import HeadModel
from tools.training.batches import Batch

DEPTH = 2
"""Guesses in a row that are trained: the second one continues the head's own result, as guesses of a run do."""


class TrainedHead(nn.Module):
    """A head with float32 weights on a model that does not change.

    Args:
        model: transformers' causal model in training form, from `model.build` or with its experts' implementation. Its
            last layer has the head's form: the head's layer begins with that layer's weights.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.__dict__["whole"] = model.eval().requires_grad_(False)
        head = HeadModel(model).to_empty(device=model.device).to(torch.float32)
        head.model.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        head.model.norm.load_state_dict(outer_parts(model).norm.state_dict())
        hidden = model.config.hidden_size
        for name in (STATE_NORM, TOKEN_NORM):
            norm: Any = type(head.model.norm)
            getattr(head, name).load_state_dict(norm(hidden, eps=model.config.rms_norm_eps).state_dict())
        with torch.no_grad():
            both = torch.eye(hidden, device=model.device).repeat(1, 2) / 2
            getattr(head, PROJECTION).weight.copy_(both)
        self.head = head

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.eh_proj.weight.device

    def states(self, batch: Batch) -> torch.Tensor:
        """The model's states after its last norm, [rows, window, H]."""
        model = self.__dict__["whole"]
        with torch.no_grad():
            own = model.model(
                input_ids=batch.tokens.to(self.device),
                position_ids=batch.positions.to(self.device),
                use_cache=False,
            )
        states: torch.Tensor = own.last_hidden_state
        return states

    def results(self, batch: Batch, states: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the normed results [rows, window - 1 - d, H] of the d-th guess in a row, d from 1 to DEPTH.

        The row at place i has the state after token i, and guesses at token i + 1 + d.
        """
        tokens, positions = batch.tokens.to(self.device), batch.positions.to(self.device)
        embedding = outer_parts(self.__dict__["whole"]).embedding
        for depth in range(1, DEPTH + 1):
            embedded = embedding(tokens[:, depth:-1])
            joined = self.head.joined(embedded, states[:, : embedded.shape[1]])
            states = self._layer(joined, positions[:, depth:-1])
            yield states

    def _layer(self, joined: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The head's layer and the norm after it; attention stays within each run of positions."""
        config, rotary = self.head.config, self.head.model.rotary_emb
        kinds = "layer_type" in inspect.signature(rotary.forward).parameters
        factors = rotary(joined, positions, *([config.layer_types[0]] if kinds else []))
        mask = create_causal_mask(
            config=config,
            inputs_embeds=joined,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        out = self.head.model.layers[0](
            joined, attention_mask=mask, position_embeddings=factors, position_ids=positions
        )
        normed: torch.Tensor = self.head.model.norm(out[0] if isinstance(out, tuple) else out)
        return normed

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The model's own head of normed states."""
        logits: torch.Tensor = self.head.lm_head(states)
        return logits


def head_loss(trained: TrainedHead, batch: Batch) -> torch.Tensor:
    """Cross-entropy in nats, summed over the counted tokens; the mean of the guesses in a row."""
    total = torch.zeros((), device=trained.device)
    for depth, results in enumerate(trained.results(batch, trained.states(batch)), 1):
        counted = batch.counted[:, depth + 1 :].to(trained.device)
        targets = batch.tokens[:, depth + 1 :].to(trained.device)[counted]
        logits = trained.logits(results[counted])
        total = total + F.cross_entropy(logits.float(), targets, reduction="sum")
    return total / DEPTH


@torch.no_grad()
def agreement(trained: TrainedHead, batches: list[Batch]) -> dict[str, float]:
    """How often guesses are the model's likeliest token, where a text goes on, and the text's next token.

    Returns:
        fractions of counted tokens: "model_1" and "text_1" of first guesses, "model_2" and "text_2" of second ones.
    """
    right, counts = dict[str, int](), dict[str, int]()
    for batch in batches:
        states = trained.states(batch)
        likeliest = trained.logits(states).argmax(-1)
        for depth, results in enumerate(trained.results(batch, states), 1):
            counted = batch.counted[:, depth + 1 :].to(trained.device)
            guesses = trained.logits(results).argmax(-1)
            expected = {
                "model": likeliest[:, depth:-1],
                "text": batch.tokens[:, depth + 1 :].to(trained.device),
            }
            for name, tokens in expected.items():
                key = f"{name}_{depth}"
                right[key] = right.get(key, 0) + int((guesses == tokens)[counted].sum())
                counts[key] = counts.get(key, 0) + int(counted.sum())
    return {key: right[key] / max(counts[key], 1) for key in right}
