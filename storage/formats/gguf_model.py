"""A GGUF file as a model: its config and tensors by transformers' keys and names."""

from __future__ import annotations

import re
from pathlib import Path

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.storage.convert.gguf_parts import part_names, read_parts
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.formats.base import Weight
from edgemoe.storage.formats.ggml import GgmlWeight
from edgemoe.storage.formats.gguf_architectures import ARCHITECTURES
from edgemoe.storage.formats.gguf_changes import Changed, Scaled
from edgemoe.storage.formats.gguf_config import config_of, layers_ahead
from edgemoe.storage.formats.gguf_names import OUTSIDE, parameter
from edgemoe.storage.formats.gguf_refused import reason_against

_GATE, _UP, _GATE_UP = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"
"""Parts of the names of tensors over all experts; the last one has the rows of both others, gate first."""

_LARGEST_FACTORS = 1 << 16
"""Most factors of rotary frequencies: a head's size has half as many."""

_SCALE, _UNUSED = ".scale", ".input_scale"
"""Ends of the names of factors on a weight, and on a matrix's inputs, which edgemoe does not quantize."""


class GgufModel:
    """The config and tensors of a file.

    Attributes:
        path: the path of the file.
        fields: the fields of the header, by key.
        tensors: name in the file -> its place and type.
        config: the content of a config.json, before bounded_config.

    Raises:
        BadHeader, TruncatedFile: the header contradicts the file.
        ModelRefused: an unknown architecture, one file of several, or rotary embeddings of an unknown kind.
        MissingTensor: a field or tensor of the architecture is missing.
    """

    def __init__(self, path: Path) -> None:
        parts = read_parts(path)
        self.path, self.tensors = path.with_name(part_names(path.name)[0]), parts.tensors
        self.fields = fields = parts.header.fields
        name = fields.get("general.architecture")
        architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if architecture is None or fields.get(f"{name}.expert_count", 0) == 0:
            raise self._refused(
                f"an architecture with experts among {', '.join(ARCHITECTURES)}",
                f"{shortened(name)} with {shortened(fields.get(f'{name}.expert_count', 0))} experts"
                f"{reason_against(name)}",
                "choose a supported model, or its checkpoint as safetensors",
            )
        self._name, self._architecture = str(name), architecture
        if "token_embd.weight" not in self.tensors:
            raise MissingTensor(
                f"token_embd.weight in {self.path}", "no such tensor", "download the file again"
            )
        shapes = {key: entry.shape for key, (_, entry) in self.tensors.items()}
        self.config = config_of(self._name, architecture, fields, shapes, self._factors(), self.path)

    def weights(self) -> dict[str, Weight]:
        """Returns every tensor by transformers' name; a tensor over all experts becomes one per expert.

        Raises:
            ModelRefused: a tensor that no model of the architecture has, of another shape than others, or of a type
                that cannot be read.
        """
        layers = self.config["num_hidden_layers"]
        ahead = layers_ahead(self.fields, self._name)
        groups: dict[int | None, dict[str, str]] = {}
        for name in self.tensors:
            layer, part = _place(name)
            if layer is None or layer < layers:
                groups.setdefault(layer, {})[part] = name
            elif layer >= layers + ahead:
                raise self._unknown(name)
        out: dict[str, Weight] = {}
        for layer, parts in groups.items():
            out |= self._of_layer("" if layer is None else f"{self._architecture.layers}{layer}.", parts)
        return out

    def _of_layer(self, prefix: str, parts: dict[str, str]) -> dict[str, Weight]:
        """The tensors of a layer, or all tensors outside of layers, by transformers' names.

        Args:
            prefix: the beginning of their names in transformers; empty outside of layers.
            parts: name below the layer -> name in the file.
        """
        known, out = self._architecture, dict[str, Weight]()
        applied = [change for change in known.all_changes() if set(change.parts) <= parts.keys()]
        used = {part for change in applied for part in change.parts}.union(known.read_apart)
        # A factor that is a tensor of its own in transformers is not one of a weight.
        own = {part: name for part, name in parts.items() if part not in used or not part.endswith(_SCALE)}
        for change in applied:
            sources = [self._weight(part, own if part in own else parts) for part in change.parts]
            out[prefix + change.name] = Changed(self.config, change, sources)
        for part, name in own.items():
            if part not in used and not part.endswith((_SCALE, _UNUSED)):
                out |= self._named(prefix, part, name, own)
        return out

    def _named(self, prefix: str, part: str, name: str, parts: dict[str, str]) -> dict[str, Weight]:
        """A tensor of the file by transformers' names, of which experts have one each."""
        (_, entry), known = self.tensors[name], self._architecture
        stem, _, suffix = part.rpartition(".")
        outside = OUTSIDE | known.outside
        if not prefix and stem in outside and suffix in ("weight", "bias"):
            return {f"{outside[stem]}.{suffix}": self._weight(part, parts)}
        count, experts = self.fields[f"{self._name}.expert_count"], known.expert_names()
        if suffix == "weight" and entry.shape[:-2] == (count,):
            if stem in experts:
                return self._each(prefix, stem, part, parts, None)
            if stem == _GATE_UP and entry.shape[1] % 2 == 0:
                inner = entry.shape[1] // 2
                gate = self._each(prefix, _GATE, part, parts, range(inner))
                return gate | self._each(prefix, _UP, part, parts, range(inner, 2 * inner))
        one = re.fullmatch(r"(ffn_(?:gate|up|down))\.(0|[1-9][0-9]{0,3})", stem, re.ASCII)
        if one and int(one[2]) < count and suffix == "weight":
            new = f"{prefix}{experts[f'{one[1]}_exps']}.weight"
            return {new.format(expert=int(one[2])): self._weight(part, parts)}
        own = known.names(self._name)
        if prefix and stem in own and suffix in ("weight", "bias"):
            return {prefix + parameter(own[stem], suffix): self._weight(part, parts)}
        raise self._unknown(name)

    def _each(
        self, prefix: str, stem: str, part: str, parts: dict[str, str], rows: range | None
    ) -> dict[str, Weight]:
        """The matrices of all experts in a tensor, or some rows of each."""
        new = f"{prefix}{self._architecture.expert_names()[stem]}.weight"
        count = self.fields[f"{self._name}.expert_count"]
        return {new.format(expert=i): self._weight(part, parts, i, rows) for i in range(count)}

    def _weight(
        self, part: str, parts: dict[str, str], expert: int | None = None, rows: range | None = None
    ) -> Weight:
        """A tensor of the file, one expert's slice of it, or some of its rows; with its factor, if it has one."""
        path, entry = self.tensors[parts[part]]
        weight = GgmlWeight(path, parts[part], entry, expert, rows)
        factors = part.removesuffix(".weight") + _SCALE
        if factors not in parts or not part.endswith(".weight"):
            return weight
        at, scale = self.tensors[parts[factors]]
        return Scaled(weight, GgmlWeight(at, parts[factors], scale), expert)

    def _factors(self) -> dict[str, list[float]]:
        """Reads the factors of rotary frequencies: "long" and "short" -> factors."""
        out = {}
        for name in self._architecture.read_apart:
            if name in self.tensors:
                path, entry = self.tensors[name]
                if len(entry.shape) != 1 or entry.shape[0] > _LARGEST_FACTORS:
                    raise self._unknown(name)
                key = name.removesuffix(".weight").rpartition("_")[2]
                out[key] = GgmlWeight(path, name, entry).read().tolist()
        return out

    def _unknown(self, name: str) -> ModelRefused:
        return self._refused(
            f"only tensors of {self._name}",
            f"{shortened(name)} of shape {list(self.tensors[name][1].shape)}",
            "choose a file of a supported model",
        )

    def _refused(self, expectation: str, finding: str, action: str) -> ModelRefused:
        return ModelRefused(f"{expectation} in {self.path}", finding, action)


def _place(name: str) -> tuple[int | None, str]:
    """The layer of a tensor, None outside of layers, and its name below the layer."""
    match = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,4})\.([\w.]+)", name, re.ASCII)
    return (int(match[1]), match[2]) if match else (None, name)
