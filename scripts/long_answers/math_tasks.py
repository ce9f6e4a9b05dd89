"""Tasks about numbers: tables with computed columns, and calculations of many steps."""

from __future__ import annotations

import random

from long_answers.made_task import (
    MadeTask,
    make_task,
    steps_check,
    table_check,
    table_text,
)


def math_tasks() -> list[MadeTask]:
    """Return all tasks of the class."""
    return [*_running_tables(), *_recurrences(), *_plans(), *_series()]


def _running_tables() -> list[MadeTask]:
    return [_cash_book(), _water_tank(), _value_table()]


def _cash_book() -> MadeTask:
    rng = random.Random(11)
    movements = [rng.choice((-1, 1)) * rng.randrange(15, 240) for _ in range(44)]
    columns = ("Day", "Movement", "Balance", "Lowest so far")
    rows: list[tuple[int, int, int, int]] = []
    balance = 640
    lowest = balance
    for day, movement in enumerate(movements, 1):
        balance += movement
        lowest = min(lowest, balance)
        rows.append((day, movement, balance, lowest))
    prompt = (
        "A cash book starts with a balance of 640. These are the movements of days 1 to 44, in order: "
        f"{', '.join(map(str, movements))}.\n\nMake a Markdown table with the columns {', '.join(columns)}, one "
        'row a day. "Lowest so far" is the lowest balance up to then, the 640 at the start included.'
    )
    return make_task(
        "math-01", "math", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _water_tank() -> MadeTask:
    columns = ("Hour", "In", "Out", "Litres", "Overflow")
    rows: list[tuple[int, int, int, int, int]] = []
    litres = 300
    for hour in range(1, 43):
        inflow = 20 + (hour * 13) % 37
        outflow = 15 + (hour * 9) % 31
        level = litres + inflow - outflow
        litres = min(level, 400)
        rows.append((hour, inflow, outflow, litres, level - litres))
    flows = "; ".join(f"hour {row[0]}: {row[1]} in, {row[2]} out" for row in rows)
    prompt = (
        "A tank holds at most 400 litres and has 300 in it at the beginning. In each hour water flows in and out; "
        "what would be more than 400 litres at the hour's end is overflow and is lost. Please simulate it.\n\n"
        f"{flows}\n\nAnswer with a table in Markdown: {' | '.join(columns)}. Litres is the content at the end of "
        "the hour, Overflow what was lost in that hour. No text before or after."
    )
    return make_task(
        "math-02", "math", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _value_table() -> MadeTask:
    columns = ("x", "f(x)", "g(x)", "f(x) - g(x)", "larger")
    rows: list[tuple[int, int, int, int, str]] = []
    for x in range(-20, 24):
        left = x * x - 3 * x + 7
        right = 11 * x + 40
        larger = "f" if left > right else "g"
        rows.append((x, left, right, left - right, larger))
    prompt = (
        "Let f(x) = x^2 - 3x + 7 and g(x) = 11x + 40. Tabulate both for all integers from -20 to 23 in a Markdown "
        f"table with these columns: {', '.join(columns)}. In the last column write f or g, whichever is larger "
        "there (they are never equal at an integer)."
    )
    return make_task(
        "math-03", "math", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _recurrences() -> list[MadeTask]:
    return [_congruence(), _collatz(), _pair_recurrence()]


def _congruence() -> MadeTask:
    lines: list[str] = []
    values: list[int] = []
    x = 42
    for step in range(1, 37):
        product = 17 * x + 29
        lines.append(
            f"Step {step}: 17 x {x} + 29 = {product}, {product} mod 101 = {product % 101}"
        )
        x = product % 101
        values.append(x)
    prompt = (
        "A simple random number generator works with x -> (17x + 29) mod 101. Start with x = 42 and do 36 steps. "
        "Show every step on a line of its own, in this form: `Step 1: 17 x 42 + 29 = 743, 743 mod 101 = 36`."
    )
    return make_task("math-04", "math", prompt, steps_check(values), "\n".join(lines))


def _collatz() -> MadeTask:
    lines: list[str] = []
    values: list[int] = []
    n = 871
    for step in range(1, 46):
        if n % 2:
            following = 3 * n + 1
            lines.append(f"{step}. {n} is odd: 3 x {n} + 1 = {following}")
        else:
            following = n // 2
            lines.append(f"{step}. {n} is even: {n} / 2 = {following}")
        n = following
        values.append(n)
    prompt = (
        "Take 871. If a number is even, halve it; if it is odd, triple it and add 1. Carry on like that for 45 "
        'steps, numbered, each on one line that ends with its result, for example "1. 10 is even: 10 / 2 = 5" or '
        '"2. 5 is odd: 3 x 5 + 1 = 16".'
    )
    return make_task("math-05", "math", prompt, steps_check(values), "\n".join(lines))


def _pair_recurrence() -> MadeTask:
    lines: list[str] = []
    values: list[int] = []
    previous, current = 3, 8
    for step in range(1, 39):
        total = 2 * current + previous
        lines.append(
            f"Step {step}: 2 x {current} + {previous} = {total}, last two digits = {total % 100}"
        )
        previous, current = current, total % 100
        values.append(current)
    prompt = (
        "We build a sequence: it begins with 3, 8, and each further member is twice the last member plus the one "
        "before it, of which only the last two digits are kept (as a number, so 07 is 7). Compute the next 38 "
        'members. Write one line for each: "Step 1: 2 x 8 + 3 = 19, last two digits = 19", and so on.'
    )
    return make_task("math-06", "math", prompt, steps_check(values), "\n".join(lines))


def _plans() -> list[MadeTask]:
    return [_loan(), _depreciation(), _two_accounts()]


def _loan() -> MadeTask:
    columns = ("Month", "Debt before", "Interest", "Payment", "Debt after")
    rows: list[tuple[int, int, int, int, int]] = []
    debt = 12900
    for month in range(1, 37):
        interest = debt // 100
        payment = min(380, debt + interest)
        rows.append((month, debt, interest, payment, debt + interest - payment))
        debt += interest - payment
    prompt = (
        "I borrow 12,900 euros. Each month 1 % of the debt is added as interest, rounded down to whole euros, and "
        f"then I pay 380. Show me the first 36 months as a Markdown table with the columns {', '.join(columns)}. "
        "Numbers without thousands separators and without the euro sign, please."
    )
    return make_task(
        "math-07", "math", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _depreciation() -> MadeTask:
    machines = (("press", 84000, 12), ("lathe", 56000, 10), ("kiln", 31500, 9))
    columns = ("Year", "Machine", "Value before", "Written off", "Value after")
    rows: list[tuple[int, str, int, int, int]] = []
    for name, price, years in machines:
        value = price
        for year in range(1, years + 1):
            yearly = price // years
            rows.append((year, name, value, yearly, value - yearly))
            value -= yearly
    listed = "; ".join(
        f"{name}: bought for {price}, used for {years} years"
        for name, price, years in machines
    )
    prompt = (
        f"Three machines are written off in equal yearly amounts until nothing is left. {listed}. List every year "
        "of every machine, first all years of the press, then of the lathe, then of the kiln, in one Markdown "
        f"table headed {' / '.join(columns)}. Years count from 1 for each machine."
    )
    return make_task(
        "math-08", "math", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _two_accounts() -> MadeTask:
    columns = ("Week", "Ana", "Ben", "Difference", "Together")
    rows: list[tuple[int, int, int, int, int]] = []
    ana = 120
    ben = 15
    for week in range(1, 41):
        ana += 7
        ben += 12
        if week % 6 == 0:
            ana -= 20
        rows.append((week, ana, ben, abs(ana - ben), ana + ben))
    prompt = (
        "Ana has 120 euros and saves 7 a week; after every sixth week (6, 12, 18, ...) she also spends 20. Ben "
        "has 15 and saves 12 a week. What do they have at the end of each of the next 40 weeks? Give a Markdown "
        f"table: {', '.join(columns)}. The difference is never negative."
    )
    return make_task(
        "math-09", "math", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _series() -> list[MadeTask]:
    return [_selection_sort(), _factorisations(), _binary_numbers()]


def _selection_sort() -> MadeTask:
    rng = random.Random(20)
    numbers = rng.sample(range(10, 99), 19)
    listed = ", ".join(map(str, numbers))
    states: list[str] = []
    for place in range(len(numbers) - 1):
        smallest = numbers.index(min(numbers[place:]))
        numbers[place], numbers[smallest] = numbers[smallest], numbers[place]
        states.append(", ".join(map(str, numbers)))
    lines = [f"Step {step}: {state}" for step, state in enumerate(states, 1)]
    prompt = (
        f"Sort this list by selection sort: {listed}.\n\nIn step k the smallest number from place k on is swapped "
        "with the number at place k (if it is there already, nothing changes). There are 18 steps. After each, "
        'write the complete list on one line as "Step k: 12, 34, ..." and nothing else.'
    )
    return make_task("math-10", "math", prompt, steps_check(states), "\n".join(lines))


def _prime_factors(number: int) -> list[int]:
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def _factorisations() -> MadeTask:
    numbers = [2 * n for n in range(90, 144)]
    products = [" x ".join(map(str, _prime_factors(number))) for number in numbers]
    lines = [
        f"{step}. {number} = {product}"
        for step, (number, product) in enumerate(zip(numbers, products, strict=True), 1)
    ]
    prompt = (
        "Write all even numbers from 180 to 286 as products of primes, the smallest prime first and repeated "
        'primes repeated. A numbered list, a number a line, for example "1. 180 = 2 x 2 x 3 x 3 x 5". The list '
        "has 54 lines."
    )
    return make_task("math-11", "math", prompt, steps_check(products), "\n".join(lines))


def _binary_numbers() -> MadeTask:
    numbers = [(n * 83) % 251 + 4 for n in range(1, 33)]
    lines: list[str] = []
    codes: list[str] = []
    for step, number in enumerate(numbers, 1):
        powers = [2**bit for bit in range(7, -1, -1) if number & 2**bit]
        codes.append(f"{number:08b}")
        lines.append(
            f"Step {step}: {number} = {' + '.join(map(str, powers))} = {number:08b}"
        )
    prompt = (
        "Convert these numbers to binary with eight digits each, and show how each is made of powers of two:\n"
        f'{", ".join(map(str, numbers))}\n\nUse one line for each, numbered, in the form "Step 1: 37 = 32 + 4 + 1 '
        '= 00100101". Work through them in the given order.'
    )
    return make_task("math-12", "math", prompt, steps_check(codes), "\n".join(lines))
