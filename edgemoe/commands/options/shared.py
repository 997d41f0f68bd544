"""Options that several commands have, and the stores that their arguments name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgemoe.models.demo import DEMO, demo_by_name
from edgemoe.models.options.declared import one_of
from edgemoe.models.options.groups import complete_cached
from edgemoe.models.options.study import study_keys


def named_store(argument: Path) -> Path:
    """The directory of the store that an argument names; the demo model is converted, where it is not yet.

    Raises:
        UserError: from store_path.
    """
    from edgemoe.models.cache import cached_names, store_path

    # Next to the store of an earlier version's demo the name alone says too little.
    demo = demo_by_name(argument) == DEMO
    if demo and sum(name.directory.startswith("demo-") for name in cached_names()) != 1:
        from edgemoe.models.resolve import resolve_store

        return resolve_store(DEMO, calibrate=True)
    return store_path(argument)


def check_template(directory: Path) -> None:
    """Refuses a chat template that cannot be rendered; imports what renders it."""
    from edgemoe.api.template import check_template
    from edgemoe.models.tokenizer import load_tokenizer

    check_template(load_tokenizer(directory))


KeepSourceOption = Annotated[
    bool, typer.Option("--keep-source", help="Keep the downloaded checkpoint of a Hub model, in the cache.")
]


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")]


StoreArgument = Annotated[
    Path,
    typer.Argument(
        help="Store directory, or a name that `edgemoe models` prints, or its beginning.",
        autocompletion=complete_cached,
    ),
]


StudyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--study",
        metavar="KEY=VALUE",
        help="A setting of the papers' studies, such as depth=equal; several times. `edgemoe bench --help-all` "
        f"describes each as an option: {', '.join(study_keys())}.",
        autocompletion=one_of(*(f"{key}=" for key in study_keys())),
    ),
]
