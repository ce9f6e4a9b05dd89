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
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

from simpleeval import BASIC_ALLOWED_ATTRS, DEFAULT_OPERATORS, EvalWithCompoundTypes

from router.profiling.answer_text import FENCE

# The largest size of a value: 1 for each character, element and 32 bits of an integer, at all levels together.
MAX_SIZE = 5_000
MAX_POWER_BITS = 8_000
MAX_WORK = 100_000  # sizes of all values that an answer computes
MAX_COMBINATIONS = 1_000  # argument of comb, factorial and perm
MAX_MODULAR = 2**256  # argument of a power with a modulus

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

Names = dict[str, Any]


class TooMuchWorkError(Exception):
    """A value, or the work of an answer, is too large or of a kind that is not computed."""


class _Jump(Exception):  # noqa: N818  no error
    """A return, break or continue.

    Attributes:
        statement: The type of its node.
        value: What it returns.
    """

    def __init__(self, statement: type[ast.stmt], value: Any) -> None:
        super().__init__(statement, value)
        self.statement = statement
        self.value = value


def _limited(
    function: Callable[..., Any], largest: int = MAX_SIZE
) -> Callable[..., Any]:
    """Return a function that refuses numbers beyond a bound."""

    def limited(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, int | float) and abs(arg) > largest:
                raise TooMuchWorkError
        return function(*args)

    return limited


def _power(base: Any, exponent: Any, modulus: int | None = None) -> Any:
    if modulus is not None:
        return _limited(pow, MAX_MODULAR)(base, exponent, modulus)
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_POWER_BITS:
        raise TooMuchWorkError
    return base**exponent


def _modulo(left: Any, right: Any) -> Any:
    # The widths of a text's format have no limit.
    if isinstance(left, str):
        raise TooMuchWorkError
    return left % right


def _round(number: Any, digits: int | None = None) -> Any:
    if digits is None:
        return round(number)
    return round(number, min(max(digits, -MAX_POWER_BITS), MAX_POWER_BITS))


def _make_list(
    make: Callable[..., Iterable[Any]], *args: Any, **named_args: Any
) -> list[Any]:
    return list(make(*args, **named_args))


def _math_functions() -> Names:
    """Return what the module math has, with bounds on what grows fast."""
    functions = {
        name: value for name, value in vars(math).items() if not name.startswith("_")
    }
    for name in ("comb", "factorial", "perm"):
        functions[name] = _limited(functions[name], MAX_COMBINATIONS)
    return functions


def _all_functions() -> Names:
    """Return the functions that a program may call by name."""
    functions = dict(_MATH)
    for name in _PLAIN.split():
        functions[name] = getattr(builtins, name)
    # An iterator could be read for ever, so these make lists.
    for name in ("enumerate", "filter", "map", "reversed", "zip"):
        functions[name] = partial(_make_list, getattr(builtins, name))
    functions["isinstance"] = partial(isinstance)  # simpleeval refuses the bare one
    functions["pow"] = _power
    functions["round"] = _round
    return functions


_MATH = _math_functions()
_PLAIN = "abs all any bin bool chr dict divmod float hex int len list max min ord range set sorted str sum tuple"
_FUNCTIONS = _all_functions()
_GROUPS = (list, tuple, set, frozenset, dict)
_SIZED = (str, range, *_GROUPS)
_VIEWS = (KeysView, ValuesView, ItemsView)
_DATA = (int, float, str, range, slice, SimpleNamespace, type(None), *_GROUPS)


def size(value: Any) -> int:
    """Return the size of a value; ``TooMuchWorkError``: it is above ``MAX_SIZE``."""
    total = 0
    unread = [value]
    while unread:
        item = unread.pop()
        total += 1
        if isinstance(item, int):
            total += item.bit_length() // 32
        elif isinstance(item, _SIZED):
            total += len(item)
        if total > MAX_SIZE:
            raise TooMuchWorkError
        if isinstance(item, dict):
            unread += item.keys()
            unread += item.values()
        elif isinstance(item, _GROUPS):
            unread += item
    return total


