"""Tasks about given records: long JSON, tables of logs, copying with a change, filtering and sorting."""

from __future__ import annotations

import json
import random
from datetime import date, timedelta
from typing import Any

from long_answers.made_task import (
    MadeTask,
    lines_check,
    make_task,
    table_check,
    table_text,
)

FIRST_NAMES = (
    "Amira", "Boris", "Carla", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Katya", "Luca", "Mira",
    "Nils", "Olga", "Pavel", "Rosa", "Sami", "Tilda", "Umar", "Vera", "Wanda", "Yusuf", "Zora",
)  # fmt: skip
LAST_NAMES = (
    "Abel", "Brandt", "Costa", "Dahl", "Eriksen", "Fischer", "Garcia", "Haas", "Ivanov", "Jansen", "Kovac", "Lind",
    "Moreau", "Novak", "Olsen", "Petit", "Quist", "Romano", "Silva", "Toth", "Urban", "Vogel", "Weiss", "Zeman",
)  # fmt: skip
GOODS = (
    "garden hose", "paint roller", "door handle", "water filter", "bike pump", "camp stove", "wool blanket",
    "desk fan", "tool box", "rain barrel", "bread tin", "wall lamp",
)  # fmt: skip


MARKED_SHARE = 0.4  # of patients who are new, and of mails with a file
TALL_CM = 100
FULL_STOCK = 120
FREE_DAYS = 20


def extraction_tasks() -> list[MadeTask]:
    """Return all tasks of the class."""
    return [*_long_json(), *_log_tables(), *_changed_copies(), *_sorted_lists()]


def _long_json() -> list[MadeTask]:
    return [_orders_json(), _visits_json(), _plants_json()]


def _json_task(name: str, prompt: str, records: list[dict[str, Any]]) -> MadeTask:
    """Return a task whose answer is a JSON array of exactly these records."""
    required = sorted(records[0])
    schema = {
        "type": "array",
        "minItems": len(records),
        "maxItems": len(records),
        "items": {
            "type": "object",
            "required": required,
            "additionalProperties": False,
            "properties": {field: {} for field in required},
        },
    }
    check = {"type": "json", "schema": schema, "values": {"": records}}
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    answer = f"```json\n[\n{lines}\n]\n```"
    return make_task(name, "extraction", prompt, check, answer)


def _orders_json() -> MadeTask:
    rng = random.Random(31)
    records: list[dict[str, Any]] = []
    sentences: list[str] = []
    for number, name in enumerate(FIRST_NAMES[:20], 1):
        item = rng.choice(GOODS)
        count = rng.randrange(1, 9)
        price = rng.randrange(4, 60)
        records.append(
            {
                "customer": name,
                "item": item,
                "count": count,
                "price": price,
                "total": count * price,
            }
        )
        wordings = (
            f"{name} ordered {count} of the {item} at {price} euros each.",
            f"For {name} we packed {count} x {item}, {price} euros a piece.",
            f"Then came {name}: {item}, {count} times, unit price {price}.",
        )
        sentences.append(wordings[number % 3])
    prompt = (
        "From the note below, make a JSON array with one object for each order, in the order of the note. Fields: "
        "customer, item, count, price (of one piece), total (count times price). Numbers as numbers. Only JSON.\n\n"
        + " ".join(sentences)
    )
    return _json_task("extraction-01", prompt, records)


def _visits_json() -> MadeTask:
    rng = random.Random(32)
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    for first, last in zip(FIRST_NAMES[:18], LAST_NAMES[:18], strict=True):
        hour = rng.randrange(8, 17)
        minute = rng.choice((0, 15, 30, 45))
        minutes = rng.choice((20, 40, 60, 90))
        is_new = rng.random() < MARKED_SHARE
        records.append(
            {
                "patient": f"{last}, {first}",
                "start": f"{hour:02}:{minute:02}",
                "minutes": minutes,
                "new": is_new,
            }
        )
        mark = "first visit" if is_new else "known to us"
        lines.append(
            f"- {first} {last}, {mark}, at {hour}.{minute:02} for {minutes} min"
        )
    prompt = (
        "Our receptionist keeps the day's appointments as free text:\n\n"
        + "\n".join(lines)
        + '\n\nPlease give them as JSON: an array of objects {"patient": "Last, First", "start": "HH:MM" with two '
        'digits each, "minutes": number, "new": true for a first visit, otherwise false}. Keep the sequence. '
        "No other keys."
    )
    return _json_task("extraction-02", prompt, records)


