"""JSON schemas as grammars: the values that they let through, keyword by keyword, and refusals by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from scripted import END, chatml_tokenizer
from small_tokenizer import a_tokenizer

from edgemoe.errors import UserError
from edgemoe.grammar.lark import formed_answer
from edgemoe.grammar.matcher import Grammar, Matcher, Vocabulary
from edgemoe.grammar.schema import KEYWORDS, MOST_BYTES, MOST_DEPTH, enforceable

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


WORDS = 320
"""More than the tokenizer has."""

ENDS = frozenset({0, END})

AB = {"a": {"type": "integer"}, "b": {"type": "string"}}
CLOSED = {"type": "object", "properties": AB, "required": ["a", "b"], "additionalProperties": False}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

SCHEMAS = [
    # schema, values that it has, values that it has not
    ({"type": "integer", "minimum": 3, "maximum": 9}, [3, 9], [2, 10, "3"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9}, [4, 8], [3, 9]),
    ({"type": "integer", "multipleOf": 3}, [3, 9], [2, 10]),
    ({"type": "number", "multipleOf": 0.5}, [0.5, 2], [0.3]),
    ({"type": ["string", "null"], "minLength": 2, "maxLength": 3}, ["ab", None], ["a", "abcd", 1]),
    ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["ab"]),
    ({"type": "string", "format": "date"}, ["2026-11-23"], ["tomorrow"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1]],
        [[], [1, 2, 3], ["a"]],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1]], [["a"], [1, 2]]),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "integer"}],
            "additionalItems": {"type": "string"},
        },
        [[1], [1, "a"]],
        [["a"], [1, 2]],
    ),
    (CLOSED, [{"a": 1, "b": "x"}], [{"a": 1}, {"a": "x", "b": "x"}, {"a": 1, "b": "x", "c": 1}]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "a"}]),
    (
        {"type": "object", "patternProperties": {"^s_": {"type": "string"}}, "additionalProperties": False},
        [{"s_a": "x"}, {}],
        [{"s_a": 1}, {"b": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"s_x": {"minLength": 3}},
            "patternProperties": {"^s_": {"maxLength": 4}},
        },
        [{"s_x": "abc"}],
        [{"s_x": "a"}, {"s_x": "abcde"}],
    ),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}, {"a": 1, "b": 2, "c": 3}]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2, "b"]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    ({"type": "integer", "enum": [1, 2, 3], "minimum": 2}, [2], [1]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}], "minimum": 3}, ["a", 4], [1, None]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [4], [1]),
    ({"$ref": "#/definitions/x", "minimum": 3, "definitions": {"x": {"type": "integer"}}}, [4], [1, "a"]),
    (TREE, [{"v": 1, "kids": [{"v": 2, "kids": []}]}], [{"v": 1, "kids": [{}]}, {}]),
    ({"required": ["a"]}, [{"a": 1}, 3], [{}]),
    (
        {
            **{
                "title": "t",
                "description": "d",
                "default": 1,
                "examples": [1],
                "example": 1,
                "$comment": "c",
            },
            **{"deprecated": True, "readOnly": True, "writeOnly": False, "$id": "urn:x", "$anchor": "q"},
            "type": "integer",
        },
        [1],
        ["a"],
    ),
]


def nested(depth: int) -> object:
    """Lists within each other."""
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return Vocabulary(chatml_tokenizer(), WORDS, ENDS)


@pytest.fixture(scope="module")
def tokenizer():
    return chatml_tokenizer()


def follows(words, tokenizer, schema, text: str) -> bool:
    """Whether every token of a text, and an end after it, is allowed."""
    matcher = Matcher(Grammar(words, formed_answer(words, schema)))
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]:
        if not matcher.allowed()[token]:
            return False
        matcher.take(token)
    return True


@pytest.mark.e2e
@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda value: json.dumps(value)[:60])
def test_a_grammar_lets_through_what_its_schema_has(words, tokenizer, schema, good, bad):
    """A grammar decides as jsonschema does."""
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker()
    )
    for value in [*good, *bad]:
        assert judge.is_valid(value) == (value in good)
        assert follows(words, tokenizer, schema, json.dumps(value)) == (value in good), value


def test_every_keyword_has_a_case():
    """Keywords that restrict nothing have one too; and the page of the server names each."""
    text = json.dumps([[schema for schema, _, _ in SCHEMAS], [schema for schema, *_ in ANNOTATED]])
    assert [word for word in KEYWORDS if f'"{word}"' not in text] == []
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [word for word in KEYWORDS if f"`{word}`" not in page] == []


@pytest.mark.e2e
@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda value: json.dumps(value)[:60])
def test_random_answers_are_valid(words, tokenizer, schema, good, bad):
    """Whatever tokens are chosen among the allowed ones, an answer that ends parses and is valid."""
    grammar = Grammar(words, formed_answer(words, schema))
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    chosen = random.Random(json.dumps(schema))
    ended = 0
    for _ in range(15):
        matcher, tokens = Matcher(grammar), []
        while len(tokens) < 60:
            allowed = np.flatnonzero(matcher.allowed()).tolist()
            ends = [token for token in allowed if token in ENDS]
            token = ends[0] if ends and chosen.random() < 0.5 else chosen.choice(allowed)
            if token in ENDS:
                ended += 1
                text = tokenizer.decode(tokens)
                if "\N{REPLACEMENT CHARACTER}" not in text:
                    judge.validate(json.loads(text))
                break
            tokens.append(token)
            matcher.take(token)
    assert ended or schema is TREE or "pattern" in json.dumps(schema) or "required" in schema


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"anyOf": [{"$dynamicRef": "#x"}]}, "$dynamicRef"),
        ({"typ": "object"}, "typ"),
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"items": {"typo": 1}}}}, "typo"),
        ({"type": "array", "items": [{"typo": 1}]}, "typo"),
        ({"additionalProperties": {"typo": 1}}, "typo"),
        ({"$defs": {"x": {"typo": 1}}}, "typo"),
    ],
)
def test_other_keywords_are_refused_by_name(schema, keyword):
    """Wherever they stand."""
    with pytest.raises(UserError, match=f"got '{keyword.replace('$', '.')}'"):
        enforceable(schema)


ANNOTATED = [
    # schema, JSON that it has, JSON that it has not; by OpenAPI's and JSON Schema's own texts
    ({"type": "string", "nullable": True, "minLength": 1}, ['"a"', "null"], ["1", '""']),
    ({"type": ["integer", "string"], "nullable": True}, ["1", "null"], ["[]"]),
    ({"enum": ["a", "b"], "nullable": True}, ['"a"', "null"], ['"c"']),
    ({"type": "string", "enum": ["a"], "nullable": True}, ['"a"'], ["null"]),
    ({"type": "string", "nullable": False}, ['"a"'], ["null"]),
    ({"type": "integer", "format": "int64"}, ["7"], ['"7"']),
    ({"type": "string", "format": "byte", "contentEncoding": "base64"}, ['"a"'], ["7"]),
    (
        {"x-guidance": {"lenient": True}, "type": "array", "x-order": 3, "items": {"type": "null"}},
        ["[]"],
        ["1"],
    ),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a", "x-y": 1}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
            ],
            "discriminator": {"propertyName": "k", "mapping": {"a": "#/a"}},
        },
        ['{"k": "a"}', '{"k": "b"}'],
        ['{"k": "c"}'],
    ),
    (
        {
            "type": "integer",
            **{
                "contentMediaType": "x",
                "contentSchema": {},
                "$vocabulary": {},
                "xml": {},
                "externalDocs": {},
            },
            **{
                "propertyOrdering": ["a"],
                "markdownDescription": "x",
                "enumDescriptions": [],
                "errorMessage": "x",
            },
            "deprecationMessage": "x",
        },
        ["1"],
        ['"a"'],
    ),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("schema", "good", "bad"), ANNOTATED, ids=lambda value: json.dumps(value)[:60])
def test_annotations_have_no_effect(words, tokenizer, schema, good, bad):
    """OpenAPI's, extensions and formats that are not known; `nullable` allows null, but for an enum without it."""
    for text in [*good, *bad]:
        assert follows(words, tokenizer, schema, text) == (text in good), text


