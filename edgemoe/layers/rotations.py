"""The rotations of new tokens' positions, as lists of operations take them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from edgemoe.families.base import FusedGQA
from edgemoe.kernels.native.rotation import ROTATE_WIDE_HALVES
from edgemoe.layers.decoder_parts import outer_parts, parts_of
from edgemoe.layers.gqa import scaled_queries
from edgemoe.layers.rotation_form import RotationForm, rotation_form

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's position, [1, rows, rotated] each."""


_MOST = RotationForm()
"""The form of most families."""


class QueryFactors(NamedTuple):
    """Factors of queries by their positions, next to a rotation (Mistral 4).

    Attributes:
        function: positions int64 [1, rows], beta, size -> float32 [1, 1, rows, 1].
        beta, size: its arguments.
        number: index of the rotation of one number that has the factors in the list of the step's rotations.
    """

    function: Any
    beta: float
    size: int
    number: int

    def of(self, at: torch.Tensor) -> torch.Tensor:
        """The factors of positions int64 [1, rows]: bf16 [1, rows, 1]."""
        factors: torch.Tensor = self.function(at, self.beta, self.size)
        return factors[:, 0].bfloat16()


class LayerRotation(NamedTuple):
    """How a layer rotates queries and keys.

    Attributes:
        number: index of its rotation in the list of the step's rotations.
        rotated: leading numbers of each head that are rotated.
        form: the numbers that are rotated together; None: the kernel does not know the way.
        factors: factors of queries; None: there are none.
    """

    number: int
    rotated: int
    form: RotationForm | None
    factors: QueryFactors | None = None


class _Source(NamedTuple):
    """A rotary embedding, for one kind of layers.

    Attributes:
        rotary: transformers' rotary embedding.
        kind: the kind of layers, for an embedding that knows several; "": it knows none.
        name: layers choose their rotation by it: their kind, or the base of its frequencies.
    """

    rotary: Any
    kind: str
    name: Any

    @property
    def numbers(self) -> int:
        """Numbers of a head that it rotates."""
        count: int = getattr(self.rotary, f"{self.kind}_inv_freq" if self.kind else "inv_freq").numel()
        return 2 * count

    def of(self, hidden: torch.Tensor, at: torch.Tensor, form: RotationForm) -> Rotation:
        """The rotation of positions int64 [1, rows], of the type of hidden."""
        rotation: Any = self.found(hidden, at)
        # Most families' tables are what the kernel reads.
        ready = form == _MOST and rotation[0].dtype == hidden.dtype and rotation[0].shape[-1] == self.numbers
        made: Rotation = rotation if ready else form.tables(rotation, self.numbers)
        return made

    def found(self, hidden: torch.Tensor, at: torch.Tensor) -> Any:
        """The result of transformers' module."""
        return self.rotary(hidden, at, self.kind) if self.kind else self.rotary(hidden, at)


class _Factors(NamedTuple):
    """Factors of queries by their positions, in place of a rotation, for one kind of layers (Beam).

    Attributes:
        function: positions int64 [1, rows] -> float32 [1, 1, rows, 1].
        name: the kind.
        numbers: numbers of a head.
    """

    function: Any
    name: str
    numbers: int

    def of(self, hidden: torch.Tensor, at: torch.Tensor, form: RotationForm) -> Rotation:
        """The factors of positions int64 [1, rows], as a rotation."""
        return scaled_queries(self.function(at), self.numbers)


_FACTORS = RotationForm(ROTATE_WIDE_HALVES, queries_alone=True)
_SCALING = "compute_attention_scaling"
"""Name of the function that computes factors of queries in transformers' files, in place of a rotation."""

_NEXT_TO_ROTATION, _BETA = "get_llama_4_attn_scale", "llama_4_scaling_beta"
"""Name of such a function where queries are rotated as well, and of its number in a config's rope_parameters."""


