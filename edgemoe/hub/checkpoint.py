"""The checkpoint of a model on the Hub, as far as it can be had without downloading its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from edgemoe.families.table import family_of, require_known
from edgemoe.hub.name import HubModel
from edgemoe.hub.repository import HubRepository, RemoteFile
from edgemoe.hub.shards import STATE, PassingShards
from storage.atomic import replacing, write_all
from storage.checkpoint import COMPANIONS, bounded_config
from storage.errors import DamagedData, ModelRefused
from storage.untrusted import read_json, shortened

_COMMIT = "commit.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def open_passing(
    model: HubModel, directory: Path, *, keep: bool, progress: Callable[[int], None]
) -> tuple[PassingShards, int]:
    """Fills `directory` with a checkpoint whose weights are stand-ins, or takes up what an earlier call left of it.

    The commit that the revision meant the first time is kept to, so that two runs never mix two models.

    Args:
        model: on the Hub.
        directory: made if need be.
        keep: shards stay on disk.
        progress: called with bytes of weights that were downloaded.

    Returns:
        the shards, and their bytes in all.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
        ModelRefused: it has no safetensors, or is of a family that edgemoe does not know; little was downloaded.
        DoesNotFit, DamagedData: as HubRepository.download.
    """
    (directory / STATE).mkdir(parents=True, exist_ok=True)
    repository, names = _at_commit(model, directory / STATE / _COMMIT)
    if not names & {_WEIGHTS, _INDEX}:
        raise ModelRefused(
            f"weights as safetensors were wanted in {model.name} on the Hub",
            f"it has neither {_WEIGHTS} nor {_INDEX}",
            "Choose a repository of the model that has them",
        )
    for name in (*COMPANIONS, *(() if _WEIGHTS in names else (_INDEX,))):
        if name in names and not (directory / name).exists():
            _fetch(repository, repository.file(name), directory)
            if name == "config.json":
                require_known(directory)
                family_of(bounded_config(read_json(directory, name)))
    files = [repository.file(name) for name in _weight_files(model, directory, names)]
    shards = PassingShards(directory, repository, files, keep=keep, progress=progress)
    return shards, sum(file.size for file in files)


def _at_commit(model: HubModel, note: Path) -> tuple[HubRepository, set[str]]:
    """The repository at the commit noted, or at today's, which is noted then; and its files' names."""
    if note.exists():
        try:
            noted = json.loads(note.read_bytes())
            return HubRepository(model, noted["commit"]), set(noted["files"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(
                f"the commit of the unfinished download of {model.name} was wanted in {note}",
                "the file is damaged",
                f"Run `edgemoe rm {model.name}`, then start anew",
            ) from error
    repository, names = HubRepository.find(model)
    raw = json.dumps({"commit": repository.commit, "files": sorted(names)}).encode()
    with replacing(note, len(raw)) as fd:
        write_all(fd, raw)
    return repository, names


def _fetch(repository: HubRepository, file: RemoteFile, directory: Path) -> None:
    part = directory / STATE / f"{file.name}.part"
    repository.download(file, part, lambda size: None)
    part.replace(directory / file.name)


def _weight_files(model: HubModel, directory: Path, names: set[str]) -> list[str]:
    """Names of the shards, in order.

    Raises:
        ModelRefused: the index names something that is no file of weights of the repository.
    """
    if _WEIGHTS in names:
        return [_WEIGHTS]
    weight_map = read_json(directory, _INDEX).get("weight_map")
    values = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    files = {value for value in values if isinstance(value, str) and value in names and _plain(value)}
    strangers = [value for value in values if not isinstance(value, str) or value not in files]
    if strangers or not files:
        raise ModelRefused(
            f"shards of {model.name} were wanted from its {_INDEX}",
            f"it names {shortened(strangers[0] if strangers else weight_map)}",
            "Choose another repository of the model",
        )
    return sorted(files)


def _plain(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name and "\\" not in name and not name.startswith(".")
