"""The calls that test_neon makes on aarch64: one for every function, accepted by the kernel of this processor."""

from __future__ import annotations

import pytest
from kernel_calls import KERNEL_CALLS
from layer_calls import layer_calls

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.signatures import SIGNATURES

pytestmark = pytest.mark.skipif(not native.available(), reason="expected the compiled kernel, got none")

WITHOUT = {
    "paths",
    "choose_path",
    "chosen_path",
    "choose_widest",
    "open",
    "close",
    "attention_scratch",
    "bf16",
}
WITHOUT |= {"vnni_encoding"}
"""Functions that choose paths or give sizes, and two that return one number each."""


def test_every_function_has_a_call_that_is_accepted():
    calls = [call for calls in (*KERNEL_CALLS, layer_calls) for call in calls()]
    refused = [call.name for call in calls if call.here()[0] < 0]
    assert not refused
    missing = {name.removeprefix("edgemoe_") for name in SIGNATURES} - {call.name for call in calls}
    assert missing <= WITHOUT
