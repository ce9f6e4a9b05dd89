"""Tasks in other languages: numbers as words, tables, calendars, lists translated by a glossary."""

from __future__ import annotations

import random
from datetime import date, timedelta
from typing import TYPE_CHECKING

from long_answers.made_task import (
    MadeTask,
    lines_check,
    make_task,
    steps_check,
    table_check,
    table_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THREE = 3  # its Italian word takes an accent at the end of another
BOXES_WANTED = 25


def multilingual_tasks() -> list[MadeTask]:
    """Return all tasks of the class."""
    return [*_number_words(), *_tables(), *_calendars(), *_glossaries()]


GERMAN_ONES = (
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
)  # fmt: skip
GERMAN_TENS = (
    "",
    "",
    "zwanzig",
    "dreißig",
    "vierzig",
    "fünfzig",
    "sechzig",
    "siebzig",
    "achtzig",
    "neunzig",
)
SPANISH_ONES = (
    "cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve", "diez", "once", "doce",
    "trece", "catorce", "quince", "dieciséis", "diecisiete", "dieciocho", "diecinueve", "veinte", "veintiuno",
    "veintidós", "veintitrés", "veinticuatro", "veinticinco", "veintiséis", "veintisiete", "veintiocho",
    "veintinueve",
)  # fmt: skip
SPANISH_TENS = (
    "",
    "",
    "",
    "treinta",
    "cuarenta",
    "cincuenta",
    "sesenta",
    "setenta",
    "ochenta",
    "noventa",
)
ITALIAN_ONES = (
    "zero", "uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove", "dieci", "undici", "dodici",
    "tredici", "quattordici", "quindici", "sedici", "diciassette", "diciotto", "diciannove",
)  # fmt: skip
ITALIAN_TENS = (
    "",
    "",
    "venti",
    "trenta",
    "quaranta",
    "cinquanta",
    "sessanta",
    "settanta",
    "ottanta",
    "novanta",
)


def german_number(number: int) -> str:
    """Return a number from 1 to 99 as a German word."""
    if number < len(GERMAN_ONES):
        return GERMAN_ONES[number]
    tens, ones = divmod(number, 10)
    if not ones:
        return GERMAN_TENS[tens]
    first = "ein" if ones == 1 else GERMAN_ONES[ones]
    return f"{first}und{GERMAN_TENS[tens]}"


def spanish_number(number: int) -> str:
    """Return a number from 1 to 99 as Spanish words."""
    if number < len(SPANISH_ONES):
        return SPANISH_ONES[number]
    tens, ones = divmod(number, 10)
    if not ones:
        return SPANISH_TENS[tens]
    return f"{SPANISH_TENS[tens]} y {SPANISH_ONES[ones]}"


def italian_number(number: int) -> str:
    """Return a number from 1 to 99 as an Italian word."""
    if number < len(ITALIAN_ONES):
        return ITALIAN_ONES[number]
    tens, ones = divmod(number, 10)
    start = ITALIAN_TENS[tens]
    if not ones:
        return start
    if ones in {1, 8}:
        start = start[:-1]
    end = "tré" if ones == THREE else ITALIAN_ONES[ones]
    return start + end


def _number_words() -> list[MadeTask]:
    german = (
        "Schreibe die Zahlen auf Deutsch als Wörter, und zwar jede dritte von 1 an: 1, 4, 7, 10 und so weiter bis "
        "97. Danach kommen die geraden Zahlen von 2 bis 98. Nummeriere die Zeilen fortlaufend und schreibe in jede "
        'Zeile Nummer, Zahl und Wort: "1. 1 = eins", "2. 4 = vier" usw.'
    )
    spanish = (
        "Escribe con letras los números del 21 al 90, uno en cada línea y numerando las líneas desde 1, de esta "
        "forma: «1. 21 = veintiuno», «2. 22 = veintidós». No te saltes ninguno y no añadas nada más."
    )
    italian = (
        "Scrivi in lettere tutti i numeri dispari da 1 a 99 e poi, di seguito, i multipli di quattro da 4 a 96. "
        "Una riga per ogni numero, con la riga numerata: «1. 1 = uno», «2. 3 = tre» e così via fino all'ultima. "
        "Ricordati gli accenti."
    )
    return [
        _number_list("01", german, [*range(1, 98, 3), *range(2, 99, 2)], german_number),
        _number_list("02", spanish, list(range(21, 91)), spanish_number),
        _number_list(
            "03", italian, [*range(1, 100, 2), *range(4, 97, 4)], italian_number
        ),
    ]


def _number_list(
    number: str, prompt: str, values: Sequence[int], in_words: Callable[[int], str]
) -> MadeTask:
    words = [in_words(value) for value in values]
    lines = [
        f"{line}. {value} = {word}"
        for line, (value, word) in enumerate(zip(values, words, strict=True), 1)
    ]
    middle = len(lines) // 2
    wrong_line = lines[middle].replace(words[middle], words[middle + 1])
    wrong_lines = [*lines[:middle], wrong_line, *lines[middle + 1 :]]
    return make_task(
        f"multilingual-{number}",
        "multilingual",
        prompt,
        steps_check(words),
        "\n".join(lines),
        wrong_step_answer="\n".join(wrong_lines),
    )


def _tables() -> list[MadeTask]:
    return [_german_shop(), _french_train(), _spanish_harvest()]


def _german_shop() -> MadeTask:
    rng = random.Random(53)
    goods = (
        "Äpfel", "Birnen", "Brot", "Butter", "Eier", "Essig", "Fisch", "Gurken", "Hafer", "Honig", "Joghurt",
        "Käse", "Kekse", "Kohl", "Linsen", "Mehl", "Milch", "Möhren", "Nudeln", "Nüsse", "Öl", "Pilze", "Reis",
        "Salz", "Senf", "Tee", "Wurst", "Zucker", "Feigen", "Ingwer", "Kaffee", "Lauch", "Mandeln", "Oliven",
        "Pfeffer", "Quark", "Rosinen", "Spinat", "Thymian",
    )  # fmt: skip
    columns = ("Ware", "Anzahl", "Einzelpreis", "Gesamtpreis", "Summe bisher")
    rows: list[tuple[str, int, int, int, int]] = []
    total = 0
    for good in goods:
        count = rng.randrange(1, 9)
        price = rng.randrange(1, 12)
        total += count * price
        rows.append((good, count, price, count * price, total))
    listed = ", ".join(f"{row[1]} mal {row[0]} zu {row[2]}" for row in rows)
    prompt = (
        f"Rechne bitte diesen Einkauf durch (Preise in ganzen Euro): {listed}. Ich hätte gern eine "
        f"Markdown-Tabelle mit den Spalten {', '.join(columns)}, eine Zeile je Ware in dieser Reihenfolge. Bitte "
        "ohne Euro-Zeichen."
    )
    return make_task(
        "multilingual-04",
        "multilingual",
        prompt,
        table_check(columns, rows),
        table_text(columns, rows),
    )


def _french_train() -> MadeTask:
    rng = random.Random(54)
    stops = (
        "Arles", "Beaune", "Cahors", "Dijon", "Épinal", "Figeac", "Guéret", "Hyères", "Issoire", "Jarnac",
        "Langres", "Mâcon", "Nevers", "Orange", "Pau", "Quimper", "Redon", "Sète", "Tulle", "Ussel", "Vichy",
        "Yvetot", "Royan", "Niort", "Albi", "Bourges", "Castres", "Dax", "Évreux", "Foix", "Gap", "Honfleur",
        "Laon", "Menton", "Nîmes", "Rodez", "Sarlat",
    )  # fmt: skip
    columns = ("Gare", "Montent", "Descendent", "À bord", "Places libres")
    rows: list[tuple[str, int, int, int, int]] = []
    aboard = 60
    for stop in stops:
        boarding = rng.randrange(0, 25)
        leaving = rng.randrange(0, 22)
        aboard += boarding - leaving
        rows.append((stop, boarding, leaving, aboard, 240 - aboard))
    listed = " ; ".join(
        f"{row[0]} : {row[1]} montent, {row[2]} descendent" for row in rows
    )
    prompt = (
        f"Un train de 240 places part avec 60 voyageurs. Voici ce qui se passe à chaque gare : {listed}.\n\nFais "
        f"un tableau Markdown avec les colonnes {', '.join(columns)} ; les deux dernières donnent la situation "
        "après l'arrêt. Une ligne par gare, dans l'ordre, sans commentaire."
    )
    return make_task(
        "multilingual-05",
        "multilingual",
        prompt,
        table_check(columns, rows),
        table_text(columns, rows),
    )


def _spanish_harvest() -> MadeTask:
    rng = random.Random(55)
    columns = ("Día", "Cajas llenas", "Kilos", "Acumulado", "Meta")
    rows: list[tuple[int, int, int, int, str]] = []
    total = 0
    for day in range(1, 41):
        boxes = rng.randrange(8, 40)
        total += boxes * 6
        rows.append(
            (day, boxes, boxes * 6, total, "sí" if boxes >= BOXES_WANTED else "no")
        )
    listed = ", ".join(str(row[1]) for row in rows)
    prompt = (
        "En una cosecha de naranjas cada caja llena pesa 6 kilos y la meta diaria es de al menos 25 cajas. Cajas "
        f"por día, desde el día 1 hasta el 40: {listed}.\n\nPrepara una tabla en Markdown con estas columnas: "
        f"{', '.join(columns)}. En «Acumulado» van los kilos desde el primer día y en «Meta» pon sí o no según se "
        "haya alcanzado ese día. Solo números, sin unidades."
    )
    return make_task(
        "multilingual-06",
        "multilingual",
        prompt,
        table_check(columns, rows),
        table_text(columns, rows),
    )


GERMAN_DAYS = (
    "Montag",
    "Dienstag",
    "Mittwoch",
    "Donnerstag",
    "Freitag",
    "Samstag",
    "Sonntag",
)
FRENCH_DAYS = ("lundi", "mardi", "mercredi", "jeudi", "vendredi", "samedi", "dimanche")
SPANISH_DAYS = (
    "lunes",
    "martes",
    "miércoles",
    "jueves",
    "viernes",
    "sábado",
    "domingo",
)
GERMAN_MONTHS = (
    "Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober", "November",
    "Dezember",
)  # fmt: skip
FRENCH_MONTHS = (
    "janvier", "février", "mars", "avril", "mai", "juin", "juillet", "août", "septembre", "octobre", "novembre",
    "décembre",
)  # fmt: skip
SPANISH_MONTHS = (
    "enero", "febrero", "marzo", "abril", "mayo", "junio", "julio", "agosto", "septiembre", "octubre", "noviembre",
    "diciembre",
)  # fmt: skip


def _calendars() -> list[MadeTask]:
    return [_german_calendar(), _french_calendar(), _spanish_calendar()]


def _days(first: date, step: int, count: int) -> list[date]:
    return [first + timedelta(days=step * position) for position in range(count)]


def _calendar_task(number: str, prompt: str, lines: Sequence[str]) -> MadeTask:
    return make_task(
        f"multilingual-{number}",
        "multilingual",
        prompt,
        lines_check(lines),
        "\n".join(lines),
    )


def _german_calendar() -> MadeTask:
    lines = [
        f"{GERMAN_DAYS[day.weekday()]}, {day.day}. {GERMAN_MONTHS[day.month - 1]} {day.year}"
        for day in _days(date(2025, 2, 20), 3, 53)
    ]
    prompt = (
        "Die Heizung wird alle drei Tage abgelesen, zum ersten Mal am Donnerstag, 20. Februar 2025. Schreib mir die "
        "ersten 53 "
        f'Termine untereinander, jeden mit Wochentag, genau in dieser Form: "{lines[0]}", dann "{lines[1]}" und so '
        "fort. Keine "
        "Aufzählungszeichen, kein weiterer Text."
    )
    return _calendar_task("07", prompt, lines)


def _french_calendar() -> MadeTask:
    lines = [
        f"{FRENCH_DAYS[day.weekday()]} {day.day} {FRENCH_MONTHS[day.month - 1]} {day.year} : séance {number}"
        for number, day in enumerate(_days(date(2025, 9, 4), 5, 42), 1)
    ]
    prompt = (
        "Un atelier de poterie a lieu tous les cinq jours, à partir du jeudi 4 septembre 2025. Donne la liste des "
        f"42 premières séances, une par ligne, sous cette forme exacte : « {lines[0]} ». Écris toujours le chiffre "
        "1, jamais 1er. N'ajoute ni puces ni guillemets."
    )
    return _calendar_task("08", prompt, lines)


def _spanish_calendar() -> MadeTask:
    lines = [
        f"{SPANISH_DAYS[day.weekday()]}, {day.day} de {SPANISH_MONTHS[day.month - 1]} de {day.year}"
        for day in _days(date(2026, 1, 6), 4, 45)
    ]
    prompt = (
        "Riego las plantas cada cuatro días y empiezo el martes, 6 de enero de 2026. Quiero la lista de los "
        f"primeros 45 riegos con el día de la semana, una fecha por línea y escrita así: «{lines[0]}», "
        f"«{lines[1]}»... Sin comillas, sin numerar."
    )
    return _calendar_task("09", prompt, lines)


GERMAN_GLOSSARY = {
    "Löffel": "spoon", "Gabel": "fork", "Messer": "knife", "Teller": "plate", "Schüssel": "bowl", "Becher": "mug",
    "Pfanne": "pan", "Sieb": "sieve", "Waage": "scale", "Brett": "board", "Kanne": "jug", "Deckel": "lid",
}  # fmt: skip
FRENCH_GLOSSARY = {
    "marteau": "hammer", "scie": "saw", "clou": "nail", "vis": "screw", "échelle": "ladder", "pinceau": "brush",
    "seau": "bucket", "corde": "rope", "lime": "file", "pince": "pliers", "colle": "glue", "planche": "plank",
}  # fmt: skip
PORTUGUESE_GLOSSARY = {
    "cadeira": "chair", "mesa": "table", "tapete": "carpet", "espelho": "mirror", "gaveta": "drawer",
    "estante": "shelf",
    "almofada": "cushion", "cortina": "curtain", "vela": "candle", "relógio": "clock", "chave": "key",
    "cesto": "basket",
}  # fmt: skip


def _glossaries() -> list[MadeTask]:
    german = (
        "Übersetze diese Inventarliste ins Englische. Benutze genau die Wörter aus dem Glossar, lass Zahlen und "
        "Zeichen stehen, und aus „Schrank“ wird cupboard, aus „Stück“ wird pieces."
    )
    french = (
        "Traduis en anglais l'inventaire ci-dessous, avec les mots du glossaire et rien d'autre ; « armoire » "
        "devient cupboard et « pièces » devient pieces. Garde les nombres, la ponctuation et l'ordre des lignes."
    )
    portuguese = (
        "Traduz para inglês o inventário que se segue. Usa as palavras do glossário; «armário» passa a cupboard e "
        "«peças» passa a pieces. Mantém números, sinais e a ordem das linhas, e não escrevas mais nada."
    )
    return [
        _glossary_task("10", german, ("Schrank", "Stück"), GERMAN_GLOSSARY),
        _glossary_task("11", french, ("armoire", "pièces"), FRENCH_GLOSSARY),
        _glossary_task("12", portuguese, ("armário", "peças"), PORTUGUESE_GLOSSARY),
    ]


def _glossary_task(
    number: str, request: str, frame: tuple[str, str], glossary: dict[str, str]
) -> MadeTask:
    rng = random.Random(60 + int(number))
    place, unit = frame
    before: list[str] = []
    after: list[str] = []
    for line in range(1, 43):
        word = rng.choice(sorted(glossary))
        count = rng.randrange(2, 99)
        before.append(f"{place} {line}: {word}, {count} {unit}")
        after.append(f"cupboard {line}: {glossary[word]}, {count} pieces")
    listed = "; ".join(f"{word} = {english}" for word, english in glossary.items())
    prompt = f"{request}\n\n{listed}\n\n" + "\n".join(before)
    return make_task(
        f"multilingual-{number}",
        "multilingual",
        prompt,
        lines_check(after),
        "\n".join(after),
    )
