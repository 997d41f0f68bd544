"""Opens the checkpoint of a model on the Hub before its weights are downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from edgemoe.errors import DamagedData, ModelRefused
from edgemoe.families.table import family_of, require_known
from edgemoe.hub.gguf_files import choose_gguf
from edgemoe.hub.name import HubModel
from edgemoe.hub.repository import HubRepository
from edgemoe.hub.shards import STATE, StreamedShards
from edgemoe.storage.convert.checkpoint import COMPANIONS, PROCESSOR_FILES
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.untrusted import read_json, shortened

_COMMIT = "commit.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def open_streamed(
    model: HubModel, directory: Path, *, keep: bool, progress: Callable[[int], None]
) -> tuple[StreamedShards, int]:
    """Fills `directory` with a checkpoint whose weights are stand-ins, or resumes an earlier call's.

    The first call resolves the revision to a commit and later calls use that commit, so that two runs never mix two
    models.

    Args:
        model: the model on the Hub.
        directory: the directory of the checkpoint; created if missing.
        keep: shards stay on disk.
        progress: called with downloaded bytes of weights.

    Returns:
        the shards, and their total bytes.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
        ModelRefused: no safetensors and no GGUF file, several of them to choose from, or an unknown family; raised
            before weights are downloaded.
        DoesNotFit, DamagedData: from HubRepository.download.
    """
    (directory / STATE).mkdir(parents=True, exist_ok=True)
    repository = _at_commit(model, directory / STATE / _COMMIT)
    names = repository.names
    if model.gguf or not names & {_WEIGHTS, _INDEX}:
        weights = choose_gguf(model, names)  # these files contain the companions
        if not weights:
            raise ModelRefused(
                f"weights as safetensors or GGUF in {model.name} on the Hub",
                f"neither {_WEIGHTS} nor {_INDEX} nor a .gguf file",
                "choose a repository of the model that has them",
            )
    else:
        _download_companions(repository, directory)
        weights = _weight_files(model, directory, names)
    files = [repository.file(name) for name in weights]
    shards = StreamedShards(directory, repository, files, keep=keep, progress=progress)
    return shards, sum(file.size for file in files)


def _download_companions(repository: HubRepository, directory: Path) -> None:
    """Downloads the small files that the directory lacks.

    Raises:
        ModelRefused: an unknown family, once config.json is there.
        DoesNotFit, DamagedData, UserError: from HubRepository.download.
    """
    names = repository.names
    for name in (*COMPANIONS, *PROCESSOR_FILES, *(() if _WEIGHTS in names else (_INDEX,))):
        if name in names and not (directory / name).exists():
            part = directory / STATE / f"{name}.part"
            repository.download(repository.file(name), part, lambda size: None)
            part.replace(directory / name)
            if name == "config.json":
                require_known(directory)
                family_of(bounded_config(read_json(directory, name)))


def _at_commit(model: HubModel, record: Path) -> HubRepository:
    """Opens the repository at the recorded commit, or at the revision's, which it records."""
    if record.exists():
        return HubRepository.find(model, _recorded(model, record))
    repository = HubRepository.find(model)
    raw = json.dumps({"commit": repository.commit}).encode()
    with replacing(record, len(raw)) as fd:
        write_all(fd, raw)
    return repository


def _recorded(model: HubModel, record: Path) -> str:
    """Reads the commit of an unfinished download.

    Raises:
        DamagedData: the record is damaged.
    """
    try:
        commit = json.loads(record.read_bytes())["commit"]
        if isinstance(commit, str):
            return commit
    except (ValueError, KeyError, TypeError):
        pass
    raise DamagedData(
        f"the commit of the unfinished download of {model.name} in {record}",
        "a damaged file",
        f"run `edgemoe rm {model.name}`, then start again",
    )


def _weight_files(model: HubModel, directory: Path, names: set[str]) -> list[str]:
    """Lists the shards by name.

    Raises:
        ModelRefused: the index names a file that is no file of weights in the repository.
    """
    if _WEIGHTS in names:
        return [_WEIGHTS]
    weight_map = read_json(directory, _INDEX).get("weight_map")
    values = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    files = {value for value in values if isinstance(value, str) and value in names and _plain(value)}
    unknown = [value for value in values if not isinstance(value, str) or value not in files]
    if unknown or not files:
        raise ModelRefused(
            f"names of safetensors files of {model.name} in its {_INDEX}",
            shortened(unknown[0] if unknown else weight_map),
            "choose another repository of the model",
        )
    return sorted(files)


def _plain(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name and "\\" not in name and not name.startswith(".")
