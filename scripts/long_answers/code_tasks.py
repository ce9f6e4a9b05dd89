"""Tasks about code: outputs, programs of many functions, statements by a table, code with one rule applied."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from long_answers.made_task import MadeTask, lines_check, make_task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROGRAMS = Path(__file__).with_name("programs")


def code_tasks() -> list[MadeTask]:
    """Return all tasks of the class."""
    return [*_traces(), *_programs(), *_statements(), *_rewritten_code()]


# Outputs of programs.

TURNSTILE = """\
inside = 40
for minute in range(1, 49):
    entering = (minute * 7) % 11
    leaving = (minute * 5) % 9
    inside = inside + entering - leaving
    print(f"minute {minute}: +{entering} -{leaving} inside={inside}")
"""
SHELF = """\
names = ["bolt", "nut", "washer", "screw", "hinge", "clamp"]
stock = {name: 20 for name in names}
for day in range(1, 66):
    name = names[(day * day) % 6]
    stock[name] -= day % 7
    note = "ok"
    if stock[name] < 10:
        stock[name] += 15
        note = "refilled"
    print("day", day, name, stock[name], note)
"""
MACHINE = """\
stack = [3, 5]
for step in range(1, 46):
    if step % 3 == 0:
        right = stack.pop()
        left = stack.pop()
        stack.append((left + 2 * right) % 50)
    else:
        stack.append((stack[-1] + step) % 30)
    print(f"step {step}: depth {len(stack)}, top {stack[-1]}, sum {sum(stack)}")
