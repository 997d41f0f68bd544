"""Opens a model for a program or a server, with options as a command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.models.demo import DEMO, demo_by_name
from edgemoe.models.options import groups
from edgemoe.models.options.effects import require_several
from edgemoe.models.options.prefix_cache import open_prefix_cache, require_directory
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import SettingOptions

if TYPE_CHECKING:
    from edgemoe.api.model import Model


@dataclass(frozen=True)
class Loading:
    """A model and everything with which it is opened.

    Args:
        opening: the model, its limits and sizes.
        settings: fields of SettingOptions that are given.
        disk: KV on disk.
        pace: arguments of engine.scheduler.Pace.
    """

    opening: groups.Opening
    settings: Mapping[str, Any] = field(default_factory=dict)
    disk: groups.PrefixCacheOptions = field(default_factory=groups.PrefixCacheOptions)
    pace: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_keywords(cls, model: str | Path | None, keywords: Mapping[str, Any]) -> Loading:
        """Reads the keywords of `edgemoe.load`, checked by keywords.checked."""
        options = dict(keywords)

        def take(group: type) -> dict[str, Any]:
            return {each.name: options.pop(each.name) for each in fields(group) if each.name in options}

        if "exact" in options and options.get("levels") == "auto":
            del options["levels"]
        if "prefix_cache_dir" in options:
            options["prefix_cache_dir"] = Path(options["prefix_cache_dir"])
        settings, disk = take(SettingOptions), groups.PrefixCacheOptions(**take(groups.PrefixCacheOptions))
        pace: dict[str, Any] = {name: options.pop(name) for name in ("chunk", "every") if name in options}
        options["model"] = demo_by_name(Path(model)) if model is not None else DEMO
        opening = groups.Opening(**options)
        return cls(opening, settings, disk, pace)


def load_model(loading: Loading) -> Model:
    """Opens a model under limits, and converts it first where it has no store yet.

    Raises:
        UserError, DoesNotFit, DamagedData: as edgemoe.load, in the words of a command line.
    """
    from edgemoe.models.open import open_store

    directory = loading.disk.prefix_cache_dir
    most = require_directory(directory, loading.disk.prefix_cache_limit)
    choose = partial(run_settings, **loading.settings)
    opened = open_store(loading.opening, choose, shrink=True)
    require_several(opened.settings, loading.opening.parallel, "--parallel 8")
    from edgemoe.machine.model_code import without_compiler

    with without_compiler():
        from edgemoe.api.model import Model
        from edgemoe.engine.engine import Engine
        from edgemoe.engine.pace import Pace
        from edgemoe.engine.sampling import Sampling
        from edgemoe.models.ends import ends_of
        from edgemoe.models.runnable import generation_config
        from edgemoe.models.tokenizer import load_tokenizer

    pace, tokenizer = Pace(**loading.pace), load_tokenizer(opened.store.directory)
    sampling = Sampling.of_model(
        generation_config(opened.store.directory),
        ends_of(opened.store.directory, tokenizer),
        temperature=None,
        top_p=None,
        seed=0,
        max_new_tokens=512,
    )
    disk = open_prefix_cache(opened.store, directory, most) if directory else None
    return Model(Engine(*opened), tokenizer, sampling, pace, keep=True, disk=disk)
