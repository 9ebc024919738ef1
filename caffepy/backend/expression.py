"""Elementwise formulas, written once as plain Python and compiled for each device.

Owns the small language: which Python a formula may use, and its text in Python (for numba) and in CUDA C.
Layers and update rules define formulas; only the backends compile them.

    @expression
    def leaky_relu(x: Each, slope: Scalar) -> Each:
        return x if x > 0 else slope * x

    backend.apply(leaky_relu, (x, 0.1), (y,))

A formula takes float32 values and returns one value or a tuple of them. It may assign local names, use
+ - * / **, comparisons, `and`, `or`, `not`, `a if c else b`, and call the functions in `FUNCTIONS`. It may use
module-level names that hold numbers. All arithmetic is float32.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from enum import Enum
from functools import cache, cached_property
from typing import Any

from caffepy.errors import ConfigError


class Kind(Enum):
    """Meaning of a formula's argument in a call on whole arrays."""

    EACH = "Each"
    CHANNEL = "Channel"
    SCALAR = "Scalar"


_KINDS = tuple(kind.value for kind in Kind)


Each = float
"""Annotation: one value per element."""
Channel = float
"""Annotation: one value per position along the axis passed to `apply` or `reduce`."""
Scalar = float
"""Annotation: one number per call."""

FUNCTIONS = {
    "exp": "expf",
    "log": "logf",
    "log1p": "log1pf",
    "sqrt": "sqrtf",
    "tanh": "tanhf",
    "fabs": "fabsf",
    "floor": "floorf",
    "isfinite": "isfinite",
    "min": "smaller_of",
    "max": "larger_of",
}
"""Functions that a formula may call, with their names in CUDA C; in Python those of `math`, min and max.

On a device min and max take two values and give NaN where either is NaN, unlike C's fminf and fmaxf.
"""

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.And: "&&",
    ast.Or: "||",
    ast.USub: "-",
    ast.Not: "!",
}


def cuda_name(name: str) -> str:
    """Return a formula variable's name in CUDA C, prefixed so that it cannot be a keyword (`new`, `double`)."""
    return f"v_{name}"


class Expression:
    """A formula that backends run over arrays.

    Args:
        function: plain Python within the language above, its parameters annotated Each, Channel or Scalar.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        annotations = [p.annotation for p in inspect.signature(function).parameters.values()]
        if any(annotation not in _KINDS for annotation in annotations):
            raise ConfigError(
                f"formula '{self.name}': annotate each parameter as Each, Channel or Scalar, and begin the file with "
                "'from __future__ import annotations'"
            )
        self.kinds = [Kind(annotation) for annotation in annotations]
        self.parameters = list(inspect.signature(function).parameters)
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        """Evaluate the formula on numbers or NumPy arrays; the tests' oracle."""
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"Expression({self.name})"

    def with_copies(self, count: int) -> Expression:
        """Return the formula with `count` copies of its first result appended."""
        return self if count == 0 else _returning(self, f"{count}_copies", (ast.unparse(self._returned()[0]),) * count)

    def returning(self, what: str, value: str) -> Expression:
        """Return the formula with one more result appended.

        Args:
            what: suffix of the new formula's name.
            value: the result, in the formula's language, of its arguments and variables.
        """
        return _returning(self, what, (value,))

    def of(self, argument: str, formula: Expression) -> Expression:
        """Return the composition with another formula, whose result replaces `argument`.

        Args:
            argument: an argument of this formula, replaced by the other formula's arguments. Arguments of equal names
                are merged and keep the kind of this formula.
            formula: returns one value. Its variables' names must differ from this formula's.
        """
        return _composed(self, argument, formula)

    def unless(self, flag: str, kept: tuple[str, ...]) -> Expression:
        """Return a formula that returns arguments unchanged if a flag is set.

        Args:
            flag: name of an additional Scalar argument; set if above 0.
            kept: the arguments, one per result.
        """
        return _unless(self, flag, kept)

    @cached_property
    def _statements(self) -> list[ast.stmt]:
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        body = tree.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        return body

    @cached_property
    def output_count(self) -> int:
        """Number of results."""
        return len(self._returned())

    @property
    def _return_value(self) -> ast.expr:
        last = self._statements[-1]
        assert isinstance(last, ast.Return) and last.value is not None, f"{self.name} must end in return"
        return last.value

    def _returned(self) -> list[ast.expr]:
        value = self._return_value
        return list(value.elts) if isinstance(value, ast.Tuple) else [value]

    def _assignments(self) -> list[tuple[str, ast.expr]]:
        assignments = []
        for statement in self._statements[:-1]:
            assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name), (
                f"{self.name}: only assignments to one name may come before return"
            )
            assignments.append((statement.targets[0].id, statement.value))
        return assignments

    def python_lines(self, outputs: list[str]) -> list[str]:
        """Return the formula as Python statements that assign `outputs`; literals are float32, for numba."""
        lines = [f"{name} = {self._python(value)}" for name, value in self._assignments()]
        return lines + [f"{o} = {self._python(v)}" for o, v in zip(outputs, self._returned(), strict=True)]

    def cuda_lines(self, outputs: list[str]) -> list[str]:
        """Return the formula as CUDA C statements that assign `outputs`; variables are named by `cuda_name`."""
        declared: set[str] = set()
        lines = []
        for name, value in self._assignments():
            lines.append(f"{'' if name in declared else 'float '}{cuda_name(name)} = {self._cuda(value)};")
            declared.add(name)
        return lines + [f"{o} = {self._cuda(v)};" for o, v in zip(outputs, self._returned(), strict=True)]

    @property
    def _globals(self) -> dict[str, Any]:
        return self.function.__globals__

    def _number(self, node: ast.Name) -> float | None:
        if node.id in self.parameters or node.id in {name for name, _ in self._assignments()}:
            return None
        value = self._globals.get(node.id)
        assert isinstance(value, int | float), f"{self.name}: '{node.id}' is no argument and no number"
        return float(value)

    def _python(self, node: ast.expr) -> str:
        expression = self

        class Rewrite(ast.NodeTransformer):
            def visit_Constant(self, constant: ast.Constant) -> ast.expr:
                return _parse(f"float32({_value(constant)!r})")

            def visit_Name(self, name: ast.Name) -> ast.expr:
                number = expression._number(name) if name.id not in FUNCTIONS else None
                return name if number is None else self.visit_Constant(ast.Constant(number))

        return ast.unparse(Rewrite().visit(_parse(ast.unparse(node))))

    def _cuda(self, node: ast.expr) -> str:
        match node:
            case ast.Constant():
                return f"{_value(node)!r}f"
            case ast.Name():
                number = self._number(node)
                return cuda_name(node.id) if number is None else f"{number!r}f"
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return f"powf({self._cuda(left)}, {self._cuda(right)})"
            case ast.BinOp(left=left, op=operator, right=right):
                return f"({self._cuda(left)} {_OPERATORS[type(operator)]} {self._cuda(right)})"
            case ast.UnaryOp(op=operator, operand=operand):
                return f"({_OPERATORS[type(operator)]}{self._cuda(operand)})"
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                return f"({self._cuda(left)} {_OPERATORS[type(operator)]} {self._cuda(right)})"
            case ast.BoolOp(op=operator, values=values):
                return "(" + f" {_OPERATORS[type(operator)]} ".join(map(self._cuda, values)) + ")"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self._cuda(test)} ? {self._cuda(body)} : {self._cuda(orelse)})"
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in FUNCTIONS:
                return f"{FUNCTIONS[name]}({', '.join(map(self._cuda, arguments))})"
        raise AssertionError(f"{self.name}: a formula may not use {ast.unparse(node)}")


