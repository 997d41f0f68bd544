"""Patterns of texts and names that a reader must decode, and the places where they occur."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

PREPOSITIONS = (
    "about above across after against along among as at before behind below beside between beyond by during for from "
    "in into like of on onto over past per since than through to toward towards under until via with within without"
)

RELATIVES = "that those what which who whose"

# Nouns before "a" that make it stand for "per": tokens a second.
QUANTITIES = (
    r"[KMGT]i?B|\d+|bits?|blocks?|bytes?|call|cases?|chats?|codes?|columns?|conversations?|copies|cores?|cycles|dozen|"
    r"entries|entry|experts?|factors?|files?|five|four|hash|hashes|heads?|hundred|instructions|KV|launch|launches|"
    r"lines?|lists?|matrices|matrix|measurement|million|ms|nats|numbers?|objects?|one|pages?|percent|perplexity|"
    r"places?|planes?|points?|processes|questions?|requests|rows?|s|scales?|scores?|sets?|slots?|steps|tasks?|tensors?|"
    r"thousand|threads|three|time|tokens?|two|us|values?|words?"
)

# Units after that "a".
UNITS = (
    "answer|arm|attempt|batch|block|call|case|cell|character|checkpoint|chunk|class|client|code|column|command|"
    "component|conversation|core|day|directory|endpoint|engine|epoch|event|example|expert|family|figure|file|folder|"
    "format|group|head|hit|hour|iteration|kernel|key|kind|lane|layer|level|line|loop|machine|matrix|measurement|"
    "message|method|minute|miss|model|module|name|number|package|page|pair|part|peer|piece|plane|point|policy|"
    "position|process|product|program|prompt|protocol|query|question|rank|record|request|round|row|run|sample|second|"
    "sequence|set|shard|size|slot|step|store|study|task|tensor|test|thread|tier|tile|token|tool|transfer|turn|user|"
    "value|vector|warp|weight|word"
)

PARTICIPLES = (
    "begun brought chosen done found given gone got held kept known left lost made most named needed seen sent shown "
    "taken used wanted"
)

LONGEST_SIGNATURE = 4000
"""Most characters of a function's arguments."""

LONGEST_LINE = 400
"""Most characters, from a docstring back, in which the end of the code before it lies."""


def _any(words: str) -> str:
    return "|".join(words.split())


_ASIDE = re.compile(r"\b(?:behind|beside)\b", re.IGNORECASE)
_PER = re.compile(rf"(?<![\w-])(?<!level )(?<!each )(?:{QUANTITIES}) an? (?:{UNITS})\b(?! time|')")
_PRONOUN = re.compile(r"\b(?:those (?:of|that|which)|that of)\b", re.IGNORECASE)
_LONG_STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:(?:\1 +.*)?\n)*)", re.MULTILINE)
_ENTRY = re.compile(
    rf"^( +)[\w*][\w*.]*(?:, [\w*.]+)*(?: \([^)]*\))?: (?=(?:{_any(PREPOSITIONS)}|{_any(RELATIVES)})\b)",
    re.MULTILINE,
)
_FIRST_LINE = re.compile(
    r"\bthose\b|(?:^|[.:;] )(?:what|whose|the same)\b|^(?:as|for|of|to)\b[^,]*$",
    re.IGNORECASE,
)
_FUNCTION = re.compile(r"^( *)(?:async )?def (\w+)\(", re.MULTILINE)
_ARGUMENT = re.compile(rf"(?:^|[(,])\s*\*{{0,2}}({_any(PARTICIPLES)})\s*(?=[:,=)])")
_FIELD = re.compile(rf"^    ({_any(PARTICIPLES)}): .*[^,\n]$", re.MULTILINE)
_ATTRIBUTE = re.compile(
    rf"^ +(?:self\.\w+, )*self\.({_any(PARTICIPLES)})\b(?:, self\.\w+)*(?:: [^=\n]+)? = ", re.MULTILINE
)


class Place(NamedTuple):
    """A place where a pattern occurs.

    Args:
        kind: the pattern's name.
        line: number of the line, from 1.
    """

    kind: str
    line: int


def places(path: str, text: str) -> list[Place]:
    """Returns the places of all patterns in a file; of names and docstrings in Python alone."""
    starts = [("aside", match.start()) for match in _ASIDE.finditer(text)]
    starts += [("per", match.start()) for match in _PER.finditer(text)]
    if path.endswith(".py"):
        starts += [("pronoun", match.start()) for match in _PRONOUN.finditer(text)]
        starts += _in_docstrings(text)
        starts += (("name", at) for at in _names(text))
    return [Place(kind, text.count("\n", 0, at) + 1) for kind, at in starts]


def _in_docstrings(text: str) -> Iterator[tuple[str, int]]:
    for match in _LONG_STRING.finditer(text):
        before = text[max(match.start() - LONGEST_LINE, 0) : match.start()].removesuffix("r").rstrip(" ")
        if before and (not before.endswith("\n") or before.rstrip().endswith(tuple("([{,="))):
            continue  # a text within an expression
        if _FIRST_LINE.search(match[1].split("\n", 1)[0]):
            yield "first line", match.start(1)
        for section in _SECTION.finditer(match[1]):
            for entry in _ENTRY.finditer(section[2]):
                if len(entry[1]) == len(section[1]) + 4:
                    yield "argument", match.start(1) + section.start(2) + entry.end()


def _names(text: str) -> Iterator[int]:
    for function in _FUNCTION.finditer(text):
        start = function.end() - 1
        yield from (start + at for at in _arguments(text[start : start + LONGEST_SIGNATURE]))
        if not function[1] and function[2] in PARTICIPLES.split():
            yield function.start()
    yield from (match.start(1) for match in _ATTRIBUTE.finditer(text))
    for match in _FIELD.finditer(text):
        if text.rfind("\nclass ", 0, match.start()) > text.rfind("\ndef ", 0, match.start()):
            yield match.start(1)


def _arguments(signature: str) -> Iterator[int]:
    """Yields the starts of participles among the arguments of a text that begins with a signature's parenthesis."""
    depth = 0
    for match in re.finditer(r"[()]", signature):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            yield from (each.start(1) for each in _ARGUMENT.finditer(signature, 0, match.end()))
            return
