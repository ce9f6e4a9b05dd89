"""Tasks of writing: songs that count or grow, alphabets, and texts of which each sentence has to meet a condition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from long_answers.made_task import MadeTask, lines_check, make_task

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMBER_WORDS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen",
)  # fmt: skip
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
)  # fmt: skip


def writing_tasks() -> list[MadeTask]:
    """Return all tasks of the class."""
    return [*_counting_songs(), *_growing_songs(), *_alphabets(), *_stories()]


def _counting_songs() -> list[MadeTask]:
    return [_boats(), _lanterns(), _geese()]


def _song(name: str, prompt: str, verses: Sequence[str]) -> MadeTask:
    """Return a task of writing verses word by word."""
    answer = "\n\n".join(verses)
    check = lines_check(answer.split("\n"))
    return make_task(name, "writing", prompt, check, answer)


def _plural(count: int, noun: str) -> str:
    """Return so many things in words, from "no boats" and "one boat" on."""
    ending = "" if count == 1 else "s"
    return f"{NUMBER_WORDS[count]} {noun}{ending}"


def _boats() -> MadeTask:
    verses: list[str] = []
    for count in range(14, 0, -1):
        boats = _plural(count, "paper boat").capitalize()
        verses.append(
            f"{boats} down by the quay,\n{boats} down by the quay.\nOne sails away to look at the sea,\nleaving "
            f"{_plural(count - 1, 'paper boat')} down by the quay."
        )
    prompt = (
        "Write out the whole counting song about paper boats, from fourteen down to one. The verses are all built "
        'like the first, only the numbers change, and it is "one paper boat" but "no paper boats". The first '
        f"verse is:\n\n{verses[0]}\n\nI need all fourteen verses in full, with an empty line between them and no "
        "headings."
    )
    return _song("writing-01", prompt, verses)


def _lanterns() -> MadeTask:
    verses = [_lantern_verse(count) for count in range(15, 0, -1)]
    verses.append("No lanterns over the lane.")
    prompt = (
        "For our lantern walk I need the text of a song in which the lights go out one by one. It starts with "
        f"fifteen:\n\n{verses[0]}\n\nThe next verse has fourteen, and so on. In the verse with one lantern the "
        'last line begins with "the" instead of "a". After it comes a single line: No lanterns over the lane. '
        "Write the complete text, nothing abbreviated, verses separated by empty lines."
    )
    return _song("writing-02", prompt, verses)


def _lantern_verse(count: int) -> str:
    article = "the" if count == 1 else "a"
    return (
        f"{_plural(count, 'lantern').capitalize()} over the lane,\nglowing in wind and glowing in rain;\n"
        f"{article} small one went out and was not lit again."
    )


def _geese() -> MadeTask:
    verses: list[str] = []
    for count in range(1, 14):
        geese = "goose" if count == 1 else "geese"
        following = NUMBER_WORDS[count + 1]
        verses.append(
            f"{NUMBER_WORDS[count].capitalize()} grey {geese} on the village green,\nthe finest flock that was "
            f"ever seen.\nAlong came another, and what did we do?\nWe counted again, and there were {following}."
        )
    prompt = (
        "My class sings a song that counts geese upwards. Please type it up from one goose to thirteen geese, "
        "thirteen "
        f'verses in full. Verse 1:\n\n{verses[0]}\n\nIn verse 2 the first line is "Two grey geese on the village '
        'green," '
        'and the last ends with "there were three." Keep punctuation and line breaks as they are. Only the song.'
    )
    return _song("writing-03", prompt, verses)


def _growing_songs() -> list[MadeTask]:
    market = (
        "a broom with a silver band", "two copper kettles", "three clay whistles", "four baskets of plums",
        "five spools of thread", "six loaves of rye", "seven tin soldiers", "eight jars of honey",
        "nine woollen caps", "ten sacks of corn",
    )  # fmt: skip
    garden = (
        "a robin in the apple tree", "two sleepy toads", "three spades of earth", "four rows of beans",
        "five bees in clover", "six climbing roses", "seven drops of rain", "eight busy ants", "nine fallen pears",
        "ten yellow leaves",
    )  # fmt: skip
    ship = (
        "a captain with a wooden leg", "two lazy cats", "three coils of rope", "four patched sails",
        "five barrels of limes", "six sea charts", "seven brass bells", "eight oars of ash", "nine singing cooks",
        "ten crates of tea",
    )  # fmt: skip
    return [
        _growing_song("writing-04", "At the {} stall of the market I bought", market),
        _growing_song("writing-05", "On the {} day of spring my garden had", garden),
        _growing_song("writing-06", "On the {} night at sea we took aboard", ship),
    ]


def _growing_song(name: str, opening: str, things: Sequence[str]) -> MadeTask:
    verses: list[str] = []
    for count in range(1, len(things) + 1):
        lines = [opening.format(ORDINALS[count - 1])]
        lines += [f"{thing}," for thing in reversed(things[1:count])]
        last_joint = "and " if count > 1 else ""
        lines.append(f"{last_joint}{things[0]}.")
        verses.append("\n".join(lines))
    prompt = (
        "Write a song that grows from verse to verse, like The Twelve Days of Christmas, with these things, in "
        f"the order in which they come: {'; '.join(things)}.\n\nVerses 1 to 3 show how it goes:\n\n"
        + "\n\n".join(verses[:3])
        + f"\n\nContinue in the same way up to the {ORDINALS[len(things) - 1]}. Write out all {len(things)} verses, "
        "from the first on, each thing on a line of its own and an empty line between verses."
    )
    return _song(name, prompt, verses)


ALPHABET = (
    "acorn", "bridge", "candle", "drum", "easel", "feather", "glacier", "harbour", "inkwell", "jigsaw", "kite",
    "ladder", "mountain", "needle", "orchard", "puddle", "quarry", "river", "saddle", "thimble", "umbrella",
    "violin", "window", "xylophone", "yarn", "zipper",
)  # fmt: skip
ANIMALS = (
    "ant", "badger", "crane", "dormouse", "eel", "ferret", "goat", "heron", "ibex", "jackdaw", "kingfisher", "lynx",
    "mole", "newt", "otter", "puffin", "quail", "raven", "seal", "toad", "urchin", "viper", "weasel", "xerus",
    "yak", "zebra",
)  # fmt: skip
ENDINGS = (
    "which my grandmother kept in the kitchen drawer",
    "as quiet as snow on the roof in the morning",
    "and nobody in our street has a better one",
    "something that every child wants to draw once",
    "found behind the old mill after the flood",
)
HABITS = (
    "likes to sleep late and to get up hungry",
    "has never in its life been to the seaside",
    "keeps a secret that only the owl knows",
    "walks home slowly when the rain has stopped",
    "looks twice before it crosses the muddy road",
)


def _alphabets() -> list[MadeTask]:
    return [_primer(), _animals_backwards(), _acrostic()]


def _items_task(
    name: str,
    prompt: str,
    check: dict[str, object],
    items: Sequence[str],
    wrong_item: str,
) -> MadeTask:
    """Return a task of writing a list, whose wrong answer has another item in its middle."""
    check = {"type": "items", "count": len(items), **check}
    middle = len(items) // 2
    wrong_items = [*items[:middle], wrong_item, *items[middle + 1 :]]
    return make_task(
        name,
        "writing",
        prompt,
        check,
        "\n".join(items),
        wrong_step_answer="\n".join(wrong_items),
    )


def _primer() -> MadeTask:
    items = [
        f"{word[0].upper()} is for {word}, {ENDINGS[position % 5]}."
        for position, word in enumerate(ALPHABET)
    ]
    check = {
        "pattern": r"([A-Z]) is for (?:an? |the )?(\w+)(.*)",
        "where": "lambda letter, word, end: word[0].upper() == letter and len(end.split()) >= 6",
        "keys": [word[0].upper() for word in ALPHABET],
    }
    prompt = (
        'Write an alphabet for a picture book, one line for every letter from A to Z. Each line has the form "A '
        'is for apple, ..." (with its own letter and a word that begins with it), and after that word at least '
        "six more words that say something nice or funny about it. 26 lines, no title, nothing else."
    )
    return _items_task(
        "writing-07",
        prompt,
        check,
        items,
        "N is for cloud, which was seen over the lake on Sunday.",
    )


def _animals_backwards() -> MadeTask:
    items = [
        f"{word[0].upper()} - The {word} {HABITS[position % 5]}."
        for position, word in enumerate(reversed(ANIMALS))
    ]
    check = {
        "pattern": r"([A-Z]) [-:] The (\w+)(.*)",
        "where": "lambda letter, word, end: word[0].upper() == letter and len(end.split()) >= 7",
        "keys": [word[0].upper() for word in reversed(ANIMALS)],
    }
    prompt = (
        "I want to paint the alphabet backwards on a fence, with animals. Give me one line per letter, Z first and "
        'A last, each in this form: "Z - The zebra ..." The animal is one word that starts with the line\'s '
        "letter, and then follow at least seven words on what it does. Use a different animal for each of the 26 "
        "letters."
    )
    return _items_task(
        "writing-08",
        prompt,
        check,
        items,
        "M - The heron likes to sleep late and to get up hungry.",
    )


ACROSTIC = "EVERYLONGJOURNEYBEGINSATHOME"
ACROSTIC_LINES = {
    "A": "All the windows of the valley are dark but one that waits for us.",
    "B": "Bread and salt lie in the basket, wrapped in a blue cloth.",
    "E": "Evening comes early on the road when the leaves have fallen.",
    "G": "Gates stand open where the shepherds passed with their dogs.",
    "H": "Hills that looked near at noon are still far off at dusk.",
    "I": "In every village somebody asks us where we have been.",
    "J": "Just beyond the ford the old path turns to the north.",
    "L": "Lanterns swing from the carts that overtake us on the bridge.",
    "M": "Morning finds us with wet boots and a very good appetite.",
    "N": "Nobody told the children how long a mile can be in rain.",
    "O": "Over the pass the wind carries a smell of smoke and snow.",
    "R": "Rivers that we crossed with care sing behind us now.",
    "S": "Some of us count the steps and others count the stars.",
    "T": "Then a light moves in the doorway and we know the voice.",
    "U": "Under the chestnut tree we rest and share the last apple.",
    "V": "Voices from the inn follow us for a while, then stop.",
    "Y": "You keep the map, although both of us know the way.",
}


def _acrostic() -> MadeTask:
    items = [ACROSTIC_LINES[letter] for letter in ACROSTIC]
    check = {
        "pattern": r"(\p{L})(.*)",
        "where": "lambda letter, end: 7 <= len(end.split()) <= 20",
        "keys": list(ACROSTIC),
        "distinct": False,
    }
    prompt = (
        "Write an unrhymed acrostic poem about travelling on foot. The first letters of its lines, read downwards, "
        "spell EVERY LONG JOURNEY BEGINS AT HOME (without the blanks: 28 lines). Every line has at least 8 and at "
        "most 20 words. No empty lines, no title and no bold letters, just the 28 lines."
    )
    return _items_task(
        "writing-09",
        prompt,
        check,
        items,
        "Perhaps the ferry waits for us a little longer tonight.",
    )


SENTENCES = (
    "Nobody in the harbour had ever seen a {} as strange as the one in the first boat.",
    "Mara wrapped the {} in her scarf and carried it up the stairs of the tower.",
    "When the clock struck six, the {} was no longer where they had left it.",
    "Her brother said that a {} could never be the reason for all this trouble.",
    "The old keeper laughed and drew a {} in the dust of the window with his thumb.",
    "So they sold the {} at the market and bought bread, oil and a new rope.",
)
LIGHTHOUSE = (
    "lamp", "gull", "letter", "anchor", "blanket", "compass", "whistle", "bucket", "mirror", "candle", "feather",
    "drum", "ladder", "coin", "teapot", "ribbon", "kettle", "shell", "hammer", "basket", "bottle", "button",
    "saddle", "key",
)  # fmt: skip
TRAIN = (
    "ticket", "umbrella", "violin", "sandwich", "newspaper", "parcel", "lantern", "suitcase", "glove", "map",
    "pigeon", "camera", "cushion", "hat", "notebook", "thermos", "scarf", "trumpet", "pencil", "apple", "watch",
    "postcard",
)  # fmt: skip
GARDEN = (
    "spade", "rake", "hedge", "pond", "gate", "beetle", "pumpkin", "swing", "fence", "ladder", "robin", "shed",
    "barrow", "rose", "gnome", "bench", "hose", "cherry", "spider", "kite", "basket", "stone", "path", "tulip",
)  # fmt: skip


def _stories() -> list[MadeTask]:
    return [
        _story("writing-10", "a lighthouse keeper's daughter", LIGHTHOUSE),
        _story("writing-11", "a night train that does not stop", TRAIN),
        _story("writing-12", "two neighbours and the garden between them", GARDEN),
    ]


def _story(name: str, theme: str, words: Sequence[str]) -> MadeTask:
    items = [
        f"{number}. {SENTENCES[number % len(SENTENCES)].format(word)}"
        for number, word in enumerate(words, 1)
    ]
    check = {
        "pattern": r"((\p{Lu}|[\"']\p{Lu}).*[.!?][\"']?)",
        "where": "lambda text, first: 9 <= len(text.split()) <= 25",
        "words": list(words),
    }
    prompt = (
        f"Tell a story about {theme} in exactly {len(words)} numbered sentences. Sentence 1 has to contain the "
        f"first word of this list, sentence 2 the second, and so on, in the form given here: {', '.join(words)}.\n\n"
        "Each sentence stands on its own line, begins with its number and a full stop, and has between 9 and 25 "
        "words."
    )
    middle = len(words) // 2 + 1
    wrong_item = (
        f"{middle}. Nobody knew what else could be done about it on that long day."
    )
    return _items_task(name, prompt, check, items, wrong_item)
