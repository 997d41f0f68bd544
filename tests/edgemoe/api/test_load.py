"""`edgemoe.load`: its keywords, their types, and errors in its own words."""

from __future__ import annotations

import doctest
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import edgemoe
from edgemoe.api import keywords
from edgemoe.api.keywords import LoadOptions, checked
from edgemoe.errors import DoesNotFit, UserError
from edgemoe.models.options.groups import Opening, PrefixCacheOptions
from edgemoe.models.options.settings import SettingOptions


def test_every_option_of_a_model_is_a_keyword():
    """Options of an opening, of the settings and of KV on disk, and the two of the pace of prompts, are keywords."""
    declared = {
        each.name for group in (Opening, SettingOptions, PrefixCacheOptions) for each in fields(group)
    }
    assert set(get_type_hints(LoadOptions)) == declared - {"model"} | {"chunk", "every"}


def test_an_unknown_keyword_names_the_known_ones():
    """And the nearest of them."""
    with pytest.raises(
        UserError, match=r"got 'vram_limits': did you mean vram_limit.* dram_limit, device, .*, scan"
    ):
        edgemoe.load(vram_limits="3GB")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"levels": 4}, 'a string for levels, got 4, of type int: write levels="4"'),
        ({"exact": "4"}, "a whole number for exact, got '4', of type str"),
        ({"retention": "0.9"}, "a number for retention, got '0.9', of type str"),
        ({"levels": (4, 2)}, 'a string for levels, got (4, 2), of type tuple: write levels="4/2"'),
        ({"lynx": "on"}, "True or False for lynx, got 'on', of type str: write lynx=True"),
        (
            {"context": "long"},
            "a whole number for context, got 'long', of type str: write a number without quotes",
        ),
        (
            {"vram_limit": 3e9},
            "a string or a whole number for vram_limit, got 3000000000.0, of type float: write "
            'vram_limit="12GB"',
        ),
    ],
)
def test_a_value_of_another_type_is_refused(keywords, message):
    with pytest.raises(UserError) as caught:
        edgemoe.load(**keywords)
    assert message in str(caught.value)


def test_numbers_and_sizes_are_taken():
    """A whole number for a number, bytes for a size; None is an option that is not given."""
    given = {"retention": 1, "vram_limit": 3_000_000, "compensators_limit": "20MB", "context": None}
    assert checked(given) == {"retention": 1, "vram_limit": "3000000B", "compensators_limit": "20MB"}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"exact": 4, "levels": "4/2"}, 'either exact= or levels=, got exact=4 and levels="4/2"'),
        ({"in_place": "off"}, 'a GPU, for in_place="off", got device="cpu": leave it out'),
        ({"lynx": True}, "give parallel=8, or leave lynx=True out"),
        (
            {"prefix_cache_limit": "1GB"},
            "prefix_cache_dir= with prefix_cache_limit=, got prefix_cache_limit=",
        ),
        (
            {"bits": 3.5, "retention": 0.5},
            "one of retention=, bits= and tpot_target=, got retention=0.5 and bits=3.5",
        ),
    ],
)
def test_errors_name_keywords(tiny_store, keywords, message):
    """Not the options of a command line."""
    with pytest.raises(UserError) as caught:
        edgemoe.load(tiny_store, **keywords)
    assert message in str(caught.value)
    assert "--" not in str(caught.value)


def test_a_limit_too_small_names_its_keyword_and_the_minimum(tiny_store):
    with pytest.raises(DoesNotFit, match=r'use vram_limit="[\d.]+ ?[KM]B" or context=\d+$'):
        edgemoe.load(tiny_store, vram_limit="900KB", context=512)
    with pytest.raises(DoesNotFit, match=r'use vram_limit="[\d.]+ ?[KM]B"$') as caught:
        edgemoe.load(tiny_store, vram_limit="1KB", context=64)
    limits = {"vram_limit": caught.value.minimum, "dram_limit": "1MB"}
    with edgemoe.load(tiny_store, **limits, context=64) as model:
        assert model.engine.plan.vram_limit_bytes == caught.value.minimum
        # The peak counts both tiers, and so is the limit next to it.
        assert model.status().limit_bytes == caught.value.minimum + 1_000_000


def test_examples_of_the_module_are_true():
    assert doctest.testmod(keywords).failed == 0


def test_loading_imports_no_command():
    """The package itself names no room of commands; the room of the API may not (tests/test_imports.py)."""
    assert "edgemoe.commands" not in Path(edgemoe.__file__).read_text(encoding="utf-8")