def test_names_of_properties_are_no_keywords():
    """A property may be called as a keyword that is refused."""
    enforceable({"type": "object", "properties": {"not": {"type": "integer"}, "x-guidance": {}}})


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("schema", "words_of_error"),
    [
        ({"type": "integre"}, "Invalid type: integre"),
        ({"type": "object", "properties": []}, "properties of schemas"),
        ({"type": "object", "properties": {"a": 3}}, "schemas that are objects"),
        ([], "is an object, got list"),
        ("{}", "is an object, got str"),
        ({"enum": [{1}]}, "JSON values"),
        ({"const": "\ud800"}, "JSON values"),
        ({"const": nested(5000)}, "JSON values"),
        ({"const": nested(200)}, "recursion limit"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "http://localhost/x.json"}, "does not fetch"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"$ref": "#"}, "no answer can have"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "no answer can have"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "string", "pattern": "^(?=a)"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf"),
        ({"allOf": [{"anyOf": [{"minimum": i} for i in range(20)]} for _ in range(4)]}, "too large"),
        ({"enum": ["x" * (MOST_BYTES // 2), "y" * (MOST_BYTES // 2)]}, f"at most {MOST_BYTES} bytes"),
    ],
    ids=lambda value: ascii(value)[:50] if isinstance(value, str) else None,
)
def test_what_cannot_be_enforced_is_refused(words, schema, words_of_error):
    """Broken, unsatisfiable, foreign and huge schemas, with the reason."""
    with pytest.raises(UserError) as refused:
        Grammar(words, formed_answer(words, schema))
    assert words_of_error in str(refused.value)


@pytest.mark.e2e
def test_depth_is_bounded(words):
    """The deepest schema that is allowed compiles."""
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(MOST_DEPTH - 1):
        schema = {"type": "array", "items": schema}
    Grammar(words, formed_answer(words, schema))
    with pytest.raises(UserError, match=f"at most {MOST_DEPTH} levels"):
        enforceable({"type": "array", "items": schema})


@pytest.mark.e2e
def test_a_grammar_that_becomes_too_complex_ends_in_an_error(words, tokenizer):
    """Any of 2,500 properties may come next: more than a row of the parser may have."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2500)}}
    matcher = Matcher(Grammar(words, formed_answer(words, schema)))
    matcher.take(tokenizer("{", add_special_tokens=False)["input_ids"][0])
    with pytest.raises(UserError, match="items"):
        matcher.allowed()


@pytest.mark.e2e
def test_ends_come_where_the_grammar_may_end(words, tokenizer):
    """Each token that ends an answer is allowed there; special tokens and ids beyond the tokenizer never are."""
    matcher = Matcher(Grammar(words, formed_answer(words, {"type": "integer", "maximum": 99})))
    first = np.flatnonzero(matcher.allowed())
    assert not ENDS & set(first.tolist())
    assert all(tokenizer.decode([token]).strip("-0123456789") == "" for token in first)
    assert first.max() < len(tokenizer) < WORDS
    matcher.take(int(tokenizer("7")["input_ids"][0]))
    assert set(np.flatnonzero(matcher.allowed()).tolist()) >= ENDS


@pytest.mark.e2e
def test_whitespace_ends(words, tokenizer):
    """A line with an indentation between two parts, and not more, so that no answer is whitespace for ever."""
    for text, allowed in (('{\n    "a": 1,\n    "b": "x"}', True), ('{  "a": 1, "b": "x"}', False)):
        assert follows(words, tokenizer, CLOSED, text) == allowed


@pytest.mark.e2e
def test_answers_have_matchers_of_their_own(words, tokenizer):
    """Tokens of one answer change nothing for another."""
    grammar = Grammar(words, formed_answer(words, {"const": "ab"}))
    one, other = Matcher(grammar), Matcher(grammar)
    before = other.allowed().copy()
    one.take(int(np.flatnonzero(one.allowed())[0]))
    assert (other.allowed() == before).all()
    assert (one.allowed() != before).any()


@pytest.mark.e2e
def test_tokens_without_logits_do_not_matter():
    """A tokenizer may have more tokens than the model: masks have the model's."""
    tokenizer = a_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<pad>"]})
    allowed = Matcher(Grammar(Vocabulary(tokenizer, 300, ENDS), 'start: "the"')).allowed()
    assert len(allowed) == 300
    assert allowed.any()


def test_a_model_without_an_end_is_refused():
    """Its answers under a grammar would have none."""
    with pytest.raises(UserError, match="ends an answer"):
        Vocabulary(a_tokenizer(), 300, frozenset())


def test_without_the_package_a_line_that_installs_it_is_printed(monkeypatch):
    """The Python API works without it, except for schemas."""
    monkeypatch.setattr("edgemoe.grammar.matcher.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no llguidance: run .* -m pip install '?llguidance"):
        Vocabulary(a_tokenizer(), 300, ENDS)


@pytest.mark.e2e
def test_guesses_that_a_grammar_forbids_are_cut():
    """Of guessed tokens the first ones stay, as far as masks allow one after another; the state does not change."""
    tokenizer = chatml_tokenizer()
    vocabulary = Vocabulary(tokenizer, WORDS, ENDS)
    text = formed_answer(vocabulary, {"type": "array", "items": {"type": "integer"}})
    tokens = tokenizer.encode("[1, 23", add_special_tokens=False)
    wrong = tokenizer.encode("x", add_special_tokens=False)
    matcher = Matcher(Grammar(vocabulary, text))
    first = matcher.allowed().copy()
    assert matcher.first_allowed([*tokens, *wrong, *tokens]) == tokens
    assert matcher.first_allowed(wrong) == matcher.first_allowed([]) == []
    assert (matcher.allowed() == first).all()
    for token in tokens:
        assert matcher.first_allowed([token]) == [token]
        matcher.take(token)
