"""Subjects of questions outside the demo's tasks, which it must decline."""

from __future__ import annotations


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.replace("\n", " ").split(";") if item.strip())


SUBJECTS: dict[str, tuple[str, ...]] = {
    "topic": _items(
        """gravity; electricity; photosynthesis; democracy; inflation; evolution; philosophy; quantum physics;
        relativity; algebra; geometry; calculus; chemistry; biology; astronomy; economics; psychology; religion;
        history; art; love; happiness; death; time; space; light; energy; matter; an atom; a black hole; a
        galaxy; the moon; the sun; a virus; a vaccine; the internet; a blockchain; bitcoin; machine learning;
        deep learning; a neural network; a transformer; the stock market; a mortgage; a contract; the law; human
        rights; climate change; global warming; pollution; a volcano; an earthquake; a hurricane; a rainbow; a
        comet; DNA; a cell; the heart; the brain; cancer; diabetes; a cold; sleep; memory; music; jazz; opera;
        poetry; a novel; grammar; a verb; a noun; a metaphor; football; chess; tennis; golf; basketball; the
        Olympic games; yoga; cooking; baking; gardening; fishing; the weather; politics; war; peace; the French
        Revolution; the Roman Empire; the Middle Ages; the Renaissance; the Cold War; slavery; money; tax; a
        bank; a computer; a compiler; Linux; Windows; a database; JavaScript; Rust; Java; HTML; a mixture of
        experts; attention; an operating system; a browser; a phone; a camera; a car; a train; an airplane; a
        rocket; a submarine; a bicycle; coffee; tea; wine; beer; chocolate; cheese; bread; sugar; salt; water;
        oil; gold; iron; plastic; glass; paper"""
    ),
    "person": _items(
        """Albert Einstein; Isaac Newton; Marie Curie; Charles Darwin; Galileo; Napoleon; Julius Caesar; Cleopatra;
        Abraham Lincoln; George Washington; Gandhi; Nelson Mandela; Queen Elizabeth; the president; the pope;
        the king of Spain; Shakespeare; Mozart; Beethoven; Bach; Picasso; Leonardo da Vinci; Van Gogh;
        Michelangelo; Plato; Aristotle; Socrates; Buddha; Jesus; Columbus; Marco Polo; Alan Turing; Ada
        Lovelace; Bill Gates; Steve Jobs; Elon Musk; Taylor Swift; Michael Jackson; Elvis; Madonna; Messi;
        Ronaldo; Michael Jordan; Harry Potter; Sherlock Holmes; Batman; Superman; Mickey Mouse; Santa Claus;
        Alexander the Great; Joan of Arc; Churchill; Stalin; Kennedy; Obama; the prime minister; your father; my
        mother; my neighbor; Tolstoy; Dickens; Jane Austen; Homer; Dante; Goethe"""
    ),
    "place": _items(
        """London; New York; Paris; Berlin; Rome; Madrid; Tokyo; Moscow; Cairo; Sydney; Chicago; Boston; Los
        Angeles; San Francisco; Hamburg; Munich; Milan; Venice; Barcelona; Istanbul; Mumbai; Shanghai; Hong
        Kong; Rio; Toronto; France; Germany; Italy; Spain; Japan; China; India; Brazil; Canada; Egypt; Kenya;
        Sweden; Norway; Poland; Peru; Africa; Europe; Asia; America; Antarctica; the Alps; the Sahara; the
        Amazon; the Nile; the Pacific; Mount Everest; the North Pole; Mars; Venus; Jupiter; Saturn; Texas;
        California; Florida; Scotland; Hawaii; my house; heaven"""
    ),
    "thing": _items(
        """the telephone; the wheel; the light bulb; the computer; the airplane; the car; the internet; the radio;
        television; the printing press; the steam engine; the clock; paper; gunpowder; the camera; the bicycle;
        penicillin; the piano; the guitar; the microscope; the telescope; the compass; zero; money; pizza; the
        sandwich; the zipper; a fridge; a microwave; a washing machine; a laptop; a battery; a magnet; a mirror;
        a bridge; a clock; an umbrella; my phone; my car; my computer; the door; the window; the kitchen; the
        dog; the garden; the moon; the sky; a shoe; a shirt; a hat; a ladder; a hammer; a knife; a pencil; a
        violin; the Eiffel Tower; the Great Wall; the Titanic"""
    ),
    "work": _items(
        """Hamlet; Don Quixote; War and Peace; the Bible; the Odyssey; Faust; Moby Dick; Dracula; Frankenstein;
        Emma; Pride and Prejudice; Romeo and Juliet; The Lord of the Rings; Alice in Wonderland; Star Wars; The
        Godfather; Titanic; Casablanca; The Matrix; Yesterday; Imagine; the Mona Lisa; the Magic Flute; the
        national anthem; Robinson Crusoe; Crime and Punishment; The Great Gatsby; Treasure Island; Oliver Twist;
        The Little Prince"""
    ),
    "event": _items(
        """World War II; World War I; the French Revolution; the Civil War; the moon landing; the Olympic games;
        the fall of Rome; the Renaissance; the last ice age; the Big Bang; the election; Christmas; Easter;
        Halloween; the match; the World Cup; the next bus; the train; the concert; the Cold War; the Middle
        Ages; my birthday; summer; winter"""
    ),
    "animal": _items(
        """dog; cat; horse; cow; pig; sheep; goat; lion; tiger; elephant; giraffe; zebra; monkey; gorilla; bear;
        wolf; fox; rabbit; mouse; rat; squirrel; bat; whale; dolphin; shark; salmon; octopus; crab; snail;
        spider; ant; bee; butterfly; mosquito; eagle; owl; penguin; parrot; chicken; duck; swan; snake; lizard;
        crocodile; turtle; frog; kangaroo; camel; dinosaur; dragon; unicorn; hamster; donkey; deer; hedgehog;
        peacock; flamingo; ostrich; panda; koala"""
    ),
    "activity": _items(
        """cook rice; bake a cake; boil an egg; make pancakes; tie a tie; change a tire; fix a bike; learn Spanish;
        play the piano; play chess; lose weight; get rich; find a job; write a letter; write a book; draw a cat;
        swim; ski; dance; sing; sleep better; save money; buy a house; rent a car; book a flight; travel to
        Mars; drive to work; fly a plane; build a house; build a boat; plant a tree; grow tomatoes; train a dog;
        feed a cat; clean a carpet; wash wool; paint a wall; install Linux; delete a file; reset my password;
        send an email; make coffee; brew beer; quit smoking; stop a cold; run a marathon; meditate; invest in
        stocks; pay taxes; win at poker; make friends; order a pizza; call a taxi; set an alarm; turn on the
        light; open the door; watch a film; read a map; speak French; translate a book; browse the web; search
        the internet; tell jokes; tell a story; write code in Java; drive a car"""
    ),
    "dish": _items(
        """pizza; pasta; lasagna; soup; risotto; paella; sushi; curry; tacos; chili; goulash; pancakes; an apple
        pie; a chocolate cake; bread; cookies; a salad; an omelette; dumplings; ice cream; lemonade; a roast;
        fried rice"""
    ),
    "language": _items(
        """French; German; Spanish; Italian; Latin; Greek; Russian; Chinese; Japanese; Arabic; Hindi; Dutch;
        Polish; Swedish; Portuguese; Korean; Turkish; Hebrew; Finnish; English; Klingon; Esperanto"""
    ),
    "phrase": _items(
        """hello; good morning; thank you; I love you; water; bread; the house; my dog; where is the station;
        goodbye; how are you; a glass of milk; see you tomorrow; happy birthday; the garden is green; one two
        three; cheese"""
    ),
    "adjective": _items(
        """blue; green; red; yellow; black; white; hot; cold; wet; dry; salty; sweet; bitter; round; flat; tall;
        big; small; fast; slow; old; new; loud; quiet; heavy; light; expensive; cheap; dangerous; important;
        famous; beautiful; broken; happy; sad; hungry; tired; bored; angry; lonely; sick; rich; poor; late;
        early; lost; in love; afraid; nervous"""
    ),
    "measure": _items(
        """tall; old; big; heavy; long; deep; far away; hot; cold; fast; wide; high; large; small; rich; famous;
        strong"""
    ),
    "quality": _items(
        """largest; smallest; tallest; fastest; oldest; longest; deepest; richest; best; worst; most famous;
        heaviest; hottest; coldest; most beautiful; most expensive; biggest; strongest; nearest; first; last;
        second largest"""
    ),
    "class": _items(
        """country; city; river; mountain; lake; ocean; animal; bird; fish; tree; planet; star; building; company;
        person; book; film; song; painting; car; computer; university; school; bridge; island; desert; language;
        king; phone; football team; programming language; number; word; food; drink; dessert; color; dog breed;
        dinosaur; movie"""
    ),
    "verb": _items(
        """sleep; fly; swim; bark; sing; bite; jump; run; hibernate; lay eggs; eat grass; drink milk; see in the
        dark; live in water; have tails; dream; cry; laugh; have wings; like music; change color; live long;
        migrate; sting"""
    ),
    "text": _items(
        """poem; story; song; letter; essay; joke; speech; haiku; riddle; recipe; report; summary; review; tweet;
        limerick; short story; love letter; business plan; rap; fairy tale; sonnet; dialogue; novel; diary
        entry; birthday card"""
    ),
    "unit": _items(
        """meters; feet; kilometers; miles; kilograms; pounds; liters; gallons; hours; minutes; seconds; days;
        euros; dollars; degrees; inches; bytes; years"""
    ),
}
"""Slot of a template -> what may stand there."""

