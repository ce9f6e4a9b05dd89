"""Reads Python that a model wrote, and computes what it returns, without running it.

The text is parsed, and its tree is walked by simpleeval: no import, no attribute but methods of plain values, no large
value, and a bound on all work together.
"""

from __future__ import annotations

import ast
import builtins
import math
import re
import warnings
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Sequence,
    ValuesView,
)
from copy import deepcopy
from functools import partial
from itertools import takewhile
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

from simpleeval import BASIC_ALLOWED_ATTRS, DEFAULT_OPERATORS, EvalWithCompoundTypes

from router.profiling.answer_text import FENCE

# of one value: characters, elements and 32 bits of integers, all levels together
MAX_SIZE = 5_000
MAX_BITS = 8_000  # of a power
MAX_WORK = 100_000  # sizes of all values that an answer computes

_FORMAT = re.compile(r"[<>^]?[-+ ]?0?\d{0,2}[,_]?(\.\d{1,2})?[bdefgnosxX%]?")
_PADDING = {"center", "ljust", "rjust", "zfill"}
_UNBOUNDED = {
    "encode",
    "expandtabs",
    "format",
    "format_map",
    "from_bytes",
    "fromkeys",
    "to_bytes",
    "translate",
}


class TooMuchWorkError(Exception):
    """A value, or the work of an answer, is too large or of a kind that is not computed."""


class _Jump(Exception):  # noqa: N818  no error
    """A return, break or continue: its node's type, and the value."""


def _few(function: Callable[..., Any], most: int = MAX_SIZE) -> Callable[..., Any]:

    def limited(*args: Any) -> Any:
        if any(isinstance(arg, int | float) and abs(arg) > most for arg in args):
            raise TooMuchWorkError
        return function(*args)

    return limited


def _power(base: Any, exponent: Any, modulus: int | None = None) -> Any:
    if modulus is not None:
        return _few(pow, 2**256)(base, exponent, modulus)
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise TooMuchWorkError
    return base**exponent


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        raise TooMuchWorkError  # its widths have no limit
    return left % right


def _round(number: Any, digits: int | None = None) -> Any:
    return round(
        number, digits if digits is None else min(max(digits, -MAX_BITS), MAX_BITS)
    )


def _listed(make: Callable[..., Iterable[Any]], *args: Any, **named: Any) -> list[Any]:
    return list(make(*args, **named))


_MATH = {
    name: _few(found, 1_000) if name in {"comb", "factorial", "perm"} else found
    for name, found in vars(math).items()
    if not name.startswith("_")
}
_PLAIN = "abs all any bin bool chr dict divmod float hex int len list max min ord range set sorted str sum tuple"
_FUNCTIONS = {
    **_MATH,
    **{name: getattr(builtins, name) for name in _PLAIN.split()},
    **{
        name: partial(_listed, getattr(builtins, name))
        for name in ("enumerate", "filter", "map", "reversed", "zip")
    },
    "isinstance": partial(isinstance),  # the bare one is refused
    "pow": _power,
    "round": _round,
}
_GROUPS = (list, tuple, set, frozenset, dict)
_DATA = (int, float, str, range, slice, SimpleNamespace, type(None), *_GROUPS)