def _plants_json() -> MadeTask:
    rng = random.Random(33)
    plants = (
        "agave", "basil", "clover", "daisy", "elder", "fennel", "gorse", "hazel", "iris", "juniper", "kale",
        "lupin", "mint", "nettle", "oregano", "peony", "quince", "rue", "sage", "thyme",
    )  # fmt: skip
    records: list[dict[str, Any]] = []
    lines: list[str] = []
    for plant in plants:
        height = rng.randrange(15, 280)
        months = sorted(rng.sample(range(3, 11), 2))
        records.append(
            {
                "name": plant,
                "height_m": height / 100,
                "from": months[0],
                "to": months[1],
                "tall": height >= TALL_CM,
            }
        )
        lines.append(
            f"{plant.upper()}: {height} cm, blooms from month {months[0]} to month {months[1]}."
        )
    prompt = (
        "Convert this plant list to JSON for our web shop.\n\n"
        + "\n".join(lines)
        + "\n\nOne array; each plant is an object with name (small letters), height_m (height in metres, a number), "
        "from and to (months, numbers) and tall (true from 100 cm on, else false). Return nothing but the JSON."
    )
    return _json_task("extraction-03", prompt, records)


def _log_tables() -> list[MadeTask]:
    return [_machine_log(), _mail_log(), _race_table()]


def _machine_log() -> MadeTask:
    rng = random.Random(34)
    columns = ("Time", "Machine", "Event", "Code")
    rows: list[tuple[str, str, str, str]] = []
    lines: list[str] = []
    minute = 6 * 60
    for _ in range(33):
        minute += rng.randrange(3, 29)
        machine = rng.choice(("press", "oven", "mixer", "belt", "crane"))
        event = rng.choice(
            ("started", "stopped", "jammed", "was cleaned", "overheated")
        )
        code = f"{rng.choice('ABCD')}{rng.randrange(100, 999)}"
        clock = f"{minute // 60:02}:{minute % 60:02}"
        rows.append((clock, machine, event, code))
        lines.append(f"[{code}] At {clock} the {machine} {event}.")
    prompt = (
        "Turn the shift report into a Markdown table with the columns Time, Machine, Event and Code. Take the "
        "words as they "
        "stand, one row for each sentence, in the same order.\n\n" + "\n".join(lines)
    )
    return make_task(
        "extraction-04",
        "extraction",
        prompt,
        table_check(columns, rows),
        table_text(columns, rows),
    )


def _mail_log() -> MadeTask:
    rng = random.Random(35)
    columns = ("No", "Sender", "Domain", "Size in KB", "Attachment")
    rows: list[tuple[int, str, str, int, str]] = []
    lines: list[str] = []
    for number in range(1, 27):
        sender = f"{rng.choice(FIRST_NAMES)}.{rng.choice(LAST_NAMES)}".lower()
        domain = rng.choice(
            ("north.example", "harbour.example", "mill.example", "elm.example")
        )
        size = rng.randrange(2, 900)
        has_file = rng.random() < MARKED_SHARE
        rows.append((number, sender, domain, size, "yes" if has_file else "no"))
        clip = " +file" if has_file else ""
        lines.append(f"{sender}@{domain} ({size} KB){clip}")
    prompt = (
        "Here are the mails of one morning:\n\n"
        + "\n".join(lines)
        + f"\n\nI want them as a table (Markdown). Columns: {', '.join(columns)}. No counts from 1; Sender is what "
        "stands before the @, Domain what stands after it; Attachment is yes if the line ends with +file, else no."
    )
    return make_task(
        "extraction-05",
        "extraction",
        prompt,
        table_check(columns, rows),
        table_text(columns, rows),
    )


def _race_table() -> MadeTask:
    rng = random.Random(36)
    columns = ("Place", "Name", "Club", "Seconds", "Behind winner")
    runners: list[tuple[int, str, str]] = []
    seconds = 1130
    for first, last in zip(FIRST_NAMES, reversed(LAST_NAMES), strict=True):
        seconds += rng.randrange(3, 25)
        runners.append(
            (
                seconds,
                f"{first} {last}",
                rng.choice(("Harbour Harriers", "Milltown Milers", "Roadrunners")),
            )
        )
    rows = [
        (place, name, club, time_s, time_s - runners[0][0])
        for place, (time_s, name, club) in enumerate(runners, 1)
    ]
    mixed = runners.copy()
    rng.shuffle(mixed)
    listed = "\n".join(
        f"{name} ({club}) {time_s // 60}:{time_s % 60:02}"
        for time_s, name, club in mixed
    )
    prompt = (
        f"Race results as they came in, with minutes:seconds:\n\n{listed}\n\nRank all {len(rows)} runners, the "
        f"fastest first. Reply with a Markdown table: {', '.join(columns)}. Seconds is the whole time in seconds; "
        "the winner is 0 behind."
    )
    return make_task(
        "extraction-06",
        "extraction",
        prompt,
        table_check(columns, rows),
        table_text(columns, rows),
    )


def _changed_copies() -> list[MadeTask]:
    return [_dates_copy(), _names_copy(), _prices_copy()]


