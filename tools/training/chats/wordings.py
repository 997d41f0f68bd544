"""Further wordings of the tasks for training; none of them is held out, or differs from one that is by signs alone.

A wording has slots in braces, and choices in brackets: `[Spell|Write] {word}[| please]`. Choices in angle brackets are
choices of `_CHOICES`.
"""

from __future__ import annotations

import re
from random import Random

_CHOICES = {
    "know": "Do you know|Do you remember|Can you say|I want to know|I would like to know|I wonder|Tell me|Tell us|"
    "Guess|My question is|I forgot|Please tell me|Can you tell me|Could you tell me|I have to know|Find out",
    "give": "Give me|Tell me|Say|Show me|Find|I need|I want|I am looking for|Can you give me|Could you give me|"
    "Please give me|I would like|Can you tell me|Do you know|Remind me of|Write down|Look up|Please say|Try|Get me",
    "can": "Can you|Could you|Would you|Will you|Please|I want you to|You should|Now|Try to|Let us|Help me|"
    "I need you to|",
    "make": "makes|gives|is|equals|is equal to|results in|comes to|make|give",
    "work": "Calculate|Compute|Work out|Solve|Evaluate|Find|Do|Figure out|Determine",
    "end": "|||| please| now| again| then| today| in English| quickly| thanks",
}

_SUM = """{a} {sign} {b}
    {a}{sign}{b}
    {a}{sign}{b}=
    {a} {sign} {b} =
    {a}{sign}{b}[| is| equals| gives][?|]
    [What's|What is|How much is|How much are] {a}[ {sign} |{sign}]{b}?
    [What's|What is|What does] {a} {name} {b}[| equal]?
    {a} {name} {b}[| is what| gives what| equals what]
    [<can>] [<work>] {a}[ {sign} | {name} |{sign}]{b}<end>
    <know> [what|how much] {a}[ {sign} | {name} ]{b} [is|makes|gives]
    <give> [the answer to|the result of|the value of] {a} {sign} {b}<end>
    The [answer to|value of|solution of] {a} {sign} {b}?
    {a} {sign} {b} [<make>] [what|how much|which number]?
    [If you take|Take] {a} {sign} {b}, what [comes out|is it|is the answer]?"""