def size(value: Any) -> int:
    total, left = 0, [value]
    while left:
        item = left.pop()
        total += 1 + (item.bit_length() // 32 if isinstance(item, int) else 0)
        total += len(item) if isinstance(item, (str, range, *_GROUPS)) else 0
        if total > MAX_SIZE:
            raise TooMuchWorkError
        if isinstance(item, _GROUPS):
            left += [*item, *item.values()] if isinstance(item, dict) else item
    return total


class SafeCode(EvalWithCompoundTypes):  # type: ignore[misc]  # it has no types
    """Evaluates a parsed program: functions, assignments, conditions, loops and expressions."""

    names: dict[str, Any]

    def __init__(self) -> None:
        attributes = {
            kind: names - _UNBOUNDED for kind, names in BASIC_ALLOWED_ATTRS.items()
        }
        attributes[SimpleNamespace] = set(_MATH)
        operators = {**DEFAULT_OPERATORS, ast.Pow: _power, ast.Mod: _modulo}
        super().__init__(
            operators, dict(_FUNCTIONS), {"math": SimpleNamespace(**_MATH)}, attributes
        )
        self.ATTR_INDEX_FALLBACK = False
        self._left = MAX_WORK
        handlers: dict[type[ast.AST], Callable[[Any], Any]] = {
            # math is there, no other module
            **dict.fromkeys((ast.Import, ast.ImportFrom, ast.Pass), lambda _: None),
            **dict.fromkeys((ast.Return, ast.Break, ast.Continue), self._jump),
            **dict.fromkeys((ast.Assign, ast.AnnAssign), self._assign),
            **dict.fromkeys(
                (ast.ListComp, ast.GeneratorExp),
                lambda n: list(self._elements(n, n.elt)),
            ),
            ast.SetComp: lambda n: set(self._elements(n, n.elt)),
            ast.DictComp: lambda n: dict(
                self._elements(n, ast.Tuple([n.key, n.value]))
            ),
            ast.Attribute: self._attribute,
            ast.AugAssign: self._augment,
            ast.Call: self._call,
            ast.For: lambda n: self._repeat(
                n, map(partial(self._bind, n.target), self._eval(n.iter))
            ),
            ast.FormattedValue: self._formatted,
            ast.FunctionDef: lambda n: self._bind(
                ast.Name(n.name), partial(self._enter, n, self.names)
            ),
            ast.If: lambda n: self._run(n.body if self._eval(n.test) else n.orelse),
            ast.Lambda: lambda n: partial(self._enter, n, self.names),
            ast.While: lambda n: self._repeat(
                n, iter(lambda: bool(self._eval(n.test)), False)
            ),
        }
        self.nodes |= handlers

    def _eval(self, node: ast.AST) -> Any:
        found = self.nodes[type(node)](node)
        return self._counted(
            list(found)
            if isinstance(found, KeysView | ValuesView | ItemsView)
            else found
        )

    def _counted(self, value: Any) -> Any:
        self._left -= size(value)
        if self._left < 0 or not (isinstance(value, _DATA) or callable(value)):
            raise TooMuchWorkError
        return value

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._eval(statement)

    def _jump(self, node: Any) -> None:
        raise _Jump(
            type(node), self._eval(node.value) if getattr(node, "value", None) else None
        )

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
        self._bind(
            node.target,
            self.operators[type(node.op)](
                self._eval(node.target), self._eval(node.value)
            ),
        )

    def _repeat(self, node: Any, turns: Iterator[Any]) -> None:
        for _ in turns:
            try:
                self._run(node.body)
            except _Jump as jump:
                if jump.args[0] is ast.Return:
                    raise
                if jump.args[0] is ast.Break:
                    return
        self._run(node.orelse)

    def _elements(self, node: Any, element: ast.expr) -> Iterator[Any]:
        before, self.names = self.names, dict(self.names)
        for _ in self._loops(node.generators):
            yield self._eval(element)
        self.names = before

    def _loops(self, loops: list[ast.comprehension]) -> Iterator[None]:
        if not loops:
            yield
            return
        for item in self._eval(loops[0].iter):
            self._bind(loops[0].target, item)
            if all(self._eval(test) for test in loops[0].ifs):
                yield from self._loops(loops[1:])

    def _enter(
        self,
        node: ast.FunctionDef | ast.Lambda,
        around: dict[str, Any],
        *args: Any,
        **named: Any,
    ) -> Any:
        names = [arg.arg for arg in node.args.args]
        late = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
        given = {**dict(zip(names, args, strict=False)), **named}
        if len(args) > len(names) or named.keys() - set(names):
            raise TypeError
        bound = {
            name: given[name] if name in given else self._eval(late[name])
            for name in names
        }
        before, self.names = self.names, {**around, **bound}
        try:
            return (
                self._eval(node.body)
                if isinstance(node, ast.Lambda)
                else self._run(node.body)
            )
        except _Jump as jump:
            return jump.args[1]
        finally:
            self.names = before

    def _call(self, node: ast.Call) -> Any:
        args: list[Any] = []
        for arg in node.args:
            args += (
                self._eval(arg.value)
                if isinstance(arg, ast.Starred)
                else [self._eval(arg)]
            )
        return self._eval(node.func)(
            *args, **{str(word.arg): self._eval(word.value) for word in node.keywords}
        )

    def _attribute(self, node: ast.Attribute) -> Any:
        found = self._eval_attribute(node)
        return (
            partial(self._method, found)
            if callable(found) and node.attr not in _MATH
            else found
        )

    def _method(self, method: Any, *args: Any, **named: Any) -> Any:
        self._counted(method.__self__)  # each time: it may have grown
        return (_few(method) if method.__name__ in _PADDING else method)(*args, **named)

    def _formatted(self, node: ast.FormattedValue) -> str:
        how = self._eval(node.format_spec) if node.format_spec else ""
        if node.conversion not in {-1, ord("s")} or not _FORMAT.fullmatch(how):
            raise TooMuchWorkError
        return format(self._eval(node.value), how)


def _parse(text: str) -> ast.Module:
    if block := FENCE.search(text):
        return ast.parse(dedent(block[1]))
    try:
        return ast.parse(text.strip().strip("`"))
    except SyntaxError:
        lines = text.splitlines()
        start = next(
            number for number, line in enumerate(lines) if line.startswith("def ")
        )
        after = takewhile(lambda line: not line[:1].strip(), lines[start + 1 :])
        return ast.parse("\n".join([lines[start], *after]))


def compute(
    text: str, function: str | None, calls: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return what a function of a text, a program or prose around one, returns for each list of arguments.

    Without a name it is what the program defines last; a program may be one expression as well. A value that is no function
    stands for all that it would return. Any ``Exception``: the text is no program, computes too much, or fails.
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