def _dates_copy() -> MadeTask:
    rng = random.Random(37)
    before: list[str] = []
    after: list[str] = []
    day = date(2024, 11, 3)
    for number in range(1, 57):
        day += timedelta(days=rng.randrange(1, 12))
        good = rng.choice(GOODS)
        before.append(f"{day.day}/{day.month}/{day.year} {good} no. {number}")
        after.append(f"{day.isoformat()} {good} no. {number}")
    prompt = (
        "Copy the following list exactly, but write every date as year-month-day with two digits for month and day "
        "(3/11/2024, which is day/month/year, becomes 2024-11-03). Change nothing else, and leave no line out.\n\n"
        + "\n".join(before)
    )
    return make_task(
        "extraction-07", "extraction", prompt, lines_check(after), "\n".join(after)
    )


def _names_copy() -> MadeTask:
    rng = random.Random(38)
    before: list[str] = []
    after: list[str] = []
    for number in range(1, 61):
        first = rng.choice(FIRST_NAMES)
        last = rng.choice(LAST_NAMES)
        room = rng.randrange(100, 460)
        before.append(f"{number}; {first} {last}; room {room}")
        after.append(f"{number}; {last.upper()}, {first}; room {room}")
    prompt = (
        "In this guest list the names have to be turned round: the family name first and in capitals, then a comma "
        "and the first name. So `1; Ida Beck; room 7` becomes `1; BECK, Ida; room 7`. Please return all 60 "
        "lines.\n\n" + "\n".join(before)
    )
    return make_task(
        "extraction-08", "extraction", prompt, lines_check(after), "\n".join(after)
    )


def _prices_copy() -> MadeTask:
    rng = random.Random(39)
    before: list[str] = []
    after: list[str] = []
    for shelf in range(1, 55):
        good = rng.choice(GOODS)
        price = rng.randrange(2, 120)
        before.append(f"shelf {shelf} - {good}: {price} EUR")
        after.append(f"shelf {shelf} - {good}: {price + 3} EUR")
    prompt = (
        "All our prices go up by 3 euros. Here is the old price list; write the new one with exactly the same "
        "wording and "
        "order, only with the new prices.\n\n" + "\n".join(before)
    )
    return make_task(
        "extraction-09", "extraction", prompt, lines_check(after), "\n".join(after)
    )


def _sorted_lists() -> list[MadeTask]:
    return [_low_stock(), _member_order(), _late_books()]


def _low_stock() -> MadeTask:
    rng = random.Random(40)
    colours = ("red", "blue", "green", "black", "white")
    names = [f"{colour} {good}" for good in GOODS for colour in colours]
    counts = dict(zip(names, rng.sample(range(1, 200), len(names)), strict=True))
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    low = sorted((count, name) for name, count in counts.items() if count < FULL_STOCK)
    lines = [f"{count} - {name} - order {120 - count}" for count, name in low]
    prompt = (
        f"Stock: {listed}.\n\nEverything of which there are fewer than 120 pieces has to be filled up to 120. List "
        "these articles, the smallest stock first, one a line, in the form `7 - red desk fan - order 113`. "
        "Nothing else."
    )
    return make_task(
        "extraction-10", "extraction", prompt, lines_check(lines), "\n".join(lines)
    )


def _member_order() -> MadeTask:
    rng = random.Random(41)
    years = rng.sample(range(1948, 2006), 55)
    members: list[tuple[int, str]] = []
    for position, year in enumerate(years):
        first = FIRST_NAMES[position % 24]
        last = LAST_NAMES[(position * 7 + position // 24) % 24]
        members.append((year, f"{first} {last}"))
    listed = "\n".join(f"{name}, born {year}" for year, name in members)
    lines = [f"{year}: {name} ({2025 - year})" for year, name in sorted(members)]
    prompt = (
        "Sort the members of our choir by year of birth, the oldest first, and add the age that each reaches in "
        f"2025. Lines like `1948: Ida Beck (77)`, and no other text.\n\n{listed}"
    )
    return make_task(
        "extraction-11", "extraction", prompt, lines_check(lines), "\n".join(lines)
    )


def _late_books() -> MadeTask:
    rng = random.Random(42)
    days = rng.sample(range(1, 90), 50)
    loans = [
        (late, f"book {rng.randrange(1000, 9999)}", rng.choice(FIRST_NAMES))
        for late in days
    ]
    listed = "\n".join(f"{book} / {name} / {late} days" for late, book, name in loans)
    due = sorted(
        (loan for loan in loans if loan[0] > FREE_DAYS), key=lambda loan: -loan[0]
    )
    lines = [f"{name} owes {late * 10} cents for {book}" for late, book, name in due]
    prompt = (
        "A library asks for 10 cents a day, but only if a book is more than 20 days late. From the list (book / "
        "reader / days late) write one sentence for each that has to pay, the latest first, without any "
        f"numbering, exactly so: `Ida owes 250 cents for book 1234`.\n\n{listed}"
    )
    return make_task(
        "extraction-12", "extraction", prompt, lines_check(lines), "\n".join(lines)
    )
