"""Opens the model that a user names: its store, its settings and a memory plan. Imports torch inside functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgemoe.console.loading import starting
from edgemoe.machine import devices
from edgemoe.models.options.groups import Opening
from edgemoe.models.plans.division import ChooseSettings, Division, plan_levels

if TYPE_CHECKING:
    from edgemoe.memory.plan import MemoryPlan
    from edgemoe.models.store_model import StoreModel
    from edgemoe.policy.settings import RunSettings
    from edgemoe.storage.convert.checkpoint import Checkpoint


class Opened(NamedTuple):
    """A store that is open, the division of its limits, and the settings for them."""

    store: StoreModel
    plan: MemoryPlan
    settings: RunSettings


def open_model(
    opening: Opening,
    *,
    check: Callable[[StoreModel], object] = lambda planned: None,
    check_files: Callable[[Path], object] = lambda directory: None,
) -> StoreModel:
    """Opens the store of a model for a device. Converts the model first if it has no store in that layout.

    Sets the threads of torch and, from their first product on, of edgemoe's own kernels.

    Args:
        opening: the model, its device, and what computes; limits and sizes are not used.
        check: may refuse the store that a conversion would make, before it begins.
        check_files: may refuse its config, tokenizer and template, in a directory, before it begins.

    Raises:
        UserError: no such device (devices.device_name), kernel or model (resolve.resolve_store).
        BadManifest, BadHeader, ModelRefused: from StoreModel.open.
    """
    place = devices.open_device(opening.device)
    from edgemoe.kernels.native.library import choose_threads
    from edgemoe.kernels.registry import compute, select
    from edgemoe.models.cache import kernels_directory
    from edgemoe.models.resolve import resolve_store
    from edgemoe.models.store_model import StoreModel

    choose_threads(opening.threads)
    select(opening.kernel, kernels_directory(), on_gpu=place is not None)
    layout = compute(place.place if place else "cpu").layout.name

    def check_headers(checkpoint: Checkpoint) -> None:
        check(StoreModel.planned(checkpoint, place))
        check_files(checkpoint.companions()[0].parent)

    keep = opening.keep_source
    how: dict[str, Any] = {"dense_bits": opening.dense_bits, "calibrate": not opening.plain_codes}
    directory = resolve_store(opening.model, layout, keep_source=keep, check=check_headers, **how)
    return StoreModel.open(directory, place)


def plan_model(model: Path, device: str) -> StoreModel:
    """Opens the store of a model, or describes the one that its first use would make; converts nothing.

    Args:
        model: a store, a checkpoint or a GGUF file.
        device: the device that the model will run on.

    Raises:
        UserError, BadManifest, BadHeader, ModelRefused: as open_model.
    """
    place = devices.open_device(device)
    from edgemoe.kernels.registry import compute
    from edgemoe.models.resolve import store_or_headers
    from edgemoe.models.store_model import StoreModel

    with store_or_headers(model, compute(place.place if place else "cpu").layout.name) as found:
        if isinstance(found, Path):
            return StoreModel.open(found, place)
        return StoreModel.planned(found, place)


def open_store(
    opening: Opening,
    choose: ChooseSettings,
    *,
    shrink: bool = False,
    convert: bool = True,
    check_files: Callable[[Path], object] = lambda directory: None,
) -> Opened:
    """Checks the options that commands share, opens the store and divides the limits.

    Args:
        opening: the model and its options.
        choose, shrink: see plan_levels.
        convert: a model without a store is converted, unless the limits are refused by its headers; False: plan_model.
        check_files: see open_model.

    Raises:
        UserError, DoesNotFit: an option that cannot be met; before a conversion where that is possible.
    """
    division = Division.of(opening)
    form = opening.kv_format()
    choose(8, fits=True)  # rejects a wrong option before a conversion that may take an hour
    with starting("loading torch"):
        import edgemoe.models.store_model  # noqa: F401  # the slow import, while the spinner turns

        devices.open_device(opening.device)

    def formed(store: StoreModel) -> StoreModel:
        store = store.with_kv(form)
        return store if opening.no_vision else store.with_vision()

    def plan(store: StoreModel, shrink: bool = False) -> tuple[MemoryPlan, RunSettings]:
        return plan_levels(formed(store), choose, division, shrink=shrink)

    if convert:
        store = open_model(opening, check=plan, check_files=check_files)
    else:
        store = plan_model(opening.model, opening.device)
    return Opened(formed(store), *plan(store, shrink))
