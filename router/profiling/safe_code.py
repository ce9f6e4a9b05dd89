"""Reads Python that a model wrote, and computes what it returns, without running it.

The text is parsed, and its tree is walked by simpleeval: no import, no attribute but the methods listed here, no large
value, and a bound on all work together.
"""

from __future__ import annotations

import ast
import builtins
import math
import re
import warnings
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import takewhile
from textwrap import dedent
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from simpleeval import DEFAULT_OPERATORS, EvalWithCompoundTypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_SIZE = 5_000  # of one value: characters, elements and 32 bits of integers, all levels together
MAX_BITS = 8_000  # of a power
MAX_WORK = 300_000  # sizes of all values that an answer computes

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FORMAT = re.compile(r"[<>^]?[-+ ]?0?\d{0,2}[,_]?(\.\d{1,2})?[bdefgnosxX%]?")
_METHODS: dict[type | None, set[str]] = {
    str: set(
        "capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper "
        "join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip "
        "split splitlines startswith strip swapcase title upper zfill center".split()
    ),
    list: set("append copy count extend index insert pop remove reverse sort".split()),
    tuple: {"count", "index"},
    dict: set("copy get items keys pop setdefault update values".split()),
    set: set("add copy difference discard intersection issubset issuperset remove symmetric_difference union".split()),
    int: {"bit_length"},
    float: {"is_integer"},
    None: set(),
}


class TooMuch(Exception):
    """A value or the work of an answer is too large."""


class _Return(Exception):
    pass


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


def _few(function: Callable[..., Any], most: int = MAX_SIZE) -> Callable[..., Any]:
    """Return a function that refuses numbers beyond a size."""

    def limited(*args: Any) -> Any:
        if any(isinstance(arg, int | float) and abs(arg) > most for arg in args):
            raise TooMuch
        return function(*args)

    return limited


def _power(base: Any, exponent: Any, modulus: int | None = None) -> Any:
    if modulus is not None:
        return _few(pow, 2**256)(base, exponent, modulus)
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise TooMuch
    return base**exponent


def _round(number: Any, digits: int | None = None) -> Any:
    return round(number, digits if digits is None else min(max(digits, -MAX_BITS), MAX_BITS))


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise TooMuch  # its widths have no limit
    return left % right


_MATH = {
    name: getattr(math, name)
    for name in "ceil e fabs floor fsum gcd hypot inf isqrt lcm log log10 log2 pi pow prod sqrt trunc".split()
} | {name: _few(getattr(math, name), 1_000) for name in ("comb", "factorial", "perm")}
_PLAIN = "abs all any bin bool chr dict divmod float frozenset hex int len list max min oct ord range set sorted str sum"
_FUNCTIONS = {
    **_MATH,
    **{name: getattr(builtins, name) for name in [*_PLAIN.split(), "tuple"]},
    **{
        name: lambda *args, _make=getattr(builtins, name), **how: list(_make(*args, **how))
        for name in ("enumerate", "filter", "map", "reversed", "zip")
    },
    "pow": _power,
    "round": _round,
}
_DATA = (int, float, str, bool, type(None), list, tuple, set, frozenset, dict, range, slice)
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


def size(value: Any) -> int:
    """Return a value's size.

    Raises:
        TooMuch: It is over ``MAX_SIZE``.
    """
    total, left = 0, [value]
    while left:
        item = left.pop()
        total += 1
        if isinstance(item, int):
            total += item.bit_length() // 32
        elif isinstance(item, str | list | tuple | set | frozenset | dict | range):
            total += len(item)
        if total > MAX_SIZE:
            raise TooMuch
        if isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            left += item
    return total


