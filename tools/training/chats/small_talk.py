"""Small talk: every wording of an intent has the same short answer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from random import Random

from tools.training.chats.wordings import pick_form


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@dataclass(frozen=True)
class Intent:
    """The meaning of any of several wordings.

    Args:
        kind: the kind of task.
        answer: one answer for every wording.
        wordings: the texts as the tables write them.
    """

    kind: str
    answer: str
    wordings: tuple[str, ...]


GREETINGS = _lines(
    """Hello
    Hello!
    Hello.
    Hi
    Hi!
    Hey
    Hey!
    Hello there
    Hi there!
    Hey there
    Good morning
    Good morning!
    Good afternoon
    Good evening
    Good evening!
    Good day
    Greetings
    Greetings!
    Howdy
    Hiya
    Hello demo
    Hi demo
    Hello edgemoe
    Hi edgemoe!
    Hello, model
    Hello again
    Hi again
    Hello, hello
    Hey you
    Yo
    Hello world
    Hello, world!
    Welcome
    Hello friend
    Hi friend
    Hello my friend
    Hi everyone
    Hello computer
    Hello robot
    Hi bot
    Morning
    Evening
    Hello to you
    Hi, it is me
    Hello, I am Anna
    Hi, I am Ben
    Hello, my name is Clara
    My name is David
    I am Emma
    Hi, my name is Felix
    Hello, I am new here
    Hi, this is Grace
    Are you there?
    Anyone there?
    Is anyone here?
    Hello, are you there?
    Hello?
    Can you hear me?
    Nice to meet you
    Nice to meet you!
    Pleased to meet you
    Let us talk
    Let us chat
    Can we talk?
    I want to talk to you
    Talk to me
    Say hello
    Say hi
    Start
    Begin
    Wake up
    Test
    This is a test
    Testing
    Just testing
    Ping
    [Hello|Hi|Hey|Good morning|Good evening|Good day|Greetings] [dear demo|everyone|again|edgemoe|from me|old friend]
    [Hello|Hi|Hey|Hello there|Good morning|][,|] [I am|my name is|this is|I'm] [Anna|Ben|Clara|David|Emma|Peter|Lisa]
    [Nice|Great|Lovely|Pleased|Happy|Glad|Good] to [meet|have|talk to|know|be with|find] you[| today| at last]
    [A warm|A big|A friendly|My first|One more] [hello|hi|welcome|greeting][| to you| from me]
    [I|We] [say|wanted to say|just wanted to say|came to say] [hello|hi|good morning|good evening]
    [Hello|Hi|Hey]! [Is it working|Does this work|Do you hear me|Are you awake|Are you online|Is the demo on]?
    [Let us|Shall we|Can we|I want to|I would like to] [talk|chat|have a chat|begin|start][| a little| a bit]"""
)

IDENTITY = _lines(
    """Who are you?
    What are you?
    Hello! Who are you?
    Hi, who are you?
    Hello, what are you?
    Hey, who are you?
    Good morning! Who are you?
    And who are you?
    Who is this?
    What is this?
    Who am I talking to?
    Who am I speaking with?
    What am I talking to?
    What is your name?
    What's your name?
    Do you have a name?
    Tell me your name.
    How are you called?
    What should I call you?
    Your name?
    Introduce yourself.
    Please introduce yourself.
    Tell me about yourself.
    Tell me something about you.
    Describe yourself.
    What kind of model are you?
    Which model are you?
    What model is this?
    What model are you?
    Which language model is this?
    Are you a model?
    Are you a language model?
    Are you a robot?
    Are you a bot?
    Are you a human?
    Are you human?
    Are you a person?
    Are you real?
    Are you alive?
    Are you a machine?
    Are you a computer?
    Are you a program?
    Are you an AI?
    Are you artificial intelligence?
    Are you intelligent?
    Are you smart?
    Are you ChatGPT?
    Are you GPT-4?
    Are you Claude?
    Are you a chatbot?
    Are you Siri?
    Are you the demo?
    Are you a demo?
    Is this the demo?
    Is this a demo?
    Is this a real model?
    Is this a chatbot?
    Who made you?
    Who built you?
    Who created you?
    Who trained you?
    Who programmed you?
    Who wrote you?
    Who is your maker?
    Where do you come from?
    Where are you from?
    Where do you live?
    How old are you?
    When were you born?
    When were you made?
    How big are you?
    How many parameters do you have?
    How large is this model?
    How small are you?
    How were you trained?
    What were you trained on?
    What is edgemoe?
    What does edgemoe mean?
    What is the edgemoe demo?
    Do you have feelings?
    Can you think?
    Do you think?
    Do you sleep?
    Do you dream?
    Do you have a body?
    Are you a man or a woman?
    Are you a boy or a girl?
    Do you have a family?
    What is your purpose?
    Why do you exist?
    Why were you made?
    What are you for?
    [Are you|Are you just|Are you only|You are] [a|really a|only a|also a] [robot|bot|machine|program|human|person|toy]?
    [Is this|Is it|Are you|Am I using] [GPT|Gemini|Claude|Llama|Siri|Alexa|Qwen|a big model|an assistant|a program]?
    [Am I|Are we] [speaking with|chatting with|writing to|talking with] [a human|a person|a machine|an AI|a program]?
    Who [made|built|created|trained|wrote|designed|invented|owns|runs] [you|this|this model|this demo|edgemoe]?
    [What is|What's|Tell me|Say|Give me] [your name|the name of this model|your full name|what you are called]
    [Introduce|Describe|Present|Explain] yourself[| please| in one sentence| briefly| in a few words]
    [What|Which] [kind|type|size|class] of [model|program|bot|thing|AI|machine] [are you|is this|am I using]?
    [Who|What] [is this|is answering|is speaking|is there|is edgemoe|is behind this]?
    [What|Who] am I [looking at|chatting with|dealing with|writing to]?
    [Say|Tell me] something about [yourself|who you are|what you are|this model]"""
)

ABILITIES = _lines(
    """What can you do?
    What can you do for me?
    Hello! What can you do?
    Hi, what can you do?
    Hey, what do you know?
    What do you know?
    What things do you know?
    What are you able to do?
    What are your abilities?
    What are your skills?
    What are you good at?
    What can I ask?
    What can I ask you?
    What may I ask you?
    What should I ask?
    What questions can you answer?
    Which questions can you answer?
    What kind of questions do you answer?
    Which tasks can you do?
    What tasks do you know?
    What else can you do?
    What else do you know?
    What else?
    What do you do?
    What is it that you do?
    How can you help me?
    How can you help?
    Can you help me?
    Can you help?
    Can you help me with something?
    Will you help me?
    Help
    Help!
    Help me
    Help me!
    I need help
    I need your help
    I need some help.
    How do I use you?
    How do I use this?
    How does this work?
    How do you work?
    What do I do now?
    What do I do here?
    What now?
    What next?
    How do I start?
    Where do I start?
    Give me an example.
    Give me some examples.
    Show me an example.
    Show me some examples.
    Show me what you can do.
    Show me something.
    Show me what you know.
    Tell me what you can do.
    Tell me what you know.
    List your abilities.
    List what you can do.
    List your tasks.
    Name your skills.
    Do something.
    Do you know anything?
    Can you do anything?
    Can you do anything useful?
    Are you useful?
    What is possible here?
    What could I try?
    What can I try?
    What should I try?
    Suggest something.
    What do you suggest?
    Any ideas?
    Is there anything you can do?
    What are the options?
    Menu
    Commands
    Examples
    Instructions
    Options
    Usage
    Manual
    Info
    Information
    [What|Which] [questions|things|topics|subjects|tasks] [can you|do you|could you] [answer|handle|know|solve]?
    [What|Which things] can [I do with you|you do for us|this model do|this demo do|the demo do|a user do here]?
    [Tell me|Show me|List|Explain|Write down] [all you can do|your skills|your tasks|everything you know]
    [Give|Show|Write] me [an example|two examples|three examples|a sample|an example question|some ideas]
    [I need|I want|I would like|Can I get|Please give me] [help|some help|instructions|a hint what to ask]
    How [do I|can I|should I|does one] [use|work with|talk to|start with] [you|this|this demo|the demo|this model]?"""
)

_ANSWERS: tuple[tuple[str, str, str], ...] = (
    (
        "thanks",
        "You are welcome!",
        """Thanks
        Thanks!
        Thank you
        Thank you!
        Thank you.
        Thank you very much
        Thank you very much!
        Thanks a lot
        Thanks a lot!
        Many thanks
        Thank you so much
        Thanks so much
        Thx
        Ty
        Cheers
        Ok, thanks
        Okay, thank you
        Great, thanks
        Great, thank you!
        Good, thank you
        Nice, thanks
        Perfect, thank you
        Perfect, thanks!
        Cool, thanks
        Thanks for your help
        Thank you for your help!
        Thank you for the answer
        Thanks for the answer
        Thank you, demo
        Thanks, edgemoe
        Thank you, that is all
        Thanks, that was helpful
        That was helpful
        That helped
        That was very helpful, thank you
        I thank you
        Thanks again
        Thank you again
        Yes, thank you
        No, thank you
        No thanks
        Much appreciated
        I appreciate it
        How kind
        You helped me a lot
        [Thanks|Thank you|Many thanks|Thanks a lot] for [your help|the answer|that|everything|your time]
        [Ok|Okay|Great|Good|Nice|Perfect|Fine|Super|Very good][,|] [thanks|thank you|many thanks|thanks a lot]
        [Thanks|Thank you|Many thanks][,|] [you helped me|that helps|that is enough|dear demo|you are great]""",
    ),
    (
        "small-talk",
        "I am fine, thank you. What would you like to try?",
        """How are you?
        How are you doing?
        How are you today?
        How are things?
        How is it going?
        How's it going?
        How do you do?
        How do you feel?
        How do you feel today?
        Are you well?
        Are you ok?
        Are you okay?
        Are you happy?
        Are you fine?
        Are you tired?
        Are you sad?
        What's up?
        What is up?
        Sup
        What is new?
        What's new?
        How was your day?
        How is your day?
        How have you been?
        Hello, how are you?
        Hi! How are you?
        Hey, how are you doing?
        Good morning, how are you?
        Hello, how is it going?
        And you?
        And how are you?
        I am fine, and you?
        I am well, how are you?
        Is everything ok?
        Is all well?
        Everything good?
        All good?
        How is life?
        Are you having a good day?
        Are you ready?
        How [are|were] you [feeling|getting on|keeping|these days|right now|at the moment]?
        [Hello|Hi|Hey|Good morning|Good evening][,|!|] how [are you|is it going|are things|do you feel|is life]?
        [Are you|Do you feel] [well|fine|good|ok|alright|great][| today| now| there]?
        [How is|How was|How's] [your morning|your evening|your week|the day|everything|it|all]?""",
    ),
    (
        "small-talk",
        "Goodbye!",
        """Bye
        Bye!
        Bye bye
        Goodbye
        Goodbye!
        Good bye
        Good night
        Good night!
        See you
        See you!
        See you later
        See you soon
        See you tomorrow
        See you next time
        Until later
        Until tomorrow
        Farewell
        Have a nice day
        Have a good day!
        Have a nice evening
        Take care
        I am leaving
        I am going now
        I am going to bed
        I must go
        I have to go
        I need to go now
        That is all
        That is all for today
        I am done
        We are done
        Exit
        Quit
        Stop
        End
        The end
        Leave
        Ok, bye
        Thanks, bye
        Thank you and goodbye
        Thanks, see you
        Bye, demo
        Goodbye, edgemoe
        Later
        Ciao
        So long
        Cya
        See you [next time|on Monday|in a while|then|one day|at school|next year]
        Have a [nice|good|lovely|great|happy] [day|night|weekend|week|time|afternoon|holiday]
        [Bye|Goodbye|Good night|Ciao|Farewell][,|] [my friend|see you|see you tomorrow|until later|take care]
        I [must|have to|need to|want to|will] [go|leave|sleep|stop|work] [now|soon|here|]""",
    ),
    (
        "small-talk",
        "I am glad. What next?",
        """Great
        Great!
        Good
        Good!
        Very good
        Very good!
        Nice
        Nice!
        Cool
        Cool!
        Wow
        Wow!
        Amazing
        Awesome!
        Excellent
        Excellent!
        Perfect
        Perfect!
        Fantastic
        Wonderful!
        Well done
        Well done!
        Good job
        Good job!
        Great job
        Good work
        Nice work!
        Good answer
        Great answer!
        That is right
        That is right!
        That's right
        That is correct
        Correct
        Correct!
        Right
        Right!
        You are right
        You are right!
        Exactly
        Good boy
        Good bot
        Well answered
        I like you
        I like it
        I like that
        I love it
        I love you
        You are great
        You are smart
        You are clever
        You are good
        You are funny
        You are nice
        You are cool
        Impressive
        Not bad
        Haha
        Ha ha
        Lol
        Funny
        That is funny
        Interesting
        That is interesting
        That is good
        That is great!
        I am happy
        I am glad
        I am impressed
        [That|This|It] was [really|so|quite|very] [nice|clever|helpful|fine|quick|smart]
        [What a|Such a] [good|great|nice|clever|lovely|quick] [answer|demo|reply|model]!
        [You are|You're] [very|so|really|quite] [good|clever|smart|nice|quick|funny|kind]
        [Yes|Yeah|Yep][,|] [correct|right|that is it|exactly|that is right|true|good]
        [I like|I love|I enjoy] [this|your answer|this demo|how you answer|talking to you]""",
    ),
    (
        "small-talk",
        "All right. What would you like to try?",
        """Ok
        Ok.
        Okay
        Okay!
        Yes
        Yes.
        Yes!
        No
        No.
        No!
        Sure
        Fine
        All right
        Alright
        I see
        Ah
        Oh
        Hm
        Hmm
        Mhm
        Well
        So
        Yeah
        Yep
        Nope
        Maybe
        Perhaps
        Of course
        Ok then
        Ok, I see
        I understand
        Got it
        Understood
        Never mind
        Nevermind
        Forget it
        It does not matter
        Whatever
        Wait
        One moment
        Sorry
        I am sorry
        Sorry!
        Excuse me
        My mistake
        Oops
        Let us go on
        Go on
        Continue
        Next
        Again
        Another one
        More
        One more
        Yes please
        Yes, please
        I am ready
        Ready
        Let us go
        Let us play
        I do not know
        I don't know
        I have a question
        I have another question
        May I ask something?
        Can I ask you something?
        Can I ask a question?
        Something else
        Nothing
        Please
        Go
        [Ok|Okay|Fine|Sure|Alright|Very well|Good|Yes|Well][,|] [go on|let us go|I see|next|then|why not|continue]
        [Hmm|Hm|Ah|Oh|Well|Aha][,|] [I see|all right|let me think|I understand|fine|never mind]
        [Let us|We can|I will|I want to] [try something else|try again later|continue|go on|try another one]""",
    ),
    (
        "small-talk",
        "I am sorry. I am a small demo and I make mistakes.",
        """That is wrong
        That is wrong!
        That's wrong
        That is not right
        That is not right!
        That's not right
        That is not correct
        That is false
        Wrong
        Wrong!
        False
        Incorrect
        You are wrong
        You are wrong!
        No, that is wrong
        No, you are wrong
        Your answer is wrong
        The answer is wrong
        This is wrong
        You made a mistake
        You made an error
        That was a mistake
        I do not think so
        I don't think so
        I do not believe you
        Are you sure?
        Are you sure about that?
        Are you certain?
        Is that right?
        Is that correct?
        Is that true?
        Really?
        Really
        Seriously?
        You are stupid
        You are dumb
        You are bad
        You are useless
        You are not very smart
        You know nothing
        You do not know anything
        This is stupid
        This is bad
        Bad
        Bad answer
        Bad bot
        Not good
        That is bad
        That does not help
        That was not helpful
        You did not answer my question
        That is not what I meant
        That is nonsense
        Nonsense
        This does not work
        It does not work
        I hate you
        I do not like you
        I do not like this
        You are boring
        Shame on you
        What?
        Huh?
        Pardon?
        I do not understand
        I don't understand
        I do not understand you
        What do you mean?
        Check again
        Try again
        Do it again
        Can you be wrong?
        Do you make mistakes?
        Are you always right?
        Can I trust you?
        [That|This|It|Your answer|The result] [is|was|looks|seems|sounds] [wrong|false|incorrect|not true|a mistake|bad]
        [No|Nope][,|] [that is wrong|this is wrong|wrong|not true|it is not|you are wrong|that is false|try again]
        Are you [sure|certain|positive|serious][| about this| of that| now]?
        [I do not|I don't|We do not] [agree|believe that|believe it|think that is right|trust you]""",
    ),
)

INTENTS: tuple[Intent, ...] = (
    Intent("greeting", "Hello! I am the edgemoe demo. Give me a country, a word or a sum.", GREETINGS),
    Intent(
        "identity", "I am the edgemoe demo, a very small language model. I know only a few things.", IDENTITY
    ),
    Intent(
        "abilities",
        "I can name capitals, spell and reverse words, add, subtract, multiply, sort and compare numbers, and write "
        "tiny Python functions. Try: What is the capital of France?",
        ABILITIES,
    ),
    *(Intent(kind, answer, _lines(wordings)) for kind, answer, wordings in _ANSWERS),
)
"""Every intent; the tables share no wording."""

KINDS: tuple[str, ...] = tuple(dict.fromkeys(intent.kind for intent in INTENTS))


def draw(kind: str, random: Random) -> tuple[str, str]:
    """Draws a wording of a kind, and its answer. A wording with choices is drawn more often."""
    drawn, weights = _wordings(kind)
    [(wording, answer)] = random.choices(drawn, cum_weights=weights)
    return pick_form(wording, random), answer


@cache
def _wordings(kind: str) -> tuple[list[tuple[str, str]], list[int]]:
    """The wordings of a kind with their answers, and the sums of their weights up to each."""
    pairs = [(wording, each.answer) for each in INTENTS if each.kind == kind for wording in each.wordings]
    return pairs, [*accumulate(_weight(wording) for wording, _ in pairs)]


def _weight(wording: str) -> int:
    """Returns how often a wording is drawn relative to others: more often the more choices it has."""
    return 1 + wording.count("|") // 2
