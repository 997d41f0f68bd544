"""The models of `edgemoe serve`: their names, what each takes of the limits, and how each is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.api.load import Loading, load_model
from edgemoe.console.log_lines import say_with_time
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.options.effects import require_several
from edgemoe.models.options.groups import PrefixCacheOptions
from edgemoe.models.options.prefix_cache import DEFAULT_LIMIT, open_prefix_cache
from edgemoe.models.options.run_settings import run_settings
from edgemoe.storage.store.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from contextlib import ExitStack

    from edgemoe.api.model import Model
    from edgemoe.serve.limits import Limits
    from edgemoe.serve.models import Models
    from edgemoe.serve.slot import Checked, Memory


def models_by_name(models: Sequence[Path], name: str | None) -> dict[str, Path]:
    """The models of a server by the names that clients see.

    Args:
        models: the values of --model; a directory of stores stands for each of its stores.
        name: the value of --name, for a server of one model.

    Raises:
        UserError: a model is given twice, or one name for several models.
    """
    paths = [store for model in models for store in _stores_in(model)]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError("different models in --model", f"{path} twice", "leave one of the two out")
    if name is not None and len(paths) > 1:
        found = f"--name {name} for {len(paths)} models"
        raise UserError("one model with --name", found, "leave it out: each has the last part of its --model")
    if name is not None:
        return {name: paths[0]}
    names = [_name(path) for path in paths]
    return {
        str(path) if names.count(short) > 1 else short: path for short, path in zip(names, paths, strict=True)
    }


def _stores_in(model: Path) -> list[Path]:
    """The stores in a directory that is no model itself; otherwise the model."""
    if not model.is_dir() or (model / MANIFEST_NAME).exists() or (model / "config.json").exists():
        return [model]
    return sorted(path.parent for path in model.glob(f"*/{MANIFEST_NAME}")) or [model]


def _name(model: Path) -> str:
    """The name of a model for clients: a Hub name as it is, else the last part of a path."""
    return "demo" if model == DEMO else str(model) if not model.exists() else model.resolve().name


class ServedModel:
    """A model that a server opens and closes.

    Its KV and the heat of its experts come back with it: unless --prefix-cache-dir has the KV, it is written to the
    cache when the model is unloaded, where the model and the device allow that.

    Args:
        name: the name for clients.
        loading: its options. Where a server has several models, the limits hold for all of them together.
    """

    def __init__(self, name: str, loading: Loading) -> None:
        self._name, self._loading = name, loading
        self._limits: Memory | None = None
        self._disk: PrefixCacheOptions | None = None
        self._answered: Callable[[], None] = lambda: None

    def answered(self) -> None:
        """Has the heat of experts saved from time to time."""
        self._answered()

    def check(self) -> Checked:
        """Converts the model where it has no store yet; says what it takes of the limits once it is loaded.

        Raises:
            UserError, DoesNotFit, DamagedData: it cannot run, or the limits do not hold it alone.
        """
        try:
            return self._checked()
        except EdgemoeError:
            say_with_time(f"the model {self._name} cannot be served")
            raise

    def _checked(self) -> Checked:
        from edgemoe.models.open import open_store
        from edgemoe.models.plans.division import Division, plan_levels
        from edgemoe.models.tokenizer import load_tokenizer
        from edgemoe.serve.serving import About
        from edgemoe.serve.slot import ALONE, Checked, Memory

        opening, choose = self._loading.opening, partial(run_settings, **self._loading.settings)
        store, plan, settings = open_store(opening, choose, shrink=True)
        require_several(settings, opening.parallel, "--parallel 8")
        load_tokenizer(store.directory)
        limits = Memory(plan.vram_limit_bytes, plan.dram_limit_bytes)
        if opening.vram_limit is not None and not store.device:
            everything = replace(Division.of(opening), vram=None, dram=0)
            whole = plan_levels(store, choose, everything, shrink=True)[0].vram_limit_bytes
            limits = Memory(whole) if whole < limits.vram else limits
        self._limits = limits
        # a process has one cap on its GPU memory (Device.cap), which is of one model
        return Checked(ALONE if store.device else limits, About(store, plan.context))

    def load(self, opened: ExitStack) -> Model:
        """Opens the model, prints what it takes, and keeps how hot its experts are for the next opening."""
        from edgemoe.memory.describe import start_line
        from edgemoe.models.heat import keeping_heat

        model = opened.enter_context(load_model(self._options()))
        engine, store = model.engine, model.engine.store
        several = f"{self._name}: " if self._limits else ""
        say_with_time(several + start_line(engine.plan))
        before, self._answered = opened.enter_context(
            keeping_heat(store.directory, store.manifest, engine.heat)
        )
        engine.fill_first(before)
        return model

    def _options(self) -> Loading:
        """The options of the next opening: the model's own part of the limits, and the disk that has its KV."""
        loading, limits = self._loading, self._limits
        if limits:
            dram = f"{limits.dram}B" if limits.dram else None
            opening = replace(loading.opening, vram_limit=f"{limits.vram}B", dram_limit=dram)
            loading = replace(loading, opening=opening)
        return replace(loading, disk=self._disk) if self._disk else loading

    def unloading(self, model: Model) -> None:
        """Writes the KV of ended requests to the cache, from which the next opening reads it."""
        from edgemoe.console.sizes import parse_size
        from edgemoe.models.cache import kv_directory

        self._answered = lambda: None  # it refers to the engine
        if self._disk or self._loading.disk.prefix_cache_dir:
            return  # all of it is on disk, or about to be
        try:
            disk = open_prefix_cache(model.engine.store, kv_directory(), parse_size(DEFAULT_LIMIT))
        except (
            UserError
        ):  # linear attention, windows on a GPU, or a directory that cannot be used: KV is computed again
            return
        try:
            model.save(into=disk)
        finally:
            disk.close()
        self._disk = PrefixCacheOptions(kv_directory())


def capacity(loading: Loading) -> Memory:
    """The bytes that all models of a server may take together: the limits, or the free memory."""
    from edgemoe.machine import devices
    from edgemoe.machine.process import available_memory
    from edgemoe.memory.overhead import PROCESS_BYTES
    from edgemoe.models.plans.division import parse_limits
    from edgemoe.serve.slot import Memory

    vram, dram = parse_limits(loading.opening)
    if vram is None:
        device = devices.open_device(loading.opening.device)
        vram = device.available_bytes() if device else available_memory() - dram - PROCESS_BYTES
    return Memory(vram, dram)


def served_models(loadings: Mapping[str, Loading], limit: int, limits: Limits, idle: float | None) -> Models:
    """The models of a server, none of which is loaded.

    Args:
        loadings: name -> options.
        limit: requests of each model at once, waiting ones included.
        limits: times and sizes of one request.
        idle: seconds after its last request until a model is unloaded; None: it stays.
    """
    from edgemoe.serve.models import models_of
    from edgemoe.serve.slot import Source

    every = [ServedModel(name, loading) for name, loading in loadings.items()]
    sources = [Source(one.load, one.check, one.answered, one.unloading) for one in every]
    together = partial(capacity, next(iter(loadings.values())))
    named = dict(zip(loadings, sources, strict=True))
    return models_of(named, limit, limits, capacity=together, idle_seconds=idle)