_TABLES: dict[str, str] = {
    "+": _SUM
    + """
    [What is|Give me|Find|I need] the [sum|total] of {a} and {b}[?|]
    [<can>] add {b} [to|and] {a}<end>
    [<can>] [add|sum|put together] {a} [with|plus|to] {b}<end>
    {a} and {b} [added|together|in total|summed][| make what]
    How much [is|are] {a} and {b}[| together]?
    What do I get [if|when] I add {a} [and|to] {b}?
    {b} more than {a}[?| is what?]
    [What number is|Which number is] {b} more than {a}?""",
    "-": _SUM
    + """
    [<can>] take {b} [away|] from {a}<end>
    [<can>] [subtract|remove|deduct] {b} from the number {a}<end>
    [What is|How much is] {a} [take away|less|without|reduced by] {b}?
    [What remains|What is left|How much remains] if I take {b} from {a}?
    What do I get [if|when] I subtract {b} from {a}?
    The difference between {a} and {b}[?| is what?]
    {b} less than {a}[?| is what?]""",
    "times-tables": """{a}x{b}
    {a}*{b}
    {a} * {b}
    {a}[x|*| * ]{b}[=| =|?| = ?]
    [What's|What is|How much is|How much are] {a}[ * |*|x]{b}?
    [What's|What is] {a} x {b} [equal to|then|again]?
    {a} [times|multiplied by|by] {b}[| equals what| gives what| is what]
    [What is|What's] {a} [times|multiplied by] {b}?
    [What is|Give me|Find|I need] the product of {a} and {b}[?|]
    [<can>] [<work>] {a}[ x | times |*| multiplied by ]{b}<end>
    [<can>] multiply {a} [and|with] {b}<end>
    <know> [what|how much] {a}[ x | times | * ]{b} [makes|gives]
    <give> [the answer to|the result of|the value of] {a} x {b}<end>
    {a} x {b} [<make>] [what|how much|which number]?
    What do I get [if|when] I multiply {a} [and|with|by] {b}?
    [How many|What] are {a} times {b}?""",
    "capital": """[capital|the capital|capital city] of {country}<end>
    {country} [capital|capital city|capital please|- capital|: capital]
    {country}'s [capital|capital city]<end>
    The [capital|capital city] of {country}[?| is which city?| is?| is where?]
    [What's|What is|What was|Which is|Where is|Which city is|What city is] {country}'s capital[| city]?
    [What's|Which is|What was|Where is|How is] the capital[| city] of {country}[| called]?
    What is the capital city [of|in] {country}?
    [What is|What's] the [main city and capital|capital town|government city] of {country}?
    [What|Which] city is [the capital in|the capital city of|capital of] {country}?
    <know> [what|which city] the capital[| city] of {country} is
    <know> what {country}'s capital [is|is called]
    <give> the capital of {country}<end>
    <give> {country}'s capital<end>
    <give> the name of the capital of {country}<end>
    <give> the city that is the capital of {country}<end>
    [In|For] {country}, [what is the capital|which city is the capital|what's the capital city]?
    {country} has [what|which city as its] capital[| city]?
    Is {city} the capital of {country}?
    Is {other} the capital of {country}?
    [I live in|I am going to|We talk about|This is about] {country}. What is the capital[| there| of it]?""",
    "country": """[What|Which] country [is|has] {city} [the capital of|as capital city]?
    [What is|What's] {city} the capital of?
    {city} is the capital of [what|where|what nation|what country]?
    {city} is the capital [city of|of|in][?| what?| which nation?]
    Whose capital is {city}?
    [Which|What] country's capital is {city}?
    <give> the country [whose capital is|that has the capital|with the capital] {city}<end>
    <know> [which|what] country {city} is the capital of
    <know> [which|what] country has {city} as its capital
    [In|To|For] which country is {city} the capital?
    {city} [belongs to|is in] which country, as its capital?""",
    "spelling": """Spell {word}<end>
    Spell: {word}
    Spell ['{word}'|"{word}"]
    Spell out [{word}|the word {word}]<end>
    Spell [this word|this][: |, ]{word}
    Spell it for me: {word}
    [How is|How was] ['{word}'|"{word}"|{word}|the word {word}] [spelled|spelt|written]?
    How [to|do we|do people|should I|can I] spell [{word}|the word {word}]
    [<can>] spell [out|] {word}<end>
    <know> how to spell [{word}|the word {word}]
    <know> the letters [of|in] {word}
    <give> the [letters|spelling] of [the word|] {word}<end>
    [Spelling|Letters] of [{word}|the word {word}]
    {word}[ spelling|, spell it| letter by letter| in letters|: spell]
    What is the spelling of [{word}|the word {word}]?
    [Which|What] letters [does {word} have|make {word}|are there in {word}]?
    What are the letters [of|in] [{word}|the word {word}]?
    [Write|Say] [{word}|the word {word}] letter by letter<end>""",
    "reversing": """Reverse {word}<end>
    Reverse: {word}
    Reverse ['{word}'|"{word}"]
    Reverse [this word|this][: |, ]{word}
    {word} [backwards|reversed|in reverse|backward|the other way around|back to front]
    The word {word} [backwards|reversed|in reverse]
    [Say|Read|Spell|Print|Type] [{word}|the word {word}] [backwards|in reverse]<end>
    [Turn|Flip|Mirror] {word}<end>
    [Turn|Flip] [{word}|this word: {word}] around<end>
    [<can>] [reverse|flip|turn around|mirror] {word}<end>
    [<can>] [say|read|spell|print] {word} backwards<end>
    [Can you|Could you|Please|I want you to] write {word} [in reverse|from back to front]<end>
    <know> what {word} is [backwards|in reverse|reversed]
    <give> {word} [backwards|in reverse|reversed]<end>
    <give> the reverse of [{word}|the word {word}]<end>
    [What is|What's] [{word}|the word {word}] [reversed|in reverse|spelled backwards|written backwards]?
    What is the [reverse|opposite order] of [{word}|the word {word}]?
    How [do you|does one|do I] [say|spell|read] {word} backwards?
    [Write|Put] [{word}|the word {word}|the letters of {word}] in reverse order<end>""",
    "rising": """Sort [{spaced}|{joined}|: {listed}|({listed})]
    Sort [the numbers|these numbers|these|the list|numbers:] [{listed}|{joined}|{spaced}]<end>
    Sort [{spaced}|{joined}] from [low to high|small to big|the lowest to the highest]
    Sort {listed} [in rising order|upwards|ascending|by size]<end>
    [<can>] sort [{listed}|{joined}|{spaced}]<end>
    [<can>] [order|arrange|rank] [the numbers|] [{listed}|{joined}|{spaced}]<end>
    [<can>] put [the numbers|] {listed} [in order|in the right order]<end>
    [Order|Arrange] [{listed}|{joined}|these numbers: {listed}][| from low to high| in rising order]
    <give> {listed} [in order|sorted|in rising order]<end>
    {listed} [sorted|in order|in rising order|from low to high|, sort them]
    [What is|What's] {listed} [sorted|in order|in rising order]?
    [I have|Here are] the numbers {listed}. Sort them.""",
    "falling": """Sort [{spaced}|{joined}|these numbers: {listed}] [in falling order|from high to low]
    Sort {listed} [in falling order|from the highest to the lowest|, high to low]<end>
    [<can>] sort {listed} from high to low<end>
    [Order|Arrange] [{listed}|{joined}|these numbers: {listed}] from high to low<end>
    {listed} [in falling order|sorted from high to low]
    [<can>] [order|arrange] [{listed}|{joined}|{spaced}] in falling order<end>
    <give> {listed} [in falling order|from high to low]<end>""",
    "larger": """Which is [bigger|greater|the larger one|the larger number], {a} or {b}?
    Which one is [larger|bigger|greater], {a} or {b}?
    [Which number|Which of these] is larger[, |: ]{a} or {b}?
    What is [larger|greater|the larger one|more, larger,|the larger number][, |: ]{a} or {b}?
    Is {a} [larger|bigger|greater] than {b}?
    [Larger|Bigger|The larger number|Greater][: |, ]{a} or {b}?
    {a} or {b}[, which is|: which one is|, what is] [larger|bigger|greater]?
    <know> [which|which one|what] is [larger|bigger|greater], {a} or {b}
    <know> whether {a} or {b} is [larger|bigger|greater]
    <give> the [larger|bigger|greater] [one|number] of {a} and {b}<end>
    Compare {a} and {b}. Which is larger?
    [Between|Out of] {a} and {b}, which is [larger|bigger|greater]?""",
    "smaller": """Which is [less|lower|the smaller one|the smaller number], {a} or {b}?
    Which one is [smaller|lower], {a} or {b}?
    [Which number|Which of these] is smaller[, |: ]{a} or {b}?
    What is [smaller|lower|less|the smaller one][, |: ]{a} or {b}?
    Is {a} [smaller|less|lower] than {b}?
    [Smaller|The smaller number|Lower|Less][: |, ]{a} or {b}?
    {a} or {b}[, which is|: which one is|, what is] [smaller|less|lower]?
    <know> [which|which one|what] is [smaller|less|lower], {a} or {b}
    <know> whether {a} or {b} is [smaller|less|lower]
    <give> the [smaller|lower] [one|number] of {a} and {b}<end>
    Compare {a} and {b}. Which is smaller?
    [Between|Out of] {a} and {b}, which is [smaller|less|lower]?""",
    "gain": """{name} has {a} {thing} and [gets|buys|finds|wins] {b} more. How many [now|in all|are there]?
    {name} has {a} {thing}. {name} [buys|finds|gets] {b} more[| {thing}]. How many {thing} [are there|in total]?
    If [I have|you have|{name} has] {a} {thing} and [get|find|buy] {b} more, how many {thing} [are there|is that]?
    [I have|We have] {a} {thing} and [find|buy|win] {b} more. How many {thing} [are there|do I have|do we have]?
    {name} [had|owned] {a} {thing} and [got|found|bought] {b}. How many {thing} are there?
    {a} {thing} and {b} {thing}: how many {thing}?
    There are {a} {thing} on the table. {name} adds {b}. How many {thing} are there?""",
    "loss": """{name} has {a} {thing} and [loses|sells|breaks|eats] {b}. How many [are left|remain|does {name} have]?
    {name} had {a} {thing} and [sold|lost|gave away|dropped] {b}. How many {thing} [are left|remain]?
    If [I have|you have|{name} has] {a} {thing} and [lose|sell|give away] {b}, how many {thing} [are left|remain]?
    [I have|We have] {a} {thing} and [give away|lose|sell] {b}. How many {thing} [are left|do I still have]?
    {name} had {a} {thing}. {b} are [gone|lost|broken]. How many {thing} [remain|are left]?
    There are {a} {thing} on the table. {name} takes {b}. How many {thing} are left?""",
    "boxes": """{name} has {a} [bags|boxes|baskets|packs] of {b} {thing}. How many {thing} [are there|in all]?
    If {a} [boxes|bags|packs] have {b} {thing} each, how many {thing} are there?
    {a} [boxes|bags|baskets] with {b} {thing} each: how many {thing}?
    {name} [buys|fills] {a} [boxes|bags] with {b} {thing} in each. How many {thing} [is that|are there]?""",
    "python": """Python function {name} that {wish}
    [<can>] write {name} in Python. It {wish}.
    [<can>] write [the|a] Python function {name}<end>
    [<can>] [code|define|make|implement] [the|a] [Python function|function] {name}[| that {wish}]<end>
    [<can>] write a function [{name}|called {name}|named {name}] that {wish}<end>
    Write Python code for {name}, which {wish}.
    [Give me|I need|I want|Find|Get me] a Python function [{name}|called {name}|named {name}] that {wish}<end>
    <give> the Python code of {name}<end>
    [How do I|How do you|How can I] write {name} in Python[?|, which {wish}?]
    [I need|I want] a Python function {name}. It {wish}.
    Code {name} in Python<end>
    [Python|In Python|py][:|,] {name}
    def {name}[|():|:|(]""",
    "follow-up": """And [of|for|in] {country}?
    And {country}?
    And [what about|how about] {country}?
    [What|How] about {country}?
    [Now|Next][:|] {country}
    [The same|Same|Also] for {country}
    And the capital of {country}?
    {country} too<end>""",
}


def _expanded(wording: str) -> str:
    """Replaces the names of choices: `<end>` and `[<can>]`."""
    within = re.sub(r"\[<(\w+)>\]", r"<\1>", wording.strip())
    return re.sub(r"<(\w+)>", lambda name: f"[{_CHOICES[name[1]]}]", within)


WORDINGS = {name: tuple(map(_expanded, lines.splitlines())) for name, lines in _TABLES.items()}
"""Name of a table -> its wordings, with slots in braces and choices in brackets."""


def pick_form(wording: str, random: Random) -> str:
    """Returns a wording with one of each of its choices; the first letter becomes a capital."""
    while "[" in wording:
        wording = re.sub(r"\[([^][]*)\]", lambda choices: random.choice(choices[1].split("|")), wording)
    text = " ".join(wording.split())
    return text[:1].upper() + text[1:]
