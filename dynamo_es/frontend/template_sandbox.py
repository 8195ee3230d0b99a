"""Jinja's immutable sandbox with a budget: computing time, and the size of every value that a template makes.

The sandbox keeps a template from the interpreter; it does not keep it from looping for hours or from asking for
gigabytes in one expression. Here

- a tick is put into every loop and macro when the template is compiled; every so many ticks the clock is read,
- operators and calls that can make a large value out of small ones are looked at before they are done,
- what joins or captures text is bounded like the prompt itself.

So between two ticks there is one pass over values of bounded size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TICKS: Final = 256
"""Ticks between two looks at the clock: a tick costs a tenth of a microsecond, a look a third of one."""
_MAX_BITS: Final = 16_384
"""Of whole numbers that are multiplied or raised; templates count messages and shift dates."""
_MAX_FORM: Final = 100
_SIZED: Final = (str, list, tuple)
_TOO_LARGE: Final = "a value exceeds {} characters or items"
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{6})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:(?:[^{}]*\d{6}|[^{}]*\{)")
_SIZED_FILTERS = ("batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap")
_TICK, _JOINED = " tick", " joined"
"""Names of filters that no template can write."""


class OverBudget(SecurityError):
    """A template would take too long or make too much. The text holds nothing of the conversation."""


class Budget:
    """What one rendering may use. Belongs to it.

    Args:
        cpu_s: A clock of computing time, in seconds.
        limit_s: How much.
    """

    def __init__(self, cpu_s: Callable[[], float], limit_s: float) -> None:
        self._cpu_s = cpu_s
        self._limit_s = limit_s
        self._end = cpu_s() + limit_s
        self.left = _TICKS

    def look(self) -> None:
        """Raises ``OverBudget`` when the time is used up."""
        self.left = _TICKS
        if self._cpu_s() > self._end:
            raise OverBudget(f"it took more than {self._limit_s:.3g} s of computing time")


class BudgetedContext(Context):
    """Variables of one rendering, with its budget."""

    budget: Budget | None = None

    def derived(self, locals: dict[str, Any] | None = None) -> BudgetedContext:  # noqa: A002 - Jinja's name
        """That of a block within it."""
        made = super().derived(locals)
        assert isinstance(made, BudgetedContext)
        made.budget = self.budget
        return made


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """See the module. Thread-safe once it is set up.

    Args:
        max_chars: Largest text, and most items of a list, that an expression may make.
        options: Jinja's.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    context_class = BudgetedContext

    def __init__(self, max_chars: int, **options: Any) -> None:
        super().__init__(**options)
        self.max_size = max_chars
        del self.globals["lipsum"]
        self.filters[_TICK] = _tick
        self.filters[_JOINED] = self._join_parts()
        # What macros and blocks have written comes together here.
        self.concat = self._bounded_concat  # type: ignore[method-assign]
        self.filters["join"] = self._bounded_join(self.filters["join"])
        self.filters["replace"] = self._bounded_replace(self.filters["replace"])
        self.filters["format"] = self._bounded_format(self.filters["format"])

    def bound_filters(self) -> None:
        """Bound the numbers that filters take as a width or a count. Call it when all filters are there."""
        for name in _SIZED_FILTERS:
            self.filters[name] = self._sized(self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            tick = nodes.Filter(nodes.Const(None), _TICK, [], [], None, None)
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        _replace_joins(tree)
        tree.set_lineno(tree.lineno)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Jinja's hook: an operator that can make much of little."""
        if operator == "+":
            # The most frequent one by far; what it makes is at most twice as large as what it got.
            result = left + right
            if isinstance(result, _SIZED) and len(result) > self.max_size:
                raise OverBudget(_TOO_LARGE.format(self.max_size))
            return result
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            if type(left) is int and type(right) is int and abs(left) > 1 and left.bit_length() * right > _MAX_BITS:
                raise OverBudget("a number is too large")
        elif isinstance(left, str):
            _check_form(left, _WIDE_PERCENT)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Jinja's hook: a call of a function, a method or a macro. The names leave all others to the arguments."""
        __self._check_numbers(args, kwargs)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and __obj.__name__ in {"join", "replace", "translate"}:
            __self._check_text_call(__obj.__name__, owner, args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            __self._check_size(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's hook: ``format`` of a text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_form(value.__self__, _WIDE_BRACES)
        return wrapped

    # -- bounds ----------------------------------------------------------------------------------------------------

    def _check_size(self, size: int) -> None:
        if size > self.max_size:
            raise OverBudget(_TOO_LARGE.format(self.max_size))

    def _check_numbers(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is int and not -self.max_size <= value <= self.max_size:
                raise OverBudget("a number is too large")

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(right, str | list | tuple):
            left, right = right, left
        if isinstance(left, str | list | tuple) and isinstance(right, int):
            self._check_size(len(left) * max(0, right))
        elif type(left) is int and type(right) is int and left.bit_length() + right.bit_length() > _MAX_BITS:
            raise OverBudget("a number is too large")

    def _check_text_call(self, name: str, text: str, args: tuple[Any, ...]) -> None:
        if name == "translate":
            raise OverBudget("translate is not available")
        if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self._check_size(_size_replaced(text, args[0], args[1]))
        elif name == "join" and len(args) == 1 and isinstance(args[0], list | tuple):
            self._check_size(_size_joined(args[0], len(text)))

    def _bounded_concat(self, parts: Iterable[str]) -> str:
        texts = parts if isinstance(parts, list) else list(parts)
        self._check_size(sum(map(len, texts)))
        return "".join(texts)

    # -- filters ---------------------------------------------------------------------------------------------------

    def _join_parts(self) -> Callable[..., str]:
        @pass_context  # so that the compiler does not work it out beforehand
        def joined(_context: Context, parts: list[Any]) -> str:
            return self._bounded_concat(list(map(str, parts)))

        return joined

    def _bounded_join(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @jinja2.pass_eval_context
        def join(eval_context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
            items = list(value)
            if attribute is None:
                self._check_size(_size_joined(items, len(str(d))))
            result = inner(eval_context, items, d, attribute)
            self._check_size(len(result))
            return result

        return join

    def _bounded_replace(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @jinja2.pass_eval_context
        def replace(eval_context: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
            self._check_size(_size_replaced(str(s), str(old), str(new)))
            return inner(eval_context, s, old, new, count)

        return replace

    def _bounded_format(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def form(value: Any, *args: Any, **kwargs: Any) -> Any:
            _check_form(str(value), _WIDE_PERCENT)
            return inner(value, *args, **kwargs)

        return form

    def _sized(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def sized(*args: Any, **kwargs: Any) -> Any:
            self._check_numbers(args, kwargs)
            return inner(*args, **kwargs)

        # How Jinja wants to call it: with the context, the environment or neither.
        mark = getattr(inner, "jinja_pass_arg", None)
        if mark is not None:
            sized.jinja_pass_arg = mark  # type: ignore[attr-defined]
        return sized


@pass_context
def _tick(context: BudgetedContext, _value: None) -> None:
    budget = context.budget
    if budget is not None:
        budget.left -= 1
        if budget.left <= 0:
            budget.look()


def strftime_form(form: str) -> str:
    """A format of a time, checked. Raises ``OverBudget``."""
    if len(form) > _MAX_FORM or re.search(r"%\d", form):
        raise OverBudget("the format of the time is not taken")
    return form


def _check_form(text: str, wide: re.Pattern[str]) -> None:
    if wide.search(text):
        raise OverBudget("a format has a width that is too large, or that is not written there")


def _size_replaced(text: str, old: str, new: str) -> int:
    if len(new) <= len(old):
        return len(text)
    return len(text) + (text.count(old) if old else len(text) + 1) * (len(new) - len(old))


def _size_joined(items: list[Any] | tuple[Any, ...], between: int) -> int:
    return sum(len(item) for item in items if isinstance(item, str)) + between * max(0, len(items) - 1)


def _replace_joins(node: nodes.Node) -> None:
    """``a ~ b`` is worked out by a filter that looks at the size."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Concat):
            setattr(node, name, _join_of(value))
        elif isinstance(value, list):
            value[:] = [_join_of(item) if isinstance(item, nodes.Concat) else item for item in value]
    for child in node.iter_child_nodes():
        _replace_joins(child)


def _join_of(concat: nodes.Concat) -> nodes.Filter:
    return nodes.Filter(nodes.List(concat.nodes), _JOINED, [], [], None, None)
