"""`edgemoe calibrate`: measures what fewer bits of each expert cost. Heavy imports happen inside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption, StoreArgument
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_size
from edgemoe.models.options.declared import option
from edgemoe.models.options.groups import LimitOptions, Opening

EXAMPLES = (
    "Examples: edgemoe calibrate ~/stores/qwen3 --vram-limit 3GB "
    "| edgemoe calibrate ~/stores/qwen3 --text my-conversations.txt --tokens 4096"
)


@dataclass(frozen=True)
class TextOptions:
    """Options of the text."""

    text: Path | None = option("UTF-8 text to measure on. Default: a text that the model writes itself.")
    tokens: int = option("Tokens of the text, in windows of 512 spread over it.", 2048, min=512)


@grouped
def calibrate_command(
    store: StoreArgument,
    *,
    text: TextOptions,
    limits: LimitOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure what fewer bits cost, per expert.

    The result decides the bits of each expert, for --bits and for three or more --levels.

    Writes calibration.safetensors into the store: the output error of each expert at each level against the highest
    one, the sensitivity of each layer, and a sample of routing from which prices are solved. Interrupted, it resumes.
    """
    from edgemoe.console.loading import starting
    from edgemoe.models.open import open_model
    from edgemoe.models.plans.division import parse_limits

    sizes = parse_limits(limits)
    with starting("loading torch"):
        from edgemoe.calibrate.run import CalibrationRequest, calibrate
        from edgemoe.storage.store.calibration import CALIBRATION_NAME
    opened = open_model(Opening(store, **vars(limits)))
    made = calibrate(opened, CalibrationRequest(text.text, text.tokens, *sizes))
    size = (opened.directory / CALIBRATION_NAME).stat().st_size
    if as_json:
        print(json.dumps({"store": str(opened.directory), "measured_on": made.measured_on, "bytes": size}))
    else:
        print(printable(f"{opened.directory}: calibrated on {made.measured_on}, {format_size(size)}"))