FOREIGN = _items(
    """Wie geht es dir?; Was ist die Hauptstadt von Frankreich?; Wer bist du?; Guten Morgen; Ich heisse Peter;
    Danke; Wie spät ist es?; Erzähl mir einen Witz; Ich verstehe nicht; Wo ist der Bahnhof?; Kannst du Deutsch?;
    Auf Wiedersehen; Bonjour; Comment ça va?; Quelle est la capitale de la France?; Je ne comprends pas; Merci
    beaucoup; Qui es-tu?; Quelle heure est-il?; Parlez-vous français?; Raconte-moi une histoire; Au revoir; S'il
    vous plaît; Je suis fatigué; Hola; ¿Cómo estás?; ¿Cuál es la capital de España?; ¿Quién eres?; Buenos días;
    Gracias; No entiendo; ¿Qué hora es?; Cuéntame un chiste; ¿Dónde está la playa?; Me llamo Juan; Hasta luego;
    Buongiorno; Come stai?; Chi sei?; Grazie mille; Non capisco; Dove si trova la stazione?; Che ore sono?; Qual
    è la capitale d'Italia?; Arrivederci; Olá; Tudo bem?; Obrigado; Quem é você?; Hoe gaat het?; Wie ben jij?;
    Goedemorgen; Dank je wel; Spreek je Nederlands?; Hej; Hur mår du?; Vem är du?; Tack; God morgon; Hvordan går
    det?; Takk; Mitä kuuluu?; Kiitos; Dzień dobry; Jak się masz?; Kim jesteś?; Dziękuję; Dobrý den; Jak se máš?;
    Děkuji; Merhaba; Nasılsın?; Sen kimsin?; Teşekkürler; Привет; Как дела?; Кто ты?; Спасибо; Столица Франции?;
    Доброе утро; Γεια σου; Τι κάνεις; 你好; 你是谁?;
    谢谢; 法国的首都是哪里?; こんにちは; お元気ですか; ありがとう; 안녕하세요;
    감사합니다; नमस्ते;
    धन्यवाद; مرحبا; كيف حالك; שלום; תודה; Xin chào; Selamat pagi; Terima kasih; Salve; Quis es?; Cogito ergo
    sum; Habari; Jambo; Sveiki; Labas; Köszönöm; Szia; Bună ziua; Mulțumesc"""
)
"""Sentences in languages that the demo does not know."""

