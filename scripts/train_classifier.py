"""Train the classifier's weights from labelled prompts and write the file that comes with the package.

    python scripts/train_classifier.py --data DIR [--data FILE ...] [--output classifier/weights.npz] [--seed 0]

Needs SciPy beside the router's own packages. ``--data`` is a folder or a file of JSON lines, packed or not, with these
fields: ``text``, ``contains_code``, ``asks_for_code``, ``language``, ``class`` and ``source``; ``complexity`` counts where
it is given and the source starts with ``written``. Prompts whose source starts with ``written`` are the users' kind, which
the weights are fitted to; all others are a pool, whose weights are where that fit starts from.

Outputs are the sum of logistic regressions (L-BFGS, L2) and of a layer of hidden units over words' vectors. The
regressions are fitted in two stages: the pool alone, then the written prompts and a little of the pool, with the penalty on
the distance from the first stage. Languages are a softmax, by AdaGrad. Probabilities are
calibrated on predictions of folds that were left out: of written prompts, and of whole sources of the pool (Platt, 1999).
The same data and seed give the same bytes on one version of NumPy and SciPy.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import re
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import scipy.optimize
import scipy.sparse

from classifier import model
from classifier.kinds import JUDGED, Complexity
from classifier.model import ASKS, BEYOND_TRIVIAL, COMPLEX, CONTAINS, FORMAT, HAS, OUTPUTS, WEIGHTS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CODE_FILES = ("classifier/model.py", "classifier/data/technologies.txt", "scripts/train_classifier.py")
CLASSES = COMPLEX + 1  # where the classes' outputs start
ALIASES = {
    "excel": "spreadsheet", "google-sheets": "spreadsheet", "hcl": "terraform", "cs": "csharp", "structured text": "plc",
    "ladder logic": "ladder", "apache": "apacheconf", "plsql": "sql", "psql": "sql", "mysql": "sql", "elisp": "lisp",
    "vue-html": "html", "spl": "splunk", "cron": "bash",
}  # fmt: skip
WRITTEN = "written"
TECHNOLOGIES = WEIGHTS_FILE.parent / "data/technologies.txt"
NONSENSE = 1500  # made-up texts that say nothing


@dataclass(frozen=True, slots=True)
class Settings:
    """What training depends on besides the prompts.

    Attributes:
        seed: Of everything drawn.
        cap: Prompts of one source in the pool at most.
        foreign_cap: Of one source in one language other than English.
        pool_c: Inverse of the penalty in the first stage.
        written_c: In the second.
        prior: Share of the first stage's weights that the second starts from.
        mixed: Prompts of the pool in the second stage.
        mixed_weight: Weight of each, beside 1 for a written prompt.
        empty_weight: Weight of a text that says nothing.
        steps: Of L-BFGS in each stage.
        epochs: Of AdaGrad, for the language.
        language_cap: Prompts of one language in the pool at most.
        language_repeats: Times that a written prompt comes in each epoch.
        language_rate: Length of a step.
        language_l2: Penalty on the weights.
        open_penalty: By how much the score of no language is less, since a wrong one does no more harm.
        least: Prompts of a language at least, for which it is known.
        dimensions: Of the words' vectors.
        units: Hidden ones.
        hidden_repeats: Times that a written prompt comes in each epoch.
        hidden_epochs: Of Adam.
        hidden_rate: Length of its first step.
        input_dropout: Share of the inputs left out.
        unit_dropout: Of the hidden units.
        foreign_weight: Of a written prompt with code in another language than English, for the hidden units.
        hidden_share: What the hidden units' log-odds are multiplied by before they are added.
        folds: For calibration.
    """

    seed: int = 0
    cap: int = 300
    foreign_cap: int = 40
    pool_c: float = 3.0
    written_c: float = 10.0
    prior: float = 0.7
    mixed: int = 30_000
    mixed_weight: float = 0.08
    empty_weight: float = 0.2
    steps: int = 50
    epochs: int = 4
    language_cap: int = 400
    language_repeats: int = 4
    language_rate: float = 0.2
    language_l2: float = 1e-3
    open_penalty: float = 1.0
    least: int = 40
    dimensions: int = 250
    units: int = 32
    hidden_repeats: int = 25
    hidden_epochs: int = 8
    hidden_rate: float = 2e-3
    input_dropout: float = 0.4
    unit_dropout: float = 0.2
    foreign_weight: float = 2.0
    hidden_share: float = 0.7
    folds: int = 4


@dataclass(slots=True)
class Data:
    """Prompts with their labels, in the order of the files.

    Attributes:
        prompts: The prompts.
        x: What the model reads of each, a row each; sparse.
        hidden_x: How often each word comes, at all and at either end, for the layer of hidden units.
        language_x: What it reads for the language.
        y: 1 or 0 for each output.
        known: Whether that label is known.
        language: Number of the language; -1 where there is no code.
        languages: Their ids.
        written: Which prompts are of the users' kind.
        empty: Which say nothing.
        digest: SHA-256 of the files' content.
    """

    prompts: list[dict[str, Any]]
    x: Any
    hidden_x: Any
    language_x: Any
    y: Any
    known: Any
    language: Any
    languages: list[str | None]
    written: Any
    empty: Any
    digest: str = ""


def main() -> None:
    """Read, train, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="folder or file of JSON lines")
    parser.add_argument("--output", type=Path, default=WEIGHTS_FILE, help="weights file (default: the package's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Settings().steps, help="of each fit (default: %(default)s)")
    parser.add_argument("--without", metavar="REST/PARTS", help="leave out the prompts whose digest has this rest")
    options = parser.parse_args()
    settings = Settings(seed=options.seed, steps=options.steps, epochs=min(Settings().epochs, options.steps))
    prompts, digest = read_prompts(options.data)
    if options.without:
        rest, parts = map(int, options.without.split("/"))
        prompts = [p for p in prompts if not p["source"].startswith(WRITTEN) or part_of(p["text"], parts) != rest]
    data = make_data(choose(prompts, settings), settings)
    data.digest = digest
    vectors = word_vectors(data, settings)
    weights, bias = fit_all(data, settings)
    hidden = fit_hidden(data, vectors, settings)
    languages = fit_languages(data, settings)
    (slope, shift), report = calibrate(data, vectors, settings)
    share = settings.hidden_share
    outputs = weights * slope, (bias + share * hidden[3]) * slope + shift
    units = hidden[0], hidden[1], share * hidden[2] * slope
    write(options.output, data, settings, (outputs, units, languages), report)
    print(json.dumps(report, indent=1), f"\n{len(data.prompts)} prompts; wrote {options.output}")


def part_of(text: str, parts: int) -> int:
    """Return which of several parts a prompt is in, by its text alone."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] % parts


def read_prompts(places: Iterable[Path]) -> tuple[list[dict[str, Any]], str]:
    """Return the prompts of files and folders, and the SHA-256 of all their content."""
    digest = hashlib.sha256()
    prompts = []
    for place in places:
        files = [place] if place.is_file() else sorted([*place.glob("train.jsonl*"), *place.glob("written*.jsonl")])
        for file in files:
            content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
            digest.update(content)
            prompts += [json.loads(line) for line in content.decode("utf-8").split("\n") if line]
    return prompts, digest.hexdigest()


def choose(prompts: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """Return the written prompts, some of each other source, and nonsense."""
    rng = random.Random(settings.seed)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for prompt in prompts:
        written = prompt["source"].startswith(WRITTEN)
        groups[prompt["source"], "en" if written else prompt.get("nl") or "en"].append(prompt)
    chosen = []
    for (source, spoken), group in groups.items():
        cap = settings.cap if spoken == "en" else settings.foreign_cap
        chosen += group if source.startswith(WRITTEN) or len(group) <= cap else rng.sample(group, cap)
    chosen += [nonsense(rng) for _ in range(NONSENSE)]
    return chosen + (technologies(TECHNOLOGIES, settings) if TECHNOLOGIES.exists() else [])


def technologies(file: Path, settings: Settings) -> list[dict[str, Any]]:
    """Return prompts made of the names of technologies, which teach nothing but the language that they imply."""
    rng = random.Random(settings.seed)
    prompts = []
    for line in file.read_text("utf-8").splitlines():
        language, names = line.split(": ")
        several = [name.replace("-", " ") for name in names.split()]
        for _ in range(max(12, 2 * len(several))):
            text = " ".join(rng.sample(several, min(len(several), rng.randrange(1, 5))))
            labels = {"contains_code": None, "asks_for_code": None, "language": language, "class": None}
            prompts.append({"text": text, **labels, "source": f"technologies of {language}"})
    return prompts


def nonsense(rng: random.Random) -> dict[str, Any]:
    """Return a text that says nothing: letters, marks or hardly anything."""
    kind = rng.randrange(5)
    if kind in {0, 4}:
        text = "".join(rng.choice("??!!...,;:-_*~ ") for _ in range(rng.randrange(6)))
    elif kind == 1:
        text = rng.choice("asdfghjklqwertzuiopyxcvbnm") * rng.randrange(1, 40)
    else:
        letters = rng.choice(("bcdfghjklmnpqrstvwxz", "asdfjkl", "abcdefghijklmnopqrstuvwxyz"))
        text = " ".join(
            "".join(rng.choice(letters) for _ in range(rng.randrange(4, 10))) for _ in range(rng.randrange(1, 6))
        )
    labels = {"contains_code": False, "asks_for_code": False, "language": None, "class": "unknown"}
    return {"text": text, **labels, "source": f"nonsense {kind}"}


def make_data(prompts: list[dict[str, Any]], settings: Settings) -> Data:
    """Return prompts as matrices."""
    written = np.array([p["source"].startswith(WRITTEN) for p in prompts])
    empty = np.array([p["class"] == "unknown" for p in prompts])
    y, known = np.zeros((len(prompts), len(OUTPUTS))), np.zeros((len(prompts), len(OUTPUTS)))
    names = [ALIASES.get(name := (p["language"] or "").split("#")[0], name) for p in prompts]
    counts = Counter(name for name in names if name)
    frequent = Counter(name for name, mine in zip(names, written, strict=True) if mine)
    ids = [None, *sorted(name for name in counts if counts[name] >= settings.least or frequent[name] > 4)]  # noqa: PLR2004
    number = {name: index for index, name in enumerate(ids)}
    language = np.full(len(prompts), -1)
    for row, prompt in enumerate(prompts):
        if prompt["contains_code"] is None:
            language[row] = number.get(names[row], -1)
            continue
        contains, asks = bool(prompt["contains_code"]), bool(prompt["asks_for_code"])
        y[row, [HAS, ASKS, CONTAINS]] = contains or asks, asks, contains
        known[row, [HAS, ASKS, CONTAINS]] = 1
        if contains or asks:
            language[row] = number.get(names[row], -1 if names[row] else 0)  # a rare one is neither open nor known
        elif prompt["class"] in JUDGED:
            y[row, CLASSES + JUDGED.index(prompt["class"])] = known[row, CLASSES:] = 1
        if written[row] and prompt.get("complexity"):
            degree = list(Complexity).index(Complexity(prompt["complexity"]))
            y[row, [BEYOND_TRIVIAL, COMPLEX]] = degree > 0, degree > 1
            known[row, [BEYOND_TRIVIAL, COMPLEX]] = 1
    x, hidden_x, language_x = read_texts([p["text"] for p in prompts])
    return Data(prompts, x, hidden_x, language_x, y, known, language, ids, written, empty)


def read_texts(texts: Sequence[str]) -> tuple[Any, Any, Any]:
    """Return what the model reads of texts, a sparse row each: for the outputs, the hidden units and the language."""
    shapes = np.arange(model.ROWS, model.ROWS + model.SHAPE_WIDTH)
    rows, hidden_rows, language_rows = [], [], []
    for text in texts:
        found = model.read(text)
        words, ends, runs = found.words, found.ends, found.runs
        middle = (ends + runs) // 2
        parts = (0, ends, model.WORD_SCALE), (ends, runs, model.END_SCALE), (runs, None, model.RUN_SCALE)
        used = np.flatnonzero(found.shape)
        rows.append(sum_rows([(found.rows[a:b], scale) for a, b, scale in parts], (shapes[used], found.shape[used])))
        three = found.rows[words:ends], found.rows[ends:middle], found.rows[middle:runs]
        hidden_rows.append(sum_rows([(part, 1.0) for part in three], None))
        words, runs = model.language_rows(found)
        language_rows.append(sum_rows(((words, model.WORD_SCALE), (runs, model.RUN_SCALE)), None))
    return (
        matrix(rows, model.ROWS + model.SHAPE_WIDTH),
        matrix(hidden_rows, model.RUNS),
        matrix(language_rows, model.LANGUAGE_ROWS),
    )


def sum_rows(parts: Iterable[tuple[Any, float]], more: Any) -> tuple[Any, Any]:
    """Return which rows a text reads and how much of each."""
    places, values = [], []
    for rows, scale in parts:
        unique, counts = np.unique(rows.astype(np.int32), return_counts=True)
        places.append(unique)
        values.append((counts * (scale / max(len(rows), 1) ** 0.5)).astype(np.float32))
    if more:
        places.append(more[0].astype(np.int32))
        values.append(more[1])
    return np.concatenate(places), np.concatenate(values)


def matrix(rows: Sequence[tuple[Any, Any]], width: int) -> Any:
    """Return sparse rows as one matrix."""
    ends = np.cumsum([0, *(len(places) for places, _ in rows)])
    places, values = (np.concatenate(column) for column in zip(*rows, strict=True))
    return scipy.sparse.csr_matrix((values, places, ends), shape=(len(rows), width))


def fit_all(data: Data, settings: Settings, keep: Any = None) -> tuple[Any, Any]:
    """Return weights and bias of the outputs, from the prompts to keep (all, where None)."""
    keep = np.ones(len(data.prompts), bool) if keep is None else keep
    pool, own = np.flatnonzero(keep & ~data.written), np.flatnonzero(keep & data.written)
    rng = np.random.default_rng(settings.seed)
    start = fit(data, (pool, np.ones(len(pool))), settings.pool_c, settings.steps, None)
    mixed = rng.choice(pool, min(settings.mixed, len(pool)), replace=False)
    empty = np.flatnonzero(keep & data.empty)
    rows = np.concatenate((own, mixed, empty))
    parts = ((own, 1.0), (mixed, settings.mixed_weight), (empty, settings.empty_weight))
    weight = np.concatenate([np.full(len(part), value) for part, value in parts])
    start = (start[0] * settings.prior, start[1] * settings.prior)
    return fit(data, (rows, weight), settings.written_c, settings.steps, start)


def fit(data: Data, sample: tuple[Any, Any], c: float, steps: int, start: Any) -> tuple[Any, Any]:
    """Return weights and bias of logistic regressions on some rows, penalised for their distance from a start."""
    rows, weight = sample
    x, y, weight = data.x[rows], data.y[rows], weight[:, None] * data.known[rows]
    turned = x.T.tocsr()
    width, outputs = x.shape[1], y.shape[1]
    size = width * outputs
    first = np.zeros(size + outputs) if start is None else np.concatenate((start[0].ravel(), start[1]))

    def objective(point: Any) -> tuple[float, Any]:
        scores = (x @ point[:size].reshape(width, outputs).astype(np.float32)).astype(float) + point[size:]
        away = point[:size] - first[:size]
        loss = (weight * (np.logaddexp(0, scores) - y * scores)).sum() + away @ away / (2 * c)
        errors = weight * (sigmoid(scores) - y)
        slopes = (turned @ errors.astype(np.float32)).astype(float).ravel() + away / c
        return loss, np.concatenate((slopes, errors.sum(0)))

    found = scipy.optimize.minimize(
        objective, first, jac=True, method="L-BFGS-B", options={"maxiter": steps, "maxcor": 8}
    ).x
    return found[:size].reshape(width, outputs), found[size:]


def word_vectors(data: Data, settings: Settings) -> Any:
    """Return a vector for each row of words, alike for words of the same prompts: latent semantic analysis.

    Deerwester et al., Indexing by latent semantic analysis, 1990; by the randomised range finder of Halko et al., 2011.
    """
    size = 1 << model.WORD_BITS
    counts = data.hidden_x[:, :size]
    seen = np.asarray((counts > 0).sum(0)).ravel()
    used = np.flatnonzero(seen > 1)
    rarity = np.log(len(data.prompts) / (1 + seen[used])).astype(np.float32)
    table = (counts[:, used] > 0).astype(np.float32) @ scipy.sparse.diags(rarity)
    norms = np.sqrt(np.asarray(table.multiply(table).sum(1)).ravel())
    table = (scipy.sparse.diags(1 / np.maximum(norms, 1e-6).astype(np.float32)) @ table).tocsr()
    turned = table.T.tocsr()
    rng = np.random.default_rng(settings.seed)
    found = table @ rng.normal(size=(len(used), settings.dimensions + 20)).astype(np.float32)
    for _ in range(2):
        found = table @ (turned @ np.linalg.qr(found)[0])
    axes = np.linalg.svd((turned @ np.linalg.qr(found)[0]).T, full_matrices=False)[2]
    vectors = axes[: settings.dimensions].T * rarity[:, None]
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    often = np.minimum(seen[used], 20)[:, None]
    vectors -= (vectors * often).sum(0) / often.sum()
    vectors /= np.sqrt((vectors**2 * often).sum(0) / often.sum())
    every = np.zeros((size, settings.dimensions), np.float32)
    every[used] = vectors
    return every


def fit_hidden(data: Data, vectors: Any, settings: Settings, keep: Any = None) -> tuple[Any, Any, Any, Any]:
    """Return the layer of hidden units and the layer of outputs, each with its bias.

    Adam, with dropout, on the sums of the words' vectors: of all words, of the first and of the last.
    """
    keep = (data.known[:, HAS] > 0) & (True if keep is None else keep)
    size = len(vectors)
    inputs = np.hstack([data.hidden_x[:, at : at + size] @ vectors for at in (0, size, 2 * size)])
    scale = inputs[keep].std()
    inputs /= scale
    rng = np.random.default_rng(settings.seed)
    width, units, outputs = inputs.shape[1], settings.units, data.y.shape[1]
    layers = [
        rng.normal(0, width**-0.5, (width, units)).astype(np.float32),
        np.zeros(units, np.float32),
        rng.normal(0, 0.3 * units**-0.5, (units, outputs)).astype(np.float32),
        np.zeros(outputs, np.float32),
    ]
    moments = [(np.zeros_like(layer), np.zeros_like(layer)) for layer in layers]
    own = np.repeat(np.flatnonzero(keep & data.written), settings.hidden_repeats)
    rows = np.concatenate((np.flatnonzero(keep & ~data.written), own))
    weight, truth = hidden_weights(data, settings), data.y.astype(np.float32)
    batch, step = 256, 0
    steps = settings.hidden_epochs * (len(rows) // batch)
    for _ in range(settings.hidden_epochs):
        order = rng.permutation(rows)
        for begin in range(0, len(order) - batch + 1, batch):
            step += 1
            part = order[begin : begin + batch]
            x = inputs[part] * dropout(rng, (batch, width), settings.input_dropout)
            mask = dropout(rng, (batch, units), settings.unit_dropout)
            before = x @ layers[0] + layers[1]
            after = np.maximum(before, 0) * mask
            errors = weight[part] * (sigmoid(after @ layers[2] + layers[3]) - truth[part]) / batch
            back = (errors @ layers[2].T) * mask * (before > 0)
            slopes = x.T @ back, back.sum(0), after.T @ errors, errors.sum(0)
            adam(layers, moments, slopes, settings.hidden_rate * max(0.02, 1 - step / steps), step)
    first = np.vstack([vectors @ part for part in np.split(layers[0], 3)]) / scale
    return first, layers[1], layers[2], layers[3]


def hidden_weights(data: Data, settings: Settings) -> Any:
    """Return the weight of each label for the hidden units."""
    weight = data.known * np.where(data.empty, settings.empty_weight, 1.0)[:, None]
    foreign = np.array([(prompt.get("nl") or "en") != "en" for prompt in data.prompts])
    weight[foreign & data.written & (data.y[:, HAS] > 0), :BEYOND_TRIVIAL] *= settings.foreign_weight
    return weight.astype(np.float32)


def dropout(rng: Any, shape: tuple[int, int], share: float) -> Any:
    """Return factors that leave out a share of the numbers and make up for it in the others."""
    return (rng.random(shape, np.float32) > share).astype(np.float32) / np.float32(1 - share)


def adam(layers: list[Any], moments: list[tuple[Any, Any]], slopes: Iterable[Any], rate: float, step: int) -> None:
    """Change layers by one step of Adam (Kingma and Ba, 2015), weights decaying."""
    for layer, (mean, square), slope in zip(layers, moments, slopes, strict=True):
        mean[...] += 0.1 * (slope - mean)
        square[...] += 0.001 * (slope * slope - square)
        layer[...] -= rate * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        if layer.ndim > 1:
            layer[...] *= 1 - 0.01 * rate


def sigmoid(scores: Any) -> Any:
    """Return probabilities for log-odds."""
    return 1 / (1 + np.exp(-np.clip(scores, -30, 30)))


def fit_languages(data: Data, settings: Settings, keep: Any = None) -> tuple[Any, Any]:
    """Return what each row adds to the score of each language, and the languages' bias: a softmax, by AdaGrad."""
    rng = np.random.default_rng(settings.seed)
    with_code = (data.language >= 0) & (True if keep is None else keep)
    groups = defaultdict(list)
    for row in np.flatnonzero(with_code & ~data.written):
        groups[data.language[row]].append(row)
    pool = [
        rng.choice(rows, min(settings.language_cap, len(rows)), replace=False) for _, rows in sorted(groups.items())
    ]
    own = [np.flatnonzero(with_code & data.written)] * settings.language_repeats
    table = np.zeros((data.language_x.shape[1], len(data.languages)), np.float32)
    squares, bias = np.full_like(table, 1e-4), np.zeros(table.shape[1], np.float32)
    batch = 256
    for _ in range(settings.epochs):
        order = rng.permutation(np.concatenate(own + pool))
        for begin in range(0, len(order), batch):
            rows = order[begin : begin + batch]
            x = data.language_x[rows]
            used, place = np.unique(x.indices, return_inverse=True)
            x = scipy.sparse.csr_matrix((x.data, place, x.indptr), shape=(len(rows), len(used)))
            scores = x @ table[used] + bias
            errors = np.exp(scores - scores.max(1, keepdims=True))
            errors /= errors.sum(1, keepdims=True)
            errors[np.arange(len(rows)), data.language[rows]] -= 1
            slope = x.T @ errors + settings.language_l2 * table[used]
            squares[used] += slope * slope
            table[used] -= settings.language_rate * slope / np.sqrt(squares[used])
            bias -= settings.language_rate / 160 * errors.sum(0)
    bias[0] -= settings.open_penalty
    return table, bias


def calibrate(data: Data, vectors: Any, settings: Settings) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Return slope and shift of each output, and how good predictions of what was left out are."""
    families = [family(p["source"]) for p in data.prompts]
    written = zip(data.prompts, data.written, families, strict=True)
    parts = [f"w{part_of(p['text'], 251)}" if mine else name for p, mine, name in written]
    folds = np.array([hashlib.sha256(part.encode()).digest()[1] % settings.folds for part in parts])
    scores, language = np.zeros(data.y.shape), np.zeros(len(parts), int)
    for number in range(settings.folds):
        weights, bias = fit_all(data, settings, folds != number)
        table, language_bias = fit_languages(data, settings, folds != number)
        out = folds == number
        first, first_bias, second, second_bias = fit_hidden(data, vectors, settings, folds != number)
        found = np.maximum(data.hidden_x[out] @ first + first_bias, 0) @ second + second_bias
        scores[out] = data.x[out] @ weights + bias + settings.hidden_share * found
        language[out] = (data.language_x[out] @ table + language_bias).argmax(1)
    known = data.known > 0
    share = data.written.mean()
    importance = np.where(data.written, 0.7 / share, 0.3 / (1 - share))[:, None] * known
    slope, shift = np.ones(len(OUTPUTS)), np.zeros(len(OUTPUTS))
    for output in range(CLASSES):
        slope[output], shift[output] = platt(scores[:, output], data.y[:, output], importance[:, output])
    slope[CLASSES:] = temperature(
        scores[:, CLASSES:], data.y[:, CLASSES:], importance[:, -2] * data.y[:, CLASSES:].sum(1)
    )
    found = scores * slope + shift
    return (slope, shift), {
        f"{name}, {group}": value
        for group, rows in (("written", data.written), ("sources", ~data.written & (data.known[:, HAS] > 0)))
        for name, value in score(data, found, language, rows).items()
    }


def score(data: Data, found: Any, language: Any, rows: Any) -> dict[str, float]:
    """Return how good the log-odds found, and the languages, of some rows are."""
    scores = {}
    for output in range(CLASSES):
        mask = rows & (data.known[:, output] > 0)
        if mask.any():
            scores[f"F1 {OUTPUTS[output]}"] = f1(found[mask, output] >= 0, data.y[mask, output] > 0)
    mask = rows & (data.y[:, CLASSES:].sum(1) > 0)
    scores["classes right"] = (found[mask, CLASSES:].argmax(1) == data.y[mask, CLASSES:].argmax(1)).mean()
    mask = rows & (data.language > 0)
    scores["languages right"] = (language[mask] == data.language[mask]).mean()
    scores["calibration error"] = calibration_error(sigmoid(found[rows, HAS]), data.y[rows, HAS])
    return {name: round(float(value), 3) for name, value in scores.items()}


def family(source: str) -> str:
    """Return what a source has in common with others of the same origin."""
    if source.startswith(("handwritten", "generated", "prose", "long", "FLAN", "nonsense")):
        return re.sub(r" \(.*", "", source)
    return re.split(r"[ +/]", source)[0]


def platt(scores: Any, truth: Any, weight: Any) -> tuple[float, float]:
    """Return slope (0 or more) and shift that make scores into calibrated log-odds."""

    def objective(point: Any) -> float:
        fitted = point[0] * scores + point[1]
        return float((weight * (np.logaddexp(0, fitted) - truth * fitted)).sum() / weight.sum())

    found = scipy.optimize.minimize(objective, [1.0, 0.0], method="Nelder-Mead").x
    return max(float(found[0]), 0.0), float(found[1])


def temperature(scores: Any, truth: Any, weight: Any) -> float:
    """Return the factor, 0.1..3, by which scores become calibrated after a softmax."""

    def objective(factor: float) -> float:
        fitted = factor * scores
        top = fitted.max(1)
        normal = top + np.log(np.exp(fitted - top[:, None]).sum(1))
        return float((weight * (normal - (truth * fitted).sum(1))).sum() / weight.sum())

    return float(scipy.optimize.minimize_scalar(objective, bounds=(0.1, 3.0), method="bounded").x)


def f1(found: Any, truth: Any) -> float:
    """Return F1, 0..1."""
    return float(2 * (found & truth).sum() / max(found.sum() + truth.sum(), 1))


def calibration_error(probability: Any, truth: Any, bins: int = 15) -> float:
    """Return the expected calibration error of a yes or no, 0..1."""
    sure = np.maximum(probability, 1 - probability)
    right = (probability >= 0.5) == (truth > 0)  # noqa: PLR2004
    place = np.minimum((sure * bins).astype(int), bins - 1)
    return float(sum(abs((sure - right)[place == number].sum()) for number in range(bins)) / len(truth))


def write(file: Path, data: Data, settings: Settings, parts: tuple[Any, Any, Any], report: dict[str, Any]) -> None:
    """Write a weights file: eight bits a weight in the tables."""
    outputs, hidden, languages = parts
    table, scale = eight_bits(outputs[0][: model.ROWS])
    hidden_table, hidden_scale = eight_bits(hidden[0])
    language_table, language_scale = eight_bits(languages[0])
    root = Path(__file__).resolve().parents[1]
    code = hashlib.sha256(b"".join((root / name).read_bytes() for name in CODE_FILES))
    about = {
        "format": FORMAT,
        "features": model.VERSION,
        "outputs": OUTPUTS,
        "languages": data.languages,
        "data_sha256": data.digest,
        "code_sha256": code.hexdigest(),
        "prompts": {"written": int(data.written.sum()), "other": int((~data.written).sum())},
        "settings": asdict(settings),
        "left_out": report,
    }
    arrays = {
        "scale": scale,
        "shape": outputs[0][model.ROWS :],
        "bias": outputs[1],
        "hidden_scale": hidden_scale,
        "hidden_bias": hidden[1],
        "hidden_outputs": hidden[2],
        "language_scale": language_scale,
        "language_bias": languages[1],
    }
    np.savez_compressed(
        file,
        about=np.frombuffer(json.dumps(about).encode(), np.uint8),
        table=table,
        hidden_table=hidden_table,
        language_table=language_table,
        **{name: array.astype(np.float32) for name, array in arrays.items()},
    )


def eight_bits(table: Any) -> tuple[Any, Any]:
    """Return a table in whole numbers, -127..127, and what each column is to be multiplied by."""
    scale = np.maximum(np.abs(table).max(0) / 127, 1e-9)
    return np.rint(table / scale).astype(np.int8), scale.astype(np.float32)


if __name__ == "__main__":
    main()