class Rotations:
    """Makes the rotations of a model's steps: one for each kind of its layers, one of no numbers, and factors.

    Args:
        model: transformers' model.
        traits: the traits of its family.
    """

    def __init__(self, model: Any, traits: FusedGQA) -> None:
        config, rotary = model.config, outer_parts(model).positions
        sources = _sources(rotary)
        self._form = _form_of(model, rotary) if hasattr(rotary, "inv_freq") else _form_of_kinds(sources)
        self._sources: list[_Source | _Factors] = [*sources, *_factors(model, sources)]
        self._factors = _query_factors(model, len(self._sources) + 1)
        names, layers = [each.name for each in self._sources], range(config.num_hidden_layers)
        bases = getattr(config, "layer_rope_theta", None)
        chosen = bases if isinstance(rotary, nn.ModuleList) else getattr(config, "layer_types", None)
        rotates = traits.rotates(config) if traits.rotates else [True for _ in layers]
        self.layers = [
            self._layer(names, chosen[i] if chosen and names != [""] else "", rotates=rotates[i])
            for i in layers
        ]
        """How each layer rotates."""

    def _layer(self, names: list[Any], name: Any, *, rotates: bool) -> LayerRotation:
        """The rotation of a layer that chooses by a name; a name of no source has none."""
        if not rotates or name not in names:
            return LayerRotation(len(names), 0, RotationForm())
        number = names.index(name)
        source = self._sources[number]
        form = self._form if isinstance(source, _Source) else _FACTORS
        return LayerRotation(number, source.numbers, form, self._factors)

    def of(self, hidden: torch.Tensor, positions: Sequence[int]) -> list[Rotation]:
        """The rotations of a step's tokens.

        Args:
            hidden: bf16 [1, rows, H], for its type.
            positions: the position of each token.
        """
        assert self._form
        none = hidden[..., :0].contiguous()
        at = torch.tensor([positions])
        made = [*(each.of(hidden, at, self._form) for each in self._sources), (none, none)]
        if self._factors:
            made.append((factors := self._factors.of(at), factors))
        return made


def _form_of(model: Any, rotary: Any) -> RotationForm | None:
    """How the first attention module of a model rotates, transformers' or this program's (layers.gqa)."""
    mixers = [part.module for layer in model.model.layers for part in parts_of(layer) if part.mixes]
    own = next((mixer.form for mixer in mixers if hasattr(mixer, "form")), None)
    theirs = next((mixer for mixer in mixers if hasattr(mixer, "k_proj")), None)
    return own or (RotationForm() if theirs is None else rotation_form(theirs, rotary))


def _form_of_kinds(sources: Sequence[_Source]) -> RotationForm:
    """How a model rotates whose rotary embedding knows kinds of layers: in float32 where its tables are that."""
    state, at = torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    wide = any(each.kind and each.found(state, at)[0].dtype == torch.float32 for each in sources)
    return RotationForm(ROTATE_WIDE_HALVES) if wide else RotationForm()


def _factors(model: Any, sources: Sequence[_Source]) -> list[_Factors]:
    """Factors of queries of the kinds of layers that do not rotate, where a model has any."""
    function = getattr(sys.modules[type(model.model).__module__], _SCALING, None)
    if function is None:
        return []
    kinds = sorted({*model.config.layer_types} - {each.kind for each in sources})
    return [_Factors(function, kind, model.config.head_dim) for kind in kinds]


def _query_factors(model: Any, number: int) -> QueryFactors | None:
    """Factors of queries next to their rotation, which have this number among the rotations; None: it has none."""
    function = getattr(sys.modules[type(model.model).__module__], _NEXT_TO_ROTATION, None)
    parameters = getattr(model.config, "rope_parameters", None) or {}
    if function is None or parameters.get(_BETA) is None:
        return None
    return QueryFactors(function, parameters[_BETA], parameters["original_max_position_embeddings"], number)


def _sources(rotary: Any) -> list[_Source]:
    """One rotary embedding for each rotation of a model that has one module of them, several, or none."""
    if rotary is None:
        return []
    if isinstance(rotary, nn.ModuleList):
        modules: list[Any] = [*rotary]
        return [_Source(each, "", each.config.rope_parameters["rope_theta"]) for each in modules]
    kinds = sorted(getattr(rotary, "layer_types", ()))
    known = [kind for kind in kinds if hasattr(rotary, f"{kind}_inv_freq")]
    return [_Source(rotary, kind, kind) for kind in known] if kinds else [_Source(rotary, "", "")]