class SafeCode(EvalWithCompoundTypes):  # type: ignore[misc]  # it has no types
    """Evaluates a parsed program: functions, assignments, conditions, loops and expressions."""

    names: Names

    def __init__(self) -> None:
        attributes = {
            kind: names - _UNBOUNDED for kind, names in BASIC_ALLOWED_ATTRS.items()
        }
        attributes[SimpleNamespace] = set(_MATH)
        operators = {**DEFAULT_OPERATORS, ast.Pow: _power, ast.Mod: _modulo}
        super().__init__(
            operators=operators,
            functions=dict(_FUNCTIONS),
            names={"math": SimpleNamespace(**_MATH)},
            allowed_attrs=attributes,
        )
        self.ATTR_INDEX_FALLBACK = False
        self._work_left = MAX_WORK
        self.nodes |= self._handlers()

    def _handlers(self) -> dict[type[ast.AST], Callable[[Any], Any]]:
        return {
            # The module math is there, and no other.
            ast.Import: self._do_nothing,
            ast.ImportFrom: self._do_nothing,
            ast.Pass: self._do_nothing,
            ast.Return: self._jump,
            ast.Break: self._jump,
            ast.Continue: self._jump,
            ast.Assign: self._assign,
            ast.AnnAssign: self._assign_annotated,
            ast.AugAssign: self._augment,
            ast.ListComp: self._list_comprehension,
            ast.GeneratorExp: self._list_comprehension,
            ast.SetComp: self._set_comprehension,
            ast.DictComp: self._dict_comprehension,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.For: self._for,
            ast.While: self._while,
            ast.If: self._if,
            ast.FormattedValue: self._formatted,
            ast.FunctionDef: self._define,
            ast.Lambda: self._function,
        }

    def _eval(self, node: ast.AST) -> Any:
        value = self.nodes[type(node)](node)
        if isinstance(value, _VIEWS):
            value = list(value)
        return self._counted(value)

    def _counted(self, value: Any) -> Any:
        """Return a value, and count its size as work; ``TooMuchWorkError``: it is too much, or no plain value."""
        self._work_left -= size(value)
        is_plain = isinstance(value, _DATA) or callable(value)
        if self._work_left < 0 or not is_plain:
            raise TooMuchWorkError
        return value

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._eval(statement)

    def _do_nothing(self, _node: ast.stmt) -> None:
        pass

    def _jump(self, node: ast.Return | ast.Break | ast.Continue) -> None:
        value = None
        if isinstance(node, ast.Return) and node.value is not None:
            value = self._eval(node.value)
        raise _Jump(type(node), value)

    def _bind(self, target: Any, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Subscript):
            self._eval(target.value)[self._eval(target.slice)] = value
        else:
            for part, item in zip(target.elts, value, strict=True):
                self._bind(part, item)

    def _assign(self, node: ast.Assign) -> None:
        value = self._eval(node.value)
        for target in node.targets:
            self._bind(target, value)

    def _assign_annotated(self, node: Any) -> None:
        self._bind(node.target, self._eval(node.value))

    def _augment(self, node: ast.AugAssign) -> None:
        operator = self.operators[type(node.op)]
        value = operator(self._eval(node.target), self._eval(node.value))
        self._bind(node.target, value)

    def _if(self, node: ast.If) -> None:
        self._run(node.body if self._eval(node.test) else node.orelse)

    def _for(self, node: ast.For) -> None:
        self._repeat(node, self._bind_each(node))

    def _bind_each(self, node: ast.For) -> Iterator[None]:
        for item in self._eval(node.iter):
            self._bind(node.target, item)
            yield

    def _while(self, node: ast.While) -> None:
        self._repeat(node, self._while_true(node.test))

    def _while_true(self, test: ast.expr) -> Iterator[None]:
        while self._eval(test):
            yield

    def _repeat(self, node: ast.For | ast.While, turns: Iterator[None]) -> None:
        """Run a loop's body once for each turn."""
        for _ in turns:
            try:
                self._run(node.body)
            except _Jump as jump:
                if jump.statement is ast.Return:
                    raise
                if jump.statement is ast.Break:
                    return
        self._run(node.orelse)

    def _list_comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> list[Any]:
        return list(self._elements(node.generators, node.elt))

    def _set_comprehension(self, node: ast.SetComp) -> set[Any]:
        return set(self._elements(node.generators, node.elt))

    def _dict_comprehension(self, node: ast.DictComp) -> dict[Any, Any]:
        pair = ast.Tuple([node.key, node.value])
        return dict(self._elements(node.generators, pair))

    def _elements(
        self, loops: list[ast.comprehension], element: ast.expr
    ) -> Iterator[Any]:
        """Yield the elements of a comprehension, whose names are its own."""
        names_before = self.names
        self.names = dict(self.names)
        for _ in self._loop(loops):
            yield self._eval(element)
        self.names = names_before

    def _loop(self, loops: list[ast.comprehension]) -> Iterator[None]:
        """Yield once for each time that the element of nested loops is reached."""
        if not loops:
            yield
            return
        outermost, *inner = loops
        for item in self._eval(outermost.iter):
            self._bind(outermost.target, item)
            if all(self._eval(test) for test in outermost.ifs):
                yield from self._loop(inner)

    def _define(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = self._function(node)

    def _function(self, node: ast.FunctionDef | ast.Lambda) -> Callable[..., Any]:
        return partial(self._enter, node, self.names)

    def _enter(
        self,
        node: ast.FunctionDef | ast.Lambda,
        names_around: Names,
        *args: Any,
        **named_args: Any,
    ) -> Any:
        """Call a function that the program defines."""
        arguments = self._arguments(node, args, named_args)
        names_before = self.names
        self.names = {**names_around, **arguments}
        try:
            if isinstance(node, ast.Lambda):
                return self._eval(node.body)
            self._run(node.body)
        except _Jump as jump:
            return jump.value
        else:
            return None
        finally:
            self.names = names_before

    def _arguments(
        self,
        node: ast.FunctionDef | ast.Lambda,
        args: tuple[Any, ...],
        named_args: dict[str, Any],
    ) -> Names:
        """Return what a function's arguments are bound to in a call; ``TypeError``: there are too many."""
        names = [arg.arg for arg in node.args.args]
        if len(args) > len(names) or named_args.keys() - set(names):
            raise TypeError
        passed = {**dict(zip(names, args, strict=False)), **named_args}
        # Defaults belong to the last arguments.
        defaults = dict(
            zip(reversed(names), reversed(node.args.defaults), strict=False)
        )
        arguments: Names = {}
        for name in names:
            if name in passed:
                arguments[name] = passed[name]
            else:
                arguments[name] = self._eval(defaults[name])
        return arguments

    def _call(self, node: ast.Call) -> Any:
        args: list[Any] = []
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                args += self._eval(arg.value)
            else:
                args.append(self._eval(arg))
        function = self._eval(node.func)
        named_args = {str(word.arg): self._eval(word.value) for word in node.keywords}
        return function(*args, **named_args)

    def _attribute(self, node: ast.Attribute) -> Any:
        value = self._eval_attribute(node)
        if callable(value) and node.attr not in _MATH:
            return partial(self._call_method, value)
        return value

    def _call_method(self, method: Any, *args: Any, **named_args: Any) -> Any:
        # Its object is counted each time, for it may have grown.
        self._counted(method.__self__)
        if method.__name__ in _PADDING:
            method = _limited(method)
        return method(*args, **named_args)

    def _formatted(self, node: ast.FormattedValue) -> str:
        how = self._eval(node.format_spec) if node.format_spec else ""
        if node.conversion not in {-1, ord("s")} or not _FORMAT.fullmatch(how):
            raise TooMuchWorkError
        return format(self._eval(node.value), how)


def _parse(text: str) -> ast.Module:
    """Parse the first block of a text, else the text, else the first function in it."""
    if block := FENCE.search(text):
        return ast.parse(dedent(block[1]))
    try:
        return ast.parse(text.strip().strip("`"))
    except SyntaxError:
        return ast.parse(_first_function(text))


def _first_function(text: str) -> str:
    """Return the lines of a text's first function; ``StopIteration``: it has none."""
    lines = iter(text.splitlines())
    function = [next(line for line in lines if line.startswith("def "))]
    for line in lines:
        is_indented = not line[:1].strip()
        if not is_indented:
            break
        function.append(line)
    return "\n".join(function)


def compute(
    text: str, function: str | None, calls: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return what a function of a text, a program or prose around one, returns for each list of arguments.

    Without a name it is what the program defines last; a program may be one expression as well. A value that is no function
    stands for all that it would return. Any ``Exception``: the text is no program, computes too much, or fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text may have doubtful escapes
        program = _parse(text).body
    value = _evaluate(program, function)
    if not callable(value):
        return [value for _ in calls]
    return [value(*deepcopy(args)) for args in calls]


def _evaluate(program: list[ast.stmt], function: str | None) -> Any:
    """Return the value of an expression, or what a program defines under a name; None: the last that it defines."""
    code = SafeCode()
    if len(program) == 1 and isinstance(program[0], ast.Expr):
        return code.eval("", program[0])
    for statement in program:
        if isinstance(statement, ast.FunctionDef | ast.Assign):
            code.eval("", statement)
    return code.names[function or list(code.names)[-1]]
