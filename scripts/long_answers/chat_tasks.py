"""Tasks of everyday talk: rotas, plans, savings and timetables."""

from __future__ import annotations

from long_answers.made_task import (
    MadeTask,
    lines_check,
    make_task,
    steps_check,
    table_check,
    table_text,
)


def chat_tasks() -> list[MadeTask]:
    """Return all tasks of the class."""
    return [*_rotas(), *_plans(), *_savings(), *_timetables()]


def _rotas() -> list[MadeTask]:
    return [_flat_rota(), _shift_rota(), _seat_rota()]


def _flat_rota() -> MadeTask:
    people = ("Ana", "Ben", "Cleo", "Dan")
    columns = ("Week", "Kitchen", "Bathroom", "Rubbish", "Free")
    rows = [
        (week, *[people[(place + week - 1) % 4] for place in range(4)])
        for week in range(1, 38)
    ]
    prompt = (
        "Hi! There are four of us in the flat and we always argue about cleaning. Could you make a rota for 37 "
        "weeks? In week 1 Ana does the kitchen, Ben the bathroom, Cleo the rubbish, and Dan is free. Every week "
        "each job goes on to the next person in the order Ana, Ben, Cleo, Dan and then Ana again, so in week 2 it "
        f"is Ben, Cleo, Dan, and Ana is free. A Markdown table with the columns {', '.join(columns)} would be "
        "great, all 37 weeks written out."
    )
    answer = "Here is your rota:\n\n" + table_text(columns, rows)
    return make_task("chat-01", "chat", prompt, table_check(columns, rows), answer)


