"""The head for further tokens as modules: transformers' decoder layer of its model, between norms of its own.

    embedding of token t + 1 ─ norm ─┐
                                     ├─ matrix ─ decoder layer ─ norm ─ the model's head ─ guess at token t + 2
    state after token t ────── norm ─┘

The state is the model's, after its last norm, or the head's own result: so the head guesses token after token.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgemoe.experts.layer import ExpertLayer
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.families.head import HeadFamily
from edgemoe.layers.decoder_parts import outer_parts
from edgemoe.layers.dense_tensors import (
    dense_specs,
    join_parts,
    join_tensors,
    place_tensors,
    require_tensors,
)
from edgemoe.layers.gating import fused_activation
from edgemoe.layers.load import load_dense
from edgemoe.layers.replace_modules import replace_modules
from edgemoe.layers.router import choose_by_row, router_of
from edgemoe.layers.skeleton import without_weights
from edgemoe.machine.pages import in_huge_pages
from edgemoe.storage.store.manifest_entries import FileEntry

_KINDS = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}
"""Lists of a config with an entry for each layer, and the entry of the head's layer if the config does not name it."""


_ATTACHED = "edgemoe_head"
"""Attribute of a model that has its head."""


class _Inner(nn.Module):
    """The layer and the norm after it; everything else is the model's own.

    Args:
        model: transformers' causal model, of which nothing is registered here.
        config: the config of one layer.
    """

    def __init__(self, model: Any, config: Any) -> None:
        super().__init__()
        self.__dict__["whole"] = model
        last = model.model.layers[-1]
        self.layers = nn.ModuleList([type(last)(config, 0)])
        self.norm = _norm_like(outer_parts(model).norm, config)

    @property
    def embed_tokens(self) -> Any:
        """The model's embedding."""
        return outer_parts(self.__dict__["whole"]).embedding

    @property
    def rotary_emb(self) -> Any:
        """The model's rotary embedding."""
        return outer_parts(self.__dict__["whole"]).positions


class HeadModel(nn.Module):
    """A head in the form of a causal model of one layer, which `layers.fused_decode` runs.

    Args:
        model: transformers' causal model, without weights; its embedding, its rotary embedding and its head are used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.__dict__["whole"] = model
        self.config = _one_layer(model.config)
        hidden = model.config.hidden_size
        with torch.device("meta"):
            self.model = _Inner(model, self.config)
            self.enorm, self.hnorm = (_norm_like(self.model.norm, self.config) for _ in range(2))
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.to(torch.bfloat16)

    @property
    def lm_head(self) -> Any:
        """The model's own head."""
        return self.__dict__["whole"].lm_head

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """States [rows, H] of the model's last layer after the model's last norm, which the head takes."""
        normed: torch.Tensor = outer_parts(self.__dict__["whole"]).norm(states)
        return normed

    def joined(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The input of the layer, bf16 [rows, H].

        Args:
            embedded: bf16 [rows, H], the embeddings of the tokens after the states' tokens.
            states: bf16 [rows, H], normed.
        """
        joined: torch.Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), dim=-1))
        return joined


def attach_head(model: Any) -> None:
    """Makes the head of a model without weights; `head_of` returns it. It is none of the model's modules."""
    model.__dict__[_ATTACHED] = HeadModel(model)


def head_of(model: Any) -> HeadModel | None:
    """The head that `attach_head` has made; None: none was made."""
    head: HeadModel | None = model.__dict__.get(_ATTACHED)
    return head


def check_head(model: Any, family: HeadFamily, specs: Any, directory: Path) -> None:
    """Compares the dense tensors of a head with its modules.

    Args:
        model: transformers' causal model, without weights.
        family: names and sizes of the head.
        specs: every dense tensor of the head.
        directory: the store's or the checkpoint's, named in messages.

    Raises:
        MissingTensor, ModelRefused: as layers.dense_tensors.require_tensors.
    """
    head = HeadModel(model)
    without_weights(head)
    require_tensors(head, family, specs, directory)


def build_head(
    model: Any, family: HeadFamily, dense: Path, file: FileEntry, runtime: ExpertRuntime
) -> HeadModel:
    """Makes the head of a model ready to run, with its experts left to `runtime`; the model must be built before.

    Args:
        model: transformers' causal model; its head is attached.
        family: names and sizes of the head.
        dense: the file of its dense weights.
        file: size and checksum of that file in the manifest.
        runtime: shared by all MoE layers, on the CPU.

    Raises:
        MissingTensor, ModelRefused: as check_head.
        ChecksumMismatch, TruncatedFile, BadHeader: the file is damaged.
    """
    head = head_of(model)
    assert head
    ((_, experts),) = without_weights(head).items()
    require_tensors(head, family, dense_specs(dense), dense.parent)
    tensors = {family.in_modules(name): tensor for name, tensor in load_dense(dense, file).items()}
    join_parts(family, tensors, join_tensors)
    place_tensors(head, tensors)
    del tensors
    module: Any = head.get_submodule(experts)
    module.edgemoe = ExpertLayer(family.layer, runtime, module, fused_activation(module), None)
    head.eval()
    replace_modules(head, family.traits)
    choose_by_row(router_of(head.get_submodule(experts.rpartition(".")[0])))
    in_huge_pages(head.parameters())
    return head


def _one_layer(config: Any) -> Any:
    """The config of the head's layer, which has experts and attends to all tokens."""
    own = deepcopy(config)
    own.num_hidden_layers = 1
    for name, kind in _KINDS.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, (getattr(own, f"mtp_{name}", None) or [kind])[:1])
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0
    return own


def _norm_like(norm: nn.Module, config: Any) -> nn.Module:
    """A norm of the kind of the model's last one."""
    made: nn.Module = type(norm)(config.hidden_size, eps=config.rms_norm_eps)
    return made