class SafeCode(EvalWithCompoundTypes):  # type: ignore[misc]  # it has no types
    """Evaluates a parsed program's functions."""

    def __init__(self) -> None:
        operators = {**DEFAULT_OPERATORS, ast.Pow: _power, ast.Mod: _modulo}
        names = {"math": SimpleNamespace(**_MATH)}
        super().__init__(operators, dict(_FUNCTIONS), names, {**_METHODS, SimpleNamespace: set(_MATH)})
        self._left = MAX_WORK
        self.ATTR_INDEX_FALLBACK = False
        self.nodes |= {
            ast.Assign: self._assign,
            ast.AnnAssign: self._assign,
            ast.AugAssign: self._augment,
            ast.Attribute: self._attribute,
            ast.Break: partial(self._stop, _Break),
            ast.Call: self._call,
            ast.Continue: partial(self._stop, _Continue),
            ast.DictComp: lambda n: {self._eval(n.key): self._eval(n.value) for _ in self._scoped(n.generators)},
            ast.For: self._for,
            ast.FormattedValue: self._formatted,
            ast.FunctionDef: self._define,
            ast.GeneratorExp: lambda n: [self._eval(n.elt) for _ in self._scoped(n.generators)],
            ast.If: lambda n: self._run(n.body if self._eval(n.test) else n.orelse),
            ast.Import: lambda _: None,  # what is not listed above is not found
            ast.ImportFrom: lambda _: None,
            ast.Lambda: lambda n: partial(self._enter, n, self.names),
            ast.ListComp: lambda n: [self._eval(n.elt) for _ in self._scoped(n.generators)],
            ast.Pass: lambda _: None,
            ast.Return: partial(self._stop, _Return),
            ast.SetComp: lambda n: {self._eval(n.elt) for _ in self._scoped(n.generators)},
            ast.While: self._while,
        }

    def _eval(self, node: ast.AST) -> Any:
        found = self.nodes[type(node)](node)
        return self._counted(list(found) if isinstance(found, _VIEWS) else found)

    def _counted(self, value: Any) -> Any:
        self._left -= size(value)
        if self._left < 0 or not (isinstance(value, (*_DATA, SimpleNamespace)) or callable(value)):
            raise TooMuch
        return value

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._eval(statement)

    def _stop(self, kind: type[Exception], node: Any) -> None:
        raise kind(self._eval(node.value) if getattr(node, "value", None) else None)

    def _bind(self, target: Any, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Subscript):
            self._eval(target.value)[self._eval(target.slice)] = value
        else:
            for part, item in zip(target.elts, value, strict=True):
                self._bind(part, item)

    def _assign(self, node: Any) -> None:
        value = self._eval(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._bind(target, value)

    def _augment(self, node: ast.AugAssign) -> None:
        self._bind(node.target, self.operators[type(node.op)](self._eval(node.target), self._eval(node.value)))

    def _repeat(self, node: Any, turns: Iterator[Any]) -> None:
        for _ in turns:
            try:
                self._run(node.body)
            except _Continue:
                continue
            except _Break:
                return
        self._run(node.orelse)

    def _for(self, node: ast.For) -> None:
        self._repeat(node, (self._bind(node.target, item) for item in self._eval(node.iter)))

    def _while(self, node: ast.While) -> None:
        self._repeat(node, iter(lambda: bool(self._eval(node.test)), False))

    @contextmanager
    def _scope(self, names: dict[str, Any]) -> Iterator[None]:
        before, self.names = self.names, names
        try:
            yield
        finally:
            self.names = before

    def _scoped(self, generators: list[ast.comprehension]) -> Iterator[None]:
        with self._scope(dict(self.names)):
            yield from self._loops(generators)

    def _loops(self, generators: list[ast.comprehension]) -> Iterator[None]:
        if not generators:
            yield
            return
        for item in self._eval(generators[0].iter):
            self._bind(generators[0].target, item)
            if all(self._eval(test) for test in generators[0].ifs):
                yield from self._loops(generators[1:])

    def _define(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = partial(self._enter, node, self.names)

    def _enter(self, node: ast.FunctionDef | ast.Lambda, around: dict[str, Any], *args: Any, **named: Any) -> Any:
        """Call a function that the text defines."""
        names = [arg.arg for arg in node.args.args]
        late = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
        given = {**dict(zip(names, args, strict=False)), **named}
        if len(args) > len(names) or named.keys() - set(names):
            raise TypeError
        bound = {name: given[name] if name in given else self._eval(late[name]) for name in names}
        with self._scope({**around, **bound}):
            if isinstance(node, ast.Lambda):
                return self._eval(node.body)
            try:
                self._run(node.body)
            except _Return as found:
                return found.args[0]
        return None

    def _call(self, node: ast.Call) -> Any:
        args: list[Any] = []
        for arg in node.args:
            args += self._eval(arg.value) if isinstance(arg, ast.Starred) else [self._eval(arg)]
        return self._eval(node.func)(*args, **{str(word.arg): self._eval(word.value) for word in node.keywords})

    def _attribute(self, node: ast.Attribute) -> Any:
        found = self._eval_attribute(node)
        return partial(self._method, found) if callable(found) and not hasattr(math, node.attr) else found

    def _method(self, method: Any, *args: Any, **named: Any) -> Any:
        """Call a method; that it may change its object, time and again, is why the object is counted each time."""
        self._counted(method.__self__)
        limited = _few(method) if method.__name__ in {"center", "ljust", "rjust", "zfill"} else method
        return limited(*args, **named)

    def _formatted(self, node: ast.FormattedValue) -> str:
        how = self._eval(node.format_spec) if node.format_spec else ""
        value = self._eval(node.value)
        if node.conversion not in {-1, ord("s")} or not _FORMAT.fullmatch(how):
            raise TooMuch
        return format(value, how)


def _parse(text: str) -> ast.Module:
    """Parse a fenced block, or else the whole text, or else its first function."""
    if block := _FENCE.search(text):
        return ast.parse(dedent(block[1]))
    try:
        return ast.parse(text.strip().strip("`"))
    except SyntaxError:
        lines = text.splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("def "))
        after = takewhile(lambda line: not line[:1].strip(), lines[start + 1 :])
        return ast.parse("\n".join([lines[start], *after]))


def compute(text: str, function: str | None, calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what a function of a text returns for each list of arguments.

    Args:
        text: A program, or prose around one.
        function: Its name; None: what the program defines last. A program may be one expression as well.
        calls: Arguments. A value that is no function stands for all that it would return.

    Raises:
        Exception: Of any kind: the text is no program, computes too much, or fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of doubtful escapes
        body = _parse(text).body
    code = SafeCode()
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        found = code.eval("", body[0])
    else:
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.Assign):
                code.eval("", statement)
        found = code.names[function or [*code.names][-1]]
    return [found(*deepcopy(args)) if callable(found) else found for args in calls]
