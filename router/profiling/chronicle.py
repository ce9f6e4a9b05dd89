"""Writes a chronicle of a made-up harbour town, of any length, with sentences put in at given depths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

NAMES = (
    "Alwin", "Berta", "Cosmo", "Delia", "Edgar", "Frida", "Gustav", "Helga", "Ismael", "Jolanda", "Konrad",
    "Ludmila", "Marek", "Nadia", "Oswald", "Paula", "Quentin", "Renata", "Silas", "Tamara", "Ulrich", "Viola",
    "Walter", "Xenia", "Yannick", "Zelda",
)  # fmt: skip
FAMILIES = (
    "Ambrose", "Birk", "Corvin", "Drake", "Ellery", "Finch", "Garrow", "Holm", "Ingram", "Jessop", "Keller",
    "Lorimer", "Marlow", "Norling", "Osgood", "Pell", "Rask", "Sorrel", "Thorne", "Usher", "Varley", "Wick",
)  # fmt: skip
DISTRICTS = (
    "Netherby", "Saltmarsh", "Old Quay", "Crane Hill", "Fishergate", "Windmill End", "Gullhaven", "Lower Strand",
    "Ropewalk", "Chapel Green", "Easter Cove", "Millbrook",
)  # fmt: skip
LOCKED_THINGS = (
    "boathouse", "cellar", "pump house", "granary", "coal shed", "lime kiln", "smokehouse", "sail loft",
    "ice house", "stable", "tannery", "watchtower",
)  # fmt: skip
LOST_THINGS = (
    "umbrella", "pocket watch", "walking stick", "leather purse", "tin whistle", "straw hat", "spyglass",
    "prayer book", "wool scarf", "brass button", "hand mirror", "chess knight", "bird cage", "music box",
    "paint brush", "riding glove", "sewing box", "snuff tin",
)  # fmt: skip
COLOURS = ("red", "green", "yellow", "white", "brown", "grey")

_TRADES = (
    "baker", "cooper", "net maker", "schoolteacher", "midwife", "lamplighter", "clockmaker", "gardener", "pilot",
    "carpenter", "cobbler", "innkeeper", "weaver", "doctor", "mason", "postman", "beekeeper", "printer", "glazier",
    "shepherd",
)  # fmt: skip
_GOODS = (
    "barley", "herring", "timber", "wool", "candles", "cider", "slate", "onions", "rope", "cheese", "apples",
    "lamp oil", "linen", "honey", "clay pipes", "turnips", "hides", "tar", "oats", "paper",
)  # fmt: skip
_WEATHER = (
    "a thin rain fell until noon", "the wind turned to the west", "it was so still that smoke rose straight up",
    "frost lay on the roofs", "clouds came in from the sea without bringing anything",
    "the sun broke through in the afternoon", "hail knocked at the windows for a short while",
    "the air smelled of snow", "a warm wind dried the streets", "thunder was heard far away",
    "the sea was as grey as the sky", "the evening was long and clear",
)  # fmt: skip
_ANIMALS = (
    "goat", "donkey", "heron", "seal", "cat", "badger", "hen", "swan", "mule", "hedgehog", "crow", "pony", "goose",
    "fox",
)  # fmt: skip
_MOODS = (
    "with some pride", "not without complaint", "in a low voice", "as if it were nothing", "to everyone's surprise",
    "after much thought", "with a glance at the door", "rather sooner than promised", "in the best of tempers",
    "against the advice of the neighbours", "for the third time this year", "without a word of thanks",
)  # fmt: skip
_SENTENCES = (
    "The {trade} {name} {family} told {name2}, {mood}, that {goods} had never been so dear in {district}.",
    "A cart with {goods} lost a wheel in {district}, and half of the {family} family ran to help.",
    "{name} {family} sold two sacks of {goods} to the {trade} from {district} and bought {goods2} in return.",
    "The children of {district} followed a {animal} through the lanes until the {trade} led it home.",
    "{name} and {name2} argued about a fence in {district}; the {trade} was asked to judge, and did so {mood}.",
    "In {district} a chimney caught fire, but the {trade} had a ladder at hand and no harm came of it.",
    "The {family} sisters opened a stall for {goods} near {district}, {mood}.",
    "{name} {family}, the {trade}, has taken {name2} as an apprentice, {mood}.",
    "Nobody could say whose {animal} it was that slept in front of the {trade}'s door in {district}.",
    "The council spoke about the drains of {district}; {name} {family} asked for patience, {mood}.",
    "A letter from abroad reached the {trade} in {district}, and {name} read it out while {name2} counted {goods}.",
    "The road between {district} and {district2} was mended with gravel, which {name} {family} paid for {mood}.",
    "Old {name} {family} remembered a winter in which {goods} came over the ice to {district}.",
    "The {trade} of {district} planted a pear tree where the {family} barn had stood.",
    "{name} lost a wager against {name2} and had to carry {goods} up to {district} on one shoulder.",
    "There was dancing in {district}, and the {trade} played the fiddle {mood}.",
    "A stranger asked the way to {district}; the {trade} {name} {family} walked with him as far as the bridge.",
    "For the sick {name} {family} the neighbours in {district} collected {goods} and {goods2}.",
    "The {animal} of the {trade} got into the {goods} again, and {name2} laughed until it hurt.",
    "{name} {family} has painted the shutters of the house in {district}, {mood}, in a colour of {name2}'s choice.",
    "The price of {goods} was written on the wall of the market hall in {district}, that of {goods2} was not.",
    "Two boats came in with {goods}; {name} {family} took the first load and the {trade} from {district} the second.",
    "At the well of {district} {name} told the story of the {animal} and the {trade}, and {name2} did not believe it.",
    "The school in {district} was closed for a day because the {trade} {name} {family} whitewashed the walls.",
    "{name} found a bottle on the beach below {district}, empty, and gave it to the {trade}.",
    "The {family} family moved from {district} to {district2} with eleven chairs, a {animal} and all their {goods}.",
    "It was decided, {mood}, that the lamps in {district} burn until midnight; {name} {family} lights them.",
    "The {trade} weighed the {goods} of {name} {family} twice and found both times that something was missing.",
)  # fmt: skip
_DAY_OPENINGS = (
    "On day {day} {weather}.",
    "Day {day}: {weather}.",
    "Entry {day} of the year. In the morning {weather}.",
    "Day {day}. Of the weather there is to say that {weather}.",
)
_NOTICE_LINES = (
    "The {trade} {name} {family} gives notice to all who live in {district}:",
    "From the first Monday of the month no {goods} may be stored under the arches.",
    "Whoever owns the {colour} cart beside the well is asked to take it away by Friday.",
    "A reward of {count} crowns is offered for the {animal} that was last seen near {district}.",
    "Lessons in the making of {goods} are held on Thursdays after the evening meal.",
    "Bring a lantern, a stool and {count} sheets of paper of your own.",
    "Complaints are heard by {name2} {family} between breakfast and noon.",
    "The path to {district} stays closed until the {colour} bridge has been mended.",
)


@dataclass(frozen=True, slots=True)
class Insertion:
    """A text to be put into a chronicle.

    Attributes:
        depth: Where, as a share of the chronicle from 0 to 1.
        text: What.
        is_paragraph: Whether it stands alone, and not within a paragraph.
    """

    depth: float
    text: str
    is_paragraph: bool = False


def chronicle(rng: random.Random, chars: int, insertions: Sequence[Insertion]) -> str:
    """Return a chronicle with all insertions, of at most ``chars`` characters if it has more days than one."""
    inserted_chars = sum(len(insertion.text) + 2 for insertion in insertions)
    paragraphs: list[list[str]] = []
    room = chars - inserted_chars
    day = 1
    while room > 0:
        paragraph = _paragraph(rng, day)
        room -= len(" ".join(paragraph)) + 2
        day += 1
        if room >= 0 or not paragraphs:
            paragraphs.append(paragraph)
    texts = _with_insertions(paragraphs, insertions)
    return "\n\n".join(texts)


def _paragraph(rng: random.Random, day: int) -> list[str]:
    """Return the sentences of a day."""
    opening = rng.choice(_DAY_OPENINGS).format(day=day, weather=rng.choice(_WEATHER))
    templates = rng.sample(_SENTENCES, rng.randrange(3, 7))
    return [opening, *(_filled(rng, template) for template in templates)]


def _filled(rng: random.Random, template: str) -> str:
    """Return a sentence with words in its places; those of one kind differ."""
    name, name2 = rng.sample(NAMES, 2)
    goods, goods2 = rng.sample(_GOODS, 2)
    district, district2 = rng.sample(DISTRICTS, 2)
    return template.format(
        name=name,
        name2=name2,
        goods=goods,
        goods2=goods2,
        district=district,
        district2=district2,
        family=rng.choice(FAMILIES),
        trade=rng.choice(_TRADES),
        animal=rng.choice(_ANIMALS),
        mood=rng.choice(_MOODS),
        colour=rng.choice(COLOURS),
        count=rng.randrange(12, 90),
    )


def _with_insertions(
    paragraphs: Sequence[Sequence[str]],
    insertions: Sequence[Insertion],
) -> list[str]:
    """Return the paragraphs with the insertions at their depths, in the order of their depths."""
    filled = [list(paragraph) for paragraph in paragraphs]
    after: list[list[str]] = [[] for _ in paragraphs]
    for insertion in sorted(insertions, key=lambda insertion: insertion.depth):
        position = min(int(insertion.depth * len(filled)), len(filled) - 1)
        if insertion.is_paragraph:
            after[position].append(insertion.text)
        else:
            filled[position].append(insertion.text)
    texts: list[str] = []
    for sentences, standing_alone in zip(filled, after, strict=True):
        texts.append(" ".join(sentences))
        texts += standing_alone
    return texts


def notice_lines(rng: random.Random) -> tuple[str, ...]:
    """Return the lines of a notice, different each time."""
    first, *others = _NOTICE_LINES
    chosen = rng.sample(others, 5)
    return tuple(_filled(rng, template) for template in (first, *chosen))