UNKNOWN_COUNTRIES = _items(
    """the Netherlands; the Czech Republic; Slovakia; Moldova; Belarus; Albania; North Macedonia; Montenegro;
    Kosovo; Cyprus; Luxembourg; Monaco; Andorra; Liechtenstein; San Marino; the United Kingdom; England;
    Scotland; Wales; the United States; the USA; America; Israel; Saudi Arabia; Kuwait; Bahrain; Afghanistan;
    Kazakhstan; Uzbekistan; Tajikistan; Kyrgyzstan; Turkmenistan; Azerbaijan; Bangladesh; Sri Lanka; Bhutan;
    Myanmar; the Philippines; Singapore; Brunei; Taiwan; South Korea; North Korea; Bolivia; Guyana; Suriname;
    Guatemala; El Salvador; the Bahamas; Barbados; Trinidad; Grenada; the Dominican Republic; Puerto Rico;
    Algeria; Mauritania; Mali; Niger; Chad; Cameroon; the Congo; Tanzania; Mozambique; Malawi; Zimbabwe;
    Botswana; South Africa; Lesotho; Eswatini; Burundi; Djibouti; Eritrea; Togo; Benin; Liberia; Sierra Leone;
    Guinea; Gambia; Burkina Faso; the Ivory Coast; Mauritius; Samoa; Tonga; Vanuatu; Papua New Guinea; Palau;
    Texas; California; Florida; Ohio; Alaska; Hawaii; Bavaria; Catalonia; Tuscany; Sicily; Brittany; Siberia;
    Quebec; Ontario; Africa; Europe; Asia; the world; the moon; Mars; Atlantis; Narnia; Mordor; Wonderland; the
    Soviet Union; Yugoslavia; Prussia; Persia; Greenland; Tibet; Hong Kong"""
)
"""Places whose capital the demo does not know; some are left out of training on purpose."""

