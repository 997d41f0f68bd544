"""A model's vision tower: transformers' own modules over the tensors of a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.families.meta_model import place_buffers
from edgemoe.kernels import torch_rules
from edgemoe.kv.pictures import Features
from edgemoe.layers.load import load_dense
from edgemoe.machine.device import Device
from edgemoe.machine.model_code import without_advice, without_compiler
from edgemoe.machine.out_of_memory import taking
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, foreign_code
from edgemoe.storage.store.dense import VISION_NAME
from edgemoe.storage.store.manifest_entries import FileEntry
from edgemoe.vision.forms import VisionForm

_ALL_THREADS = 1 << 40
"""Multiplications of a tower, which are always worth all threads (torch_rules.threads_for)."""


class Tower:
    """The vision modules of a multimodal model. They are loaded when the first picture is computed.

    Args:
        directory: the directory of the store.
        file: the size and checksum of its vision.safetensors.
        form: how pictures enter the model.
        whole: config.json of the multimodal model, whose vision_config is bounded.
        device: the device that computes; None: the CPU.
        least: the smallest sufficient limit, for messages, bytes.
    """

    def __init__(
        self,
        directory: Path,
        file: FileEntry,
        form: VisionForm,
        whole: dict[str, Any],
        device: Device | None,
        least: int = 0,
    ) -> None:
        self._directory, self._file, self._form, self._whole = directory, file, form, whole
        self._device, self._least, self._lock = device, least, threading.Lock()
        self._loaded = False

    @property
    def _model(self) -> Any:
        """transformers' multimodal model without its language model. For any thread."""
        with self._lock:
            return self._made

    @cached_property
    def _made(self) -> Any:
        """The model on the meta device."""
        from transformers import AutoModel
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        file = self._directory / "config.json"
        with (
            without_compiler(),
            without_advice(),
            foreign_code(f"values in {file} that transformers accepts", values=self._whole),
        ):
            config = CONFIG_MAPPING[self._whole["model_type"]].from_dict(dict(self._whole))
            with torch.device("meta"):
                model = AutoModel.from_config(
                    config, dtype=torch.bfloat16, attn_implementation="sdpa", trust_remote_code=False
                )
            for name in [name for name, _ in model.named_children() if name not in self._form.modules]:
                delattr(model, name)
            return model.eval()

    def positions(self, tokens: Sequence[int], picture: int, grids: Sequence[tuple[int, int, int]]) -> Any:
        """Computes the positions of a prompt's tokens. For any thread, also while features are computed.

        Args:
            tokens: ids of the prompt.
            picture: the id that stands at each token of a picture.
            grids: patches of each picture in time, height and width.

        Returns:
            int64 [3, tokens]: in time, height and width.
        """
        ids, types, sizes = torch.tensor([tokens]), [0] * len(tokens), torch.tensor(grids)
        first = 0
        for number, (time, height, width) in enumerate(grids):
            count = time * height * width // self._whole["vision_config"][self._form.merge] ** 2
            first = tokens.index(picture, first)
            # transformers joins neighbours of one type: a video of one moment has a picture's positions.
            types[first : first + count] = [1 + number % 2] * count
            first += count
        found, _ = self._model.get_rope_index(
            ids,
            mm_token_type_ids=torch.tensor([types]),
            image_grid_thw=sizes[::2],
            video_grid_thw=sizes[1::2],
        )
        return found[:, 0]

    def features(self, pixels: dict[str, torch.Tensor]) -> Features:
        """Computes the rows of one picture. For the thread that runs steps.

        Raises:
            DamagedData: the tower's file is damaged, or a parameter of the modules is missing.
            DoesNotFit: a device has too little memory.
        """
        place = self._device.place if self._device else torch.device("cpu")
        with (
            torch.inference_mode(),
            torch_rules.threads_for(_ALL_THREADS),
            taking(self._device, "a picture", self._least),
        ):
            self._load()
            inputs = {name: pixels[name].to(place) for name in self._form.inputs}
            found = self._model.get_image_features(**inputs, return_dict=True)
            rows = torch.cat([*found.pooler_output])
            layers = tuple(torch.cat([*each]) for each in getattr(found, "deepstack_features", None) or ())
        return Features(rows, layers)

    def _load(self) -> None:
        """Loads the tower's weights, once."""
        if self._loaded:
            return
        model = self._model
        place_buffers(model, self._device.place if self._device else None)
        tensors = load_dense(self._directory / VISION_NAME, self._file, self._device)
        wanted = {name: value.shape for name, value in model.state_dict().items()}
        wrong = [
            name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape
        ]
        if wrong:
            raise MissingTensor(
                f"all tensors of {type(model).__name__}'s vision modules in {self._directory / VISION_NAME}",
                f"{len(wrong)} missing or of another shape, first {wrong[0]}",
                "convert the model again from a complete checkpoint",
            )
        if more := sorted(tensors.keys() - wanted.keys()):
            raise ModelRefused(
                f"a vision module of {type(model).__name__} for every tensor in {self._directory / VISION_NAME}",
                f"{len(more)} tensors without one, first {more[0]}",
                CHECK_ORIGIN,
            )
        model.load_state_dict(tensors, assign=True)
        self._loaded = True