"""
TRACES = (
    (
        TURNSTILE,
        (
            "Without running anything: what exactly does this script print? Give me the whole output, line by "
            "line, and nothing else."
        ),
    ),
    (
        SHELF,
        (
            "I lost the log of this little stock simulation and cannot run it here. Please write down its complete "
            "output in a code block, every line of it."
        ),
    ),
    (
        MACHINE,
        (
            "Act as the Python interpreter. Here is a program; reply with its standard output only, all lines, no "
            "comments."
        ),
    ),
)


def _traces() -> list[MadeTask]:
    tasks: list[MadeTask] = []
    for number, (source, request) in enumerate(TRACES, 1):
        output = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, check=True
        ).stdout.strip()
        prompt = f"{request}\n\n```python\n{source}```"
        check = lines_check(output.split("\n"))
        answer = f"```\n{output}\n```"
        tasks.append(make_task(f"code-{number:02}", "code", prompt, check, answer))
    return tasks


# Programs of many functions; the right programs are files.


@dataclass(frozen=True, slots=True)
class ProgramTask:
    """A program of several functions.

    Attributes:
        name: Of the files with the prompt and with a right program.
        wrong_old: A part of the right program, of a function in its middle.
        wrong_new: The part that makes it wrong.
        calls: Arguments to try each function with.
    """

    name: str
    wrong_old: str
    wrong_new: str
    calls: dict[str, list[list[Any]]]


KITCHEN = ProgramTask(
    name="kitchen",
    wrong_old="wanted / servings",
    wrong_new="servings / wanted",
    calls={
        "celsius_to_fahrenheit": [[180], [37.7]],
        "fahrenheit_to_celsius": [[350], [-40]],
        "cups_to_millilitres": [[2.5]],
        "ounces_to_grams": [[3], [7.5]],
        "scale": [[{"flour": 300, "salt": 5}, 4, 6], [{"rice": 90}, 1, 3]],
        "oven_minutes": [[1800, 25], [1000, 30], [1, 20]],
        "clock_after": [[18, 45, 20], [23, 50, 75]],
        "shopping_list": [[[{"egg": 2, "milk": 100}, {"egg": 1, "leek": 3}]], [[]]],
        "missing": [[{"egg": 3, "oil": 1, "bay": 2}, {"egg": 3, "oil": 0.5}]],
        "cost": [[{"egg": 6, "milk": 2, "salt": 1}, {"egg": 0.35, "milk": 1.19}]],
    },
)
WORDS = ProgramTask(
    name="words",
    wrong_old="runs.append([character, 1])",
    wrong_new="runs.append([character, 0])",
    calls={
        "is_palindrome": [["Never odd, or even!"], ["palindrome"]],
        "vowels": [["Onomatopoeia"], ["rhythm"]],
        "title_case": [["the long WAY home"]],
        "acronym": [["as soon as possible"]],
        "caesar": [["Hello, Zoe!", 3], ["abc", -1]],
        "run_lengths": [["aaabcc"], [""]],
        "expand": [[[["a", 3], ["b", 1]]]],
        "most_common": [["Banana bread"], ["zyzy"]],
        "wrap": [["the quick brown fox jumps over it", 10], ["one", 5]],
        "is_anagram": [["Dormitory", "dirty room"], ["apple", "papel e"]],
        "snake": [["someLongName"], ["plain"]],
    },
)
LEDGER = ProgramTask(
    name="ledger",
    wrong_old="total += entry",
    wrong_new="total -= entry",
    calls={
        "balance": [["ENTRIES"], [[]]],
        "by_account": [["ENTRIES"]],
        "by_month": [["ENTRIES"]],
        "largest_expense": [["ENTRIES"], [[]]],
        "running": [["ENTRIES"]],
        "overdrawn": [["ENTRIES"]],
        "euros": [[-1205], [40], [123456]],
        "statement": [["ENTRIES"]],
        "transfer": [["ENTRIES", "cash", "bank", 500, "2025-05-02"]],
        "split": [[1000, 3], [7, 7]],
    },
)
ENTRIES = [
    {"date": "2025-03-09", "account": "cash", "cents": 5000},
    {"date": "2025-03-30", "account": "rent", "cents": -7250},
    {"date": "2025-04-02", "account": "cash", "cents": -305},
    {"date": "2025-04-11", "account": "bank", "cents": 9999},
]


def _programs() -> list[MadeTask]:
    tasks: list[MadeTask] = []
    for number, program in enumerate((KITCHEN, WORDS, LEDGER), 4):
        prompt = (PROGRAMS / f"{program.name}-prompt.txt").read_text("utf-8").strip()
        source = (PROGRAMS / f"{program.name}.txt").read_text("utf-8").strip()
        check = {"type": "program", "functions": _cases(source, program.calls)}
        answer = f"```python\n{source}\n```"
        wrong_answer = answer.replace(program.wrong_old, program.wrong_new)
        tasks.append(
            make_task(
                f"code-{number:02}",
                "code",
                prompt,
                check,
                answer,
                wrong_step_answer=wrong_answer,
            )
        )
    return tasks


def _cases(source: str, calls: dict[str, list[list[Any]]]) -> dict[str, list[Any]]:
    """Return what each function of a program of ours returns for its arguments, as cases of a check."""
    names: dict[str, Callable[..., Any]] = {}
    exec(compile(source, "program", "exec"), names)  # noqa: S102  our own file
    cases: dict[str, list[Any]] = {}
    for function, arguments_of_calls in calls.items():
        cases[function] = []
        for arguments in arguments_of_calls:
            given = [ENTRIES if value == "ENTRIES" else value for value in arguments]
            cases[function].append([given, names[function](*given)])
    return cases


# Statements by a table.

PRODUCTS = (
    "Alder stool", "Birch table", "Cedar chest", "Desk lamp", "Elm bench", "Fern pot", "Glass vase", "Hat stand",
    "Iron hook", "Jute rug", "Kettle", "Linen cloth", "Mirror", "Night stand", "Oak shelf", "Pine bed", "Quilt",
    "Rattan chair", "Sofa", "Tea tray", "Umbrella rack", "Velvet cushion", "Wall clock", "Yew bowl",
)  # fmt: skip
CITIES = (
    "Aachen", "Bergen", "Cadiz", "Delft", "Evora", "Ferrara", "Ghent", "Haarlem", "Innsbruck", "Jena", "Krakow",
    "Lille", "Malmo", "Nantes", "Odense", "Porto", "Quimper", "Riga", "Siena", "Tartu", "Utrecht", "Verona",
    "Worms", "Zadar",
)  # fmt: skip


def _statements() -> list[MadeTask]:
    return [_sql_statements(), _typescript_entries(), _html_rows()]


def _sql_statements() -> MadeTask:
    rng = random.Random(71)
    rows = [(name, rng.randrange(400, 9000, 5), rng.randrange(40)) for name in PRODUCTS]
    listed = "\n".join(
        f"{name}; {cents / 100:.2f}; {count}" for name, cents, count in rows
    )
    prompt = (
        "The table `products` has the columns id, name, price_cents, in_stock. Turn this list (name; price in "
        "euros; pieces in stock) into INSERT statements, one a line, ids from 101 on in the order of the list. "
        "`in_stock` is TRUE or FALSE. The first one should look exactly like this, and so should all others:\n\n"
        f"{_sql_line(101, *rows[0])}\n\n{listed}\n\nReply with the {len(rows)} statements and nothing else."
    )
    lines = [_sql_line(number, *row) for number, row in enumerate(rows, 101)]
    answer = "```sql\n" + "\n".join(lines) + "\n```"
    return make_task("code-07", "code", prompt, lines_check(lines), answer)


def _sql_line(number: int, name: str, cents: int, count: int) -> str:
    in_stock = "TRUE" if count else "FALSE"
    values = f"{number}, '{name}', {cents}, {in_stock}"
    return f"INSERT INTO products (id, name, price_cents, in_stock) VALUES ({values});"  # noqa: S608  never run


def _typescript_entries() -> MadeTask:
    rng = random.Random(72)
    rows = [(city, rng.randrange(1, 60), rng.randrange(2, 18)) for city in CITIES]
    listed = "\n".join(f"{city}\t{hours}\t{wage}" for city, hours, wage in rows)
    prompt = (
        "Please convert the columns city, hours and euros per hour into a TypeScript array, one object a line, "
        "with the total computed. Key is the city in capitals. I need it in exactly this form, with the same "
        "spaces:\n\n"
        "```typescript\nexport const jobs = [\n"
        '  { key: "ROME", city: "Rome", hours: 3, rate: 10, total: 30 },\n];\n```\n\n'
        f"{listed}\n\nDo not leave out any city, and keep their order."
    )
    lines = ["export const jobs = ["]
    for city, hours, wage in rows:
        lines.append(
            f'  {{ key: "{city.upper()}", city: "{city}", hours: {hours}, rate: {wage}, total: {hours * wage} }},'
        )
    lines.append("];")
    answer = "```typescript\n" + "\n".join(lines) + "\n```"
    return make_task("code-08", "code", prompt, lines_check(lines), answer)


def _html_rows() -> MadeTask:
    rng = random.Random(73)
    rows = [(name, rng.randrange(3, 90), rng.randrange(1, 9)) for name in PRODUCTS]
    listed = ", ".join(f"{name} {price} x {count}" for name, price, count in rows)
    prompt = (
        "For an order page I need HTML table rows. Each item below is a name, a price and a count. Every row is "
        'one line: class "odd" for the 1st, 3rd, 5th and so on, class "even" for the others; the cells are '
        "name, price, count and price times count. Example for an item in 1st place: <tr "
        f'class="odd"><td>Pen</td><td>2</td><td>5</td><td>10</td></tr>\n\nItems: {listed}.\n\nOnly the rows, '
        "without table or body around them."
    )
    lines: list[str] = []
    for position, (name, price, count) in enumerate(rows):
        parity = ("odd", "even")[position % 2]
        lines.append(
            f'<tr class="{parity}"><td>{name}</td><td>{price}</td><td>{count}</td><td>{price * count}</td></tr>'
        )
    answer = "```html\n" + "\n".join(lines) + "\n```"
    return make_task("code-09", "code", prompt, lines_check(lines), answer)


# Code with one rule applied.

SETTINGS = (
    "server host", "server port", "server backlog", "server tls enabled", "server tls min version", "cache size mb",
    "cache ttl seconds", "cache eviction", "db pool size", "db pool timeout", "db retry limit", "db ssl mode",
    "log level", "log format", "log rotate mb", "log keep files", "mail sender", "mail batch size",
    "mail retry minutes", "queue name", "queue workers", "queue max length", "queue dead letter", "search index",
    "search page size", "search fuzzy", "search timeout ms", "session cookie", "session minutes",
    "session same site", "upload max mb", "upload folder", "upload scan virus", "report hour", "report zone",
    "report recipients", "feature dark mode", "feature beta search", "feature export csv", "limit per minute",
    "limit burst", "limit ban minutes",
)  # fmt: skip
VALUES = ("on", "off", "8", "15", "64", "250", "main", "strict", "30", "off", "1024")


def _camel(words: Sequence[str]) -> str:
    return words[0] + "".join(word.capitalize() for word in words[1:])


def _rewritten_code() -> list[MadeTask]:
    return [_environment_lines(), _camel_getters(), _numbered_tests()]


def _setting_values() -> list[tuple[list[str], str]]:
    return [
        (name.split(), VALUES[position * 7 % len(VALUES)])
        for position, name in enumerate(SETTINGS)
    ]


def _environment_lines() -> MadeTask:
    before: list[str] = []
    after: list[str] = []
    for words, value in _setting_values():
        before.append(f"{'.'.join(words)} = {value}")
        after.append(f'export APP_{"_".join(words).upper()}="{value}"')
    prompt = (
        "Rewrite this properties file as a shell script: each line `a.b.c = value` becomes `export "
        'APP_A_B_C="value"`. Keep all lines and their order.\n\n```\n'
        + "\n".join(before)
        + "\n```\n\nJust the script, please, without a first line that names the shell."
    )
    answer = "```bash\n" + "\n".join(after) + "\n```"
    return make_task("code-10", "code", prompt, lines_check(after), answer)


def _camel_getters() -> MadeTask:
    before: list[str] = []
    after: list[str] = []
    for words, value in _setting_values()[:36]:
        name = "_".join(words)
        before.append(f'{name} = read("{name}", "{value}")')
        after.append(f'const {_camel(words)} = config.get("{name}") ?? "{value}";')
    prompt = (
        "I port a settings module from Python to JavaScript. One rule for every line: `first_name = "
        'read("first_name", "x")` becomes `const firstName = config.get("first_name") ?? "x";`. The name '
        "turns into camel case, the key in quotes stays. Here is the Python:\n\n```python\n"
        + "\n".join(before)
        + "\n```\n\nReply with the JavaScript lines in the same order, no explanation."
    )
    answer = "```javascript\n" + "\n".join(after) + "\n```"
    return make_task("code-11", "code", prompt, lines_check(after), answer)


def _numbered_tests() -> MadeTask:
    rng = random.Random(76)
    before: list[str] = []
    after: list[str] = []
    for _ in range(40):
        left = rng.randrange(2, 40)
        right = rng.randrange(2, 40)
        before.append(f"assert total({left}, {right}) == {left + right}")
        after.append(
            f"self.assertEqual(total({right}, {left}, start=10), {left + right + 10})"
        )
    prompt = (
        "Our function `total(a, b)` got a keyword argument `start`, and we move from pytest to unittest. Change "
        "every line below so: `assert total(a, b) == s` becomes `self.assertEqual(total(b, a, start=10), s + 10)`, "
        "with the arguments swapped and the sum written as a number.\n\n```python\n"
        + "\n".join(before)
        + "\n```\n\nGive all 40 lines without indentation."
    )
    answer = "```python\n" + "\n".join(after) + "\n```"
    return make_task("code-12", "code", prompt, lines_check(after), answer)