UNKNOWN_CITIES = _items(
    """London; Amsterdam; Prague; Bratislava; Minsk; Tirana; Skopje; Nicosia; Washington; New York; Chicago; Los
    Angeles; Boston; Toronto; Sydney; Melbourne; Auckland; Munich; Hamburg; Cologne; Milan; Naples; Venice;
    Florence; Barcelona; Seville; Porto; Lyon; Marseille; Nice; Geneva; Zurich; Salzburg; Antwerp; Krakow;
    Istanbul; Jerusalem; Riyadh; Dubai; Kabul; Tashkent; Baku; Dhaka; Colombo; Manila; Singapore; Taipei; Seoul;
    Pyongyang; Mumbai; Shanghai; Osaka; Kyoto; La Paz; Georgetown; Guatemala City; Nassau; Algiers; Bamako;
    Yaounde; Kinshasa; Maputo; Harare; Gaborone; Pretoria; Cape Town; Lagos; Monrovia; Conakry; Apia; Atlantis;
    Gotham; Springfield; Rio de Janeiro; Sao Paulo; Bombay"""
)
"""Cities that the demo knows no country of."""

WISHES = _items(
    """parses JSON; reads a file; downloads a page; sorts a dictionary; prints a triangle; solves a maze; plays
    chess; opens a window; sends an email; connects to a database; computes the Fibonacci numbers; tests for
    primes; plays fizzbuzz; computes a factorial; merges two lists; counts vowels; draws a circle; translates a
    text; trains a neural network; reads a CSV file; rolls a die; shuffles a deck; finds a path in a graph;
    balances a tree; encrypts a password; makes a web server; removes duplicates; flattens a list; finds the
    median; converts miles to kilometers; writes a log"""
)
"""Tasks of Python functions that the demo cannot write."""
