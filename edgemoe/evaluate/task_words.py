"""Facts and words of the chat tasks: capitals, words to spell, names, things and Python functions."""

from __future__ import annotations


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    rows = (row.split(":") for row in text.replace("\n", " ").split(";"))
    return tuple((country.strip(), city.strip()) for country, city in rows)


CAPITALS = _pairs(
    """France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Austria: Vienna; Greece: Athens;
    Poland: Warsaw; Hungary: Budapest; Sweden: Stockholm; Norway: Oslo; Denmark: Copenhagen; Finland: Helsinki;
    Ireland: Dublin; Iceland: Reykjavik; Belgium: Brussels; Switzerland: Bern; Romania: Bucharest; Bulgaria: Sofia;
    Serbia: Belgrade; Croatia: Zagreb; Ukraine: Kyiv; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius;
    Turkey: Ankara; Russia: Moscow; Egypt: Cairo; Morocco: Rabat; Tunisia: Tunis; Kenya: Nairobi; Ghana: Accra;
    Ethiopia: Addis Ababa; Uganda: Kampala; Senegal: Dakar; Nigeria: Abuja; Zambia: Lusaka; Angola: Luanda;
    Sudan: Khartoum; Libya: Tripoli; Somalia: Mogadishu; Rwanda: Kigali; China: Beijing; Japan: Tokyo; India: Delhi;
    Pakistan: Islamabad; Nepal: Kathmandu; Thailand: Bangkok; Vietnam: Hanoi; Indonesia: Jakarta;
    Malaysia: Kuala Lumpur; Cambodia: Phnom Penh; Mongolia: Ulaanbaatar; Iran: Tehran; Iraq: Baghdad;
    Syria: Damascus; Lebanon: Beirut; Jordan: Amman; Yemen: Sanaa; Qatar: Doha; Oman: Muscat;
    Georgia: Tbilisi; Armenia: Yerevan; Canada: Ottawa;
    Mexico: Mexico City; Cuba: Havana; Jamaica: Kingston; Haiti: Port-au-Prince; Panama: Panama City;
    Costa Rica: San Jose; Honduras: Tegucigalpa; Nicaragua: Managua; Colombia: Bogota; Venezuela: Caracas;
    Ecuador: Quito; Peru: Lima; Chile: Santiago; Argentina: Buenos Aires; Uruguay: Montevideo; Paraguay: Asuncion;
    Brazil: Brasilia; Australia: Canberra; New Zealand: Wellington; Fiji: Suva"""
)
"""(country, capital) pairs; no two countries share a capital's name."""

WORDS = _names(
    """apple arrow autumn baker basket beach bird black blood board boat bottle bread bridge brother brown butter candle
    carpet castle chair cheese child church circle city clock cloud coffee cold copper corner cotton cousin cow crown
    dance daughter desert dinner doctor dog door dragon dream dress dust eagle earth east engine evening face farmer
    father feather field finger fire fish flag floor flower foot forest fox friend fruit garden gate ghost giant girl
    glass gold grain grass green guest guitar hammer hand harbor hat heart honey horse hotel house hunter island iron
    jacket jewel journey judge jungle king kitchen knife ladder lake lamp leaf lemon letter light lion map market
    meadow metal milk mirror money monkey moon morning mother mountain mouse music needle nest night north number ocean
    office orange owl paint palace paper parrot pencil people pepper picture pilot planet plant pocket poem potato
    prince queen rabbit rain ribbon river road robot rocket rose sailor salt sand school sea shadow sheep ship shirt
    silver sister sky smoke snake snow soldier song south spider spoon spring star station stone storm street sugar
    summer sun table teacher thunder tiger tower town train tree turtle uncle valley village violin wagon wall water
    west wheel wind window winter wolf woman wood world yellow"""
)
"""Words to spell and to reverse."""

NAMES = _names("Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mary Nora Oscar Paul")
THINGS = _names("apples books coins cards eggs pens stones stamps shells cups keys balls")

FUNCTIONS = (
    ("add", "a, b", "returns the sum of a and b", "a + b"),
    ("subtract", "a, b", "returns a minus b", "a - b"),
    ("multiply", "a, b", "returns the product of a and b", "a * b"),
    ("divide", "a, b", "returns a divided by b", "a / b"),
    ("square", "x", "returns the square of x", "x * x"),
    ("cube", "x", "returns the cube of x", "x * x * x"),
    ("double", "x", "returns twice x", "2 * x"),
    ("half", "x", "returns half of x", "x / 2"),
    ("negate", "x", "returns x with its sign changed", "-x"),
    ("is_even", "n", "tells whether n is even", "n % 2 == 0"),
    ("is_odd", "n", "tells whether n is odd", "n % 2 == 1"),
    ("is_positive", "x", "tells whether x is above zero", "x > 0"),
    ("is_negative", "x", "tells whether x is below zero", "x < 0"),
    ("is_empty", "items", "tells whether a list is empty", "len(items) == 0"),
    ("first", "items", "returns the first item of a list", "items[0]"),
    ("last", "items", "returns the last item of a list", "items[-1]"),
    ("count", "items", "returns the length of a list", "len(items)"),
    ("total", "items", "returns the sum of a list", "sum(items)"),
    ("largest", "items", "returns the largest item of a list", "max(items)"),
    ("smallest", "items", "returns the smallest item of a list", "min(items)"),
    ("mean", "items", "returns the mean of a list", "sum(items) / len(items)"),
    ("ordered", "items", "returns a list in rising order", "sorted(items)"),
    ("unique", "items", "returns the set of a list's items", "set(items)"),
    ("backwards", "text", "returns a text reversed", "text[::-1]"),
    ("upper", "text", "returns a text in capital letters", "text.upper()"),
    ("lower", "text", "returns a text in small letters", "text.lower()"),
    ("words", "text", "returns the words of a text", "text.split()"),
    ("lines", "text", "returns the lines of a text", "text.splitlines()"),
    ("larger", "a, b", "returns the larger of a and b", "max(a, b)"),
    ("smaller", "a, b", "returns the smaller of a and b", "min(a, b)"),
    ("area", "width, height", "returns the area of a rectangle", "width * height"),
    ("distance", "a, b", "returns the distance between a and b", "abs(a - b)"),
)
"""(name, parameters, description, expression) of two-line functions."""

STEPS = tuple(
    (f"{verb}_{n}", "x", wish.format(n=n), f"x {sign} {n}")
    for n in range(2, 21)
    for verb, wish, sign in (
        ("add", "adds {n} to x", "+"),
        ("minus", "subtracts {n} from x", "-"),
        ("times", "multiplies x by {n}", "*"),
        ("above", "tells whether x is above {n}", ">"),
    )
)
"""Functions as in FUNCTIONS, with a number in name and expression."""
