"""Compensators that a study makes from the reference's weights, in a folder outside of the store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine
from edgemoe.errors import UserError
from edgemoe.evaluate.arm import STORED, Arm, Made
from edgemoe.experts.step import Study
from edgemoe.families.table import family_of
from edgemoe.kernels.compensators import Compensators
from edgemoe.kernels.device_compensators import open_compensators
from edgemoe.memory.compensator_bytes import NO_COMPENSATORS, CompensatorBytes
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.compensators.making import compensators_beside
from edgemoe.storage.convert.checkpoint import Checkpoint


def planned_bytes(store: StoreModel, arms: Sequence[Arm]) -> CompensatorBytes:
    """Bytes that a plan has for the compensators of arms, one after another.

    Raises:
        UserError: from StoreModel.compensator_bytes; or a study makes compensators on a device.
    """
    mean_rank = max((arm.compensators.rank for arm in arms if arm.compensators), default=0)
    planned = NO_COMPENSATORS
    if mean_rank:
        if store.device:
            name = f"--device {store.device.name}"
            raise UserError(
                "a model on the CPU, for compensators that a study makes", name, "give --device cpu"
            )
        planned = CompensatorBytes.at_most(store.manifest.geometry, store.shape.experts, mean_rank, use=1)
    for arm in arms:
        if arm.compensators == STORED:
            planned = planned.with_(store.compensator_bytes(arm.settings))
    return planned


@contextmanager
def compensated(engine: Engine, reference: Path | None, compensators: Made | None) -> Iterator[None]:
    """Has an engine use compensators: the store's, or others.

    Others are made in a folder of their own, with progress on stderr.

    Args:
        engine: the engine of the store.
        reference: the checkpoint that the store was converted from.
        compensators: rank, rule and base level, or STORED; None: no compensators.

    Raises:
        as storage.compensators.making.compensate, or as Compensators.
    """
    store, budget = engine.store, engine.plan.compensators_resident_bytes
    if compensators == STORED:
        own = open_compensators(store.directory, store.manifest, store.device, budget=budget)
        with closing(own), engine.studied(Study(compensators=own)):
            yield
        return
    if compensators is None or reference is None:
        yield
        return
    family = family_of(Checkpoint.open(reference).config)
    with tempfile.TemporaryDirectory(prefix="edgemoe-compensators-") as name:
        with CountProgress(f"compensators, {compensators}", store.shape.experts) as progress:
            index = compensators_beside(
                reference,
                store.directory,
                family,
                Path(name),
                base_level=compensators.base_level,
                rule=compensators.rule,
                mean_rank=compensators.rank,
                progress=progress.update,
            )
        found = Compensators(Path(name), index, store.manifest.geometry, budget=budget).filled()
        with closing(found), engine.studied(Study(compensators=found)):
            yield
