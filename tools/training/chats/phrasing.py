"""Questions as people type them: lower case, without punctuation, over line breaks, with polite words around them."""

from __future__ import annotations

from random import Random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


BEFORE = _split(
    "Please |please |Hi, |Hello, |hey |Hi! |Hello. |Ok, |ok |So |Now |And now |Next: |Can you tell me: |"
    "Could you help me? |Quick question: |Question: |Listen, |I want to know: |One more: |Well, |"
    "Thanks. |Great. |Demo, |Do you know this? |Help me: |Then |Yes. "
)
"""Words before a question that do not change its answer."""

AFTER = _split(" please|, please| pls| thanks|, thank you| now| then|, ok|, can you| if you can")
"""Words after a question that do not change its answer."""

TALK_BEFORE = _split(
    "oh |Oh, |hey |Hey, |hi |Hi, |hello, |Hello |well |Well, |so |So, |ok, |okay |hmm |ah, |and |wow, |"
    "haha |now |please |um, |dear demo, |my friend, |but |again: "
)
TALK_AFTER = _split(
    " demo|, demo| my friend| friend| then| now| today| please| again| really| exactly| here| there|"
    " to you|, little one| :)| for now| for today| and all that|, model| buddy"
)
"""Words around small talk."""

ENDS = ("", "", "", "", "!", "??", "...", " ?", " .", "!!", ",", "?")
SPACES = ("\n", "\n", "  ", "\n\n", " \n", "\t")
AROUND = (("", " "), (" ", ""), ("", "\n"), ("\n", ""), ("  ", "  "), ("", "\n\n"), ('"', '"'), ("'", "'"))


def rephrase(question: str, random: Random, *, talk: bool = False) -> str:
    """Returns a question with the same answer, written carelessly; one in three stays as it is.

    Args:
        question: the text as the tables write it.
        random: source of every choice.
        talk: the question is small talk, which other words stand around.
    """
    if random.random() < 0.35:
        return question
    text, several = question, " " in question or talk
    before, after = (TALK_BEFORE, TALK_AFTER) if talk else (BEFORE, AFTER)
    if several and random.random() < 0.35:
        text = random.choice(before) + (text[0].lower() if random.random() < 0.6 else text[0]) + text[1:]
    case = random.random()
    if case < 0.63:
        text = text.lower() if case < 0.6 else text.upper()
    if random.random() < 0.6:
        text = text.rstrip(".?!") + random.choice(ENDS)
    if several and random.random() < (0.3 if talk else 0.1):
        text = text.rstrip(".?! ") + random.choice(after)
    if random.random() < 0.25:
        text = _respace(text, random)
    if random.random() < 0.15:
        left, right = random.choice(AROUND)
        text = left + text + right
    return text


def _respace(text: str, random: Random) -> str:
    """Replaces one space, or every space, by a line break, a tab or two spaces."""
    space = random.choice(SPACES)
    if random.random() < 0.3:
        return text.replace(" ", space)
    places = [i for i, character in enumerate(text) if character == " "]
    if not places:
        return text
    at = random.choice(places)
    return text[:at] + space + text[at + 1 :]


def normalised(text: str) -> str:
    """Returns the letters, digits and signs of a text, which every careless form of one wording shares."""
    kept = "".join(c if c.isalnum() or c in "+-*/=<>" else " " for c in text.lower())
    return " ".join(kept.split())