def _shift_rota() -> MadeTask:
    nurses = ("Farah", "Gil", "Hana")
    weekdays = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
    columns = ("Day", "Weekday", "Early", "Late", "Night")
    rows: list[tuple[int, str, str, str, str]] = []
    for day in range(1, 36):
        turn = (day - 1) // 2
        early, late, night = (nurses[(turn + shift) % 3] for shift in range(3))
        rows.append((day, weekdays[(day - 1) % 7], early, late, night))
    prompt = (
        "I run a small ward with three nurses, Farah, Gil and Hana. Everybody works the same shift for two days "
        "and then moves on: whoever was on late goes to early, night goes to late, and early goes to night. Day 1 "
        "is a Monday with Farah on early, Gil on late, Hana on night; on day 3 it is Gil early, Hana late, Farah "
        f"night. Please write the plan for 35 days as a Markdown table: {', '.join(columns)} (weekdays as Mon, "
        "Tue, ...)."
    )
    return make_task(
        "chat-02", "chat", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _seat_rota() -> MadeTask:
    children = ("Ida", "Jon", "Kim", "Leo", "Mia")
    columns = ("Trip", "Front", "Left", "Middle", "Right", "Boot")
    rows = [
        (trip, *[children[(seat + 2 * (trip - 1)) % 5] for seat in range(5)])
        for trip in range(1, 34)
    ]
    prompt = (
        "My five kids fight over car seats. The first trip is Ida in front, Jon left, Kim in the middle, Leo "
        "right and Mia in the seat in the boot. After each trip everyone moves so that whoever sat in the middle "
        "comes to the front, right comes to left, boot to middle, front to right, and left to boot. Print me the "
        "seats for 33 trips, please, so that I can pin it to the fridge: one Markdown table, "
        f"{' | '.join(columns)}."
    )
    return make_task(
        "chat-03", "chat", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _plans() -> list[MadeTask]:
    return [_running_plan(), _reading_plan(), _knitting_plan()]


def _running_plan() -> MadeTask:
    columns = ("Week", "Short run", "Long run", "Total", "Kind")
    rows: list[tuple[int, int, int, int, str]] = []
    for week in range(1, 41):
        short = 3 + week // 5
        long = 6 + week // 2
        kind = "build"
        if week % 4 == 0:
            long -= 4
            kind = "rest"
        rows.append((week, short, long, 2 * short + long, kind))
    prompt = (
        "I want to run a marathon in about 40 weeks and I love plans on paper :) Each week has two short runs of "
        "equal length and a long one. Short run in km: 3, and 1 more from week 5 on, another 1 more from week 10 "
        "on, and so on every five weeks. Long run: 6 km plus half the week's number, rounded down; but every "
        "fourth week (4, 8, 12, ...) is a rest week with 4 km less on the long run. Total counts both short runs. "
        "Kind is rest or build. Make it a Markdown table with Week, Short run, Long run, Total, Kind, numbers "
        "only, weeks 1 to 40."
    )
    answer = table_text(columns, rows) + "\n\nGood luck, and enjoy your training!"
    return make_task("chat-04", "chat", prompt, table_check(columns, rows), answer)


def _reading_plan() -> MadeTask:
    columns = ("Day", "From page", "To page", "Pages", "Left")
    rows: list[tuple[int, int, int, int, int]] = []
    page = 0
    for day in range(1, 41):
        pages = 30 if day % 7 in {6, 0} else 18
        pages = min(pages, 830 - page)
        rows.append((day, page + 1, page + pages, pages, 830 - page - pages))
        page += pages
    prompt = (
        "Our book club has picked a novel of 830 pages, help! I can read 18 pages a day, and 30 on the sixth and "
        "seventh day of each week (days 6, 7, 13, 14, ...). What do I have to read on which day? Please list days "
        f"1 to 40 in a Markdown table: {', '.join(columns)}. Start at page 1; on the last day I read what is left. "
        "Left is how many pages remain in the evening."
    )
    return make_task(
        "chat-05", "chat", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _knitting_plan() -> MadeTask:
    columns = ("Row", "Colour", "Stitches", "Change")
    rows: list[tuple[int, str, int, str]] = []
    stitches = 48
    for row in range(1, 45):
        colour = ("blue", "white", "grey")[(row - 1) // 2 % 3]
        change = "none"
        if row % 4 == 0:
            stitches += 2
            change = "add 2"
        if row % 10 == 0:
            stitches -= 1
            change = "drop 1" if row % 4 else "add 2, drop 1"
        rows.append((row, colour, stitches, change))
    prompt = (
        "I'm knitting a shawl and keep losing count, so I want every row written down. 44 rows. Colours change "
        "every two rows: blue, blue, white, white, grey, grey, then blue again. I cast on 48 stitches; in every "
        "4th row I add 2, in every 10th row I drop 1. Could you give me a Markdown table with Row, Colour, "
        'Stitches (after the row) and Change? Change is "none", "add 2", "drop 1" or, if both happen, "add '
        '2, drop 1".'
    )
    return make_task(
        "chat-06", "chat", prompt, table_check(columns, rows), table_text(columns, rows)
    )


def _savings() -> list[MadeTask]:
    return [_penny_jar(), _countdown(), _rent_debt()]


def _penny_jar() -> MadeTask:
    lines: list[str] = []
    totals: list[int] = []
    total = 0
    for week in range(1, 53):
        saved = 2 * week + 1
        lines.append(f"Week {week}: {total} + {saved} = {total + saved}")
        total += saved
        totals.append(total)
    prompt = (
        "You know those saving challenges? In week 1 I put 3 euros in a jar, and then 2 more each week than the "
        "week before. I'd like to see the jar grow over 52 weeks, one line a week, like this:\n\nWeek 1: 0 + 3 = 3\n"
        "Week 2: 3 + 5 = 8\n\nand please really all of them, down to week 52."
    )
    answer = "\n".join(lines) + "\n\nThat is a nice sum of money!"
    return make_task("chat-07", "chat", prompt, steps_check(totals), answer)


def _countdown() -> MadeTask:
    lines: list[str] = []
    values: list[int] = []
    left = 600
    for day in range(1, 59):
        eaten = 6 + day % 5 + (7 if day % 7 == 0 else 0)
        lines.append(f"Day {day}: {left} - {eaten} = {left - eaten}")
        left -= eaten
        values.append(left)
    prompt = (
        "Silly question: I won 600 chocolates. Every day I eat 6, plus as many as the remainder of the day's "
        "number divided by 5, plus 7 more on every seventh day (7, 14, ...). So day 1 is 6 + 1 = 7 chocolates and "
        'day 5 is 6. How many are left each evening for the first 58 days? Write it as "Day 1: 600 - 7 = 593" '
        "and so on, a line for each day."
    )
    return make_task("chat-08", "chat", prompt, steps_check(values), "\n".join(lines))


def _rent_debt() -> MadeTask:
    lines: list[str] = []
    values: list[int] = []
    owed = 0
    for month in range(1, 41):
        paid = 480 + 15 * (month % 4)
        lines.append(f"Month {month}: {owed} + 500 - {paid} = {owed + 500 - paid}")
        owed += 500 - paid
        values.append(owed)
    prompt = (
        "My brother lives in my flat and owes me 500 a month. He pays 480 plus 15 times the remainder of the "
        "month's number divided by 4, so 495 in month 1, 510 in month 2, 525 in month 3, 480 in month 4, and so "
        "on. Who owes whom after each month? Please write it down for 40 months, negative if I owe him, one line "
        "each:\n\nMonth 1: 0 + 500 - 495 = 5"
    )
    return make_task("chat-09", "chat", prompt, steps_check(values), "\n".join(lines))


def _timetables() -> list[MadeTask]:
    return [_bus(), _bakery(), _ferry()]


def _clock(minutes: int) -> str:
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def _bus() -> MadeTask:
    lines = [
        f"{_clock(start)} Mill Lane - {_clock(start + 23)} Station"
        for start in range(5 * 60 + 40, 5 * 60 + 40 + 44 * 17, 17)
    ]
    prompt = (
        "The bus from Mill Lane to the Station starts at 05:40 and then goes every 17 minutes; the ride takes 23 "
        "minutes. I want to print all 44 departures of the day. One line each, exactly like the first: "
        f"{lines[0]}. No bullets, please, and nothing before or after."
    )
    return make_task("chat-10", "chat", prompt, lines_check(lines), "\n".join(lines))


def _bakery() -> MadeTask:
    kinds = ("rye", "spelt", "white")
    lines: list[str] = []
    start = 4 * 60
    for batch in range(1, 39):
        minutes = (35, 28, 22)[(batch - 1) % 3]
        lines.append(
            f"batch {batch} ({kinds[(batch - 1) % 3]}): in {_clock(start)}, out {_clock(start + minutes)}"
        )
        start += minutes + 3
    prompt = (
        "I bake bread in turns: rye takes 35 minutes, spelt 28, white 22, then rye again, with 3 minutes between "
        "taking one batch out and putting the next one in. The first goes in at 04:00. Write me the list for 38 "
        f"batches, so: `{lines[0]}`, next line `{lines[1]}`. Times run past midnight as usual, after 23:59 comes "
        "00:00. Only the lines."
    )
    return make_task("chat-11", "chat", prompt, lines_check(lines), "\n".join(lines))


def _ferry() -> MadeTask:
    lines: list[str] = []
    start = 6 * 60 + 15
    for trip in range(1, 41):
        shore = ("north", "south")[(trip - 1) % 2]
        seats = 80 - (trip * 11) % 60
        lines.append(f"{trip}) {_clock(start)} from the {shore} shore, {seats} seats")
        start += 24
    prompt = (
        "Hey, could you type up the ferry list for tomorrow? It leaves the north shore at 06:15 and every 24 "
        "minutes after that, north and south in turns. 40 trips. Free seats on trip n: take n times 11, divide by "
        f"60, and subtract the remainder from 80. The first line is `{lines[0]}` and the second `{lines[1]}`; keep "
        "that form to the end and add nothing."
    )
    return make_task("chat-12", "chat", prompt, lines_check(lines), "\n".join(lines))