class _Derived(Expression):
    """A formula derived from others.

    Args:
        name: the formula's name.
        sources: the formulas that it is derived from; the first one defines its source file.
        kinds: kind of each argument, by name.
        assignments: the statements before `return`.
        returned: the results.
    """

    def __init__(
        self,
        name: str,
        sources: tuple[Expression, ...],
        kinds: dict[str, Kind],
        assignments: list[tuple[str, ast.expr]],
        returned: list[ast.expr],
    ) -> None:
        super().__init__(sources[0].function)
        self.name, self.parameters, self.kinds = name, list(kinds), list(kinds.values())
        self._sources, self._own_assignments, self._own_returned = sources, assignments, returned

    def __call__(self, *arguments: Any) -> Any:
        values = dict(zip(self.parameters, arguments, strict=True))

        def evaluate(value: ast.expr) -> Any:
            return eval(ast.unparse(value), self._globals, values)

        for name, value in self._own_assignments:
            values[name] = evaluate(value)
        results = tuple(map(evaluate, self._own_returned))
        return results if len(results) > 1 else results[0]

    @property
    def _globals(self) -> dict[str, Any]:
        return {name: value for source in reversed(self._sources) for name, value in source._globals.items()}

    def _assignments(self) -> list[tuple[str, ast.expr]]:
        return self._own_assignments

    def _returned(self) -> list[ast.expr]:
        return self._own_returned


def _kinds(formula: Expression) -> dict[str, Kind]:
    return dict(zip(formula.parameters, formula.kinds, strict=True))


# Kernels are cached by the formula object, so equal formulas must be one object.


@cache
def _returning(original: Expression, what: str, values: tuple[str, ...]) -> Expression:
    returned = original._returned() + [_parse(value) for value in values]
    return _Derived(f"{original.name}_{what}", (original,), _kinds(original), original._assignments(), returned)


@cache
def _composed(outer: Expression, argument: str, inner: Expression) -> Expression:
    kinds = {name: kind for name, kind in (_kinds(inner) | _kinds(outer)).items() if name != argument}
    own, others = ({name for name, _ in formula._assignments()} for formula in (outer, inner))
    assert argument in outer.parameters and not others & (own | _kinds(outer).keys()) and not own & _kinds(inner).keys()
    (value,) = inner._returned()
    assignments = [*inner._assignments(), (argument, value), *outer._assignments()]
    return _Derived(f"{outer.name}_{inner.name}", (outer, inner), kinds, assignments, outer._returned())


@cache
def _unless(original: Expression, flag: str, kept: tuple[str, ...]) -> Expression:
    pairs = zip(kept, original._returned(), strict=True)
    returned = [_parse(f"{name} if {flag} > 0 else {ast.unparse(value)}") for name, value in pairs]
    kinds = {**_kinds(original), flag: Kind.SCALAR}
    return _Derived(f"{original.name}_unless_{flag}", (original,), kinds, original._assignments(), returned)


def _value(constant: ast.Constant) -> float:
    assert isinstance(constant.value, int | float), f"{constant.value!r} is no number"
    return float(constant.value)


def _parse(text: str) -> ast.expr:
    parsed = ast.parse(text, mode="eval")
    assert isinstance(parsed, ast.Expression)
    return parsed.body


def expression(function: Callable[..., Any]) -> Expression:
    """Make a formula of a function; the module's docstring defines the language."""
    return Expression(function)
