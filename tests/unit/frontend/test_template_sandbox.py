"""Templates that mean harm, or are careless: none takes more computing time or memory than it may."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from dynamo_es.frontend.template import ChatRenderer, RenderError, RenderOverBudget, TemplateError

CHAT = [{"role": "user", "content": "Hi"}] * 4


class Ticking:
    """A clock of computing time that moves at each look."""

    def __init__(self, step: float) -> None:
        self.looks = 0
        self._step = step

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * self._step


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a macro": "{% macro f() %}{% for i in range(99999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
    "two calls of itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "a recursive loop": "{% set x = [1, 2] %}{% for i in x recursive %}{{ loop(x) }}{% endfor %}",
    "a loop in a set block": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endset %}",
    "a loop in a scoped block": "{% for i in range(99999) %}{% block b scoped %}{% for j in range(99999) %}{% endfor %}"
    "{% endblock %}{% endfor %}",
    "a call block": "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}{% for j in range(99999) %}{% endfor %}{% endcall %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_SEC_03_a_template_without_end_is_ended(name: str) -> None:
    clock = Ticking(0.1)
    with pytest.raises(RenderError, match=r"more than 2 s of computing time|recursion"):
        ChatRenderer(ENDLESS[name], {}, max_s=2.0, cpu_s=clock).render(CHAT)
    assert clock.looks <= 22


def test_a_long_chat_is_no_endless_one() -> None:
    clock = Ticking(0.01)
    text = ChatRenderer("{% for m in messages %}{{ m.content }}{% endfor %}", {}, cpu_s=clock).render(CHAT * 5000)
    assert len(text) == 40_000
    assert 50 < clock.looks < 200


def test_the_budget_is_each_rendering_s_own() -> None:
    renderer = ChatRenderer("{% for m in messages %}x{% endfor %}", {}, max_s=1.0, cpu_s=Ticking(0.1))
    for _ in range(50):
        assert len(renderer.render(CHAT * 500)) == 2000


LARGE = {
    "text times a number": "{% set x = 'x' * 999999999 %}",
    "a number times text": "{% set x = 999999999 * 'x' %}",
    "a list times a number": "{% set x = [1] * 999999999 %}",
    "powers": "{% set x = 10 ** 999999999 %}",
    "powers of powers": "{% set x = 10 ** 1000 ** 1000 %}",
    "products": "{% set n = namespace(x=10**4000) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling by plus": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}"
    "{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling by a macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='x') %}"
    "{% for i in range(99) %}{% set n.x = d(n.x) %}{% endfor %}",
    "a wide %": "{{ '%999999999d' % 1 }}",
    "a wide % from outside": "{{ '%*d' % (999999999, 1) }}",
    "a wide filter format": "{{ '%999999999d'|format(1) }}",
    "a wide format": "{{ '{:999999999}'.format(1) }}",
    "a wide format from outside": "{{ '{:{}}'.format(1, 999999999) }}",
    "a wide format in a list": "{{ '{0:{1[0]}}'.format(1, [999999999]) }}",
    "a wide format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'x'|center(999999999) }}",
    "center as a method": "{{ 'x'.center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(width) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "indent": "{{ 'x\ny'|indent(999999999) }}",
    "tojson": "{{ [1]|tojson(indent=999999999) }}",
    "batch": "{{ [1]|batch(999999999, 'x')|list }}",
    "slice": "{{ [1]|slice(999999999)|list }}",
    "join": "{% set x = 'x' * 90000 %}{{ [x, x, x, x]|join }}",
    "join as a method": "{% set x = 'x' * 90000 %}{{ ''.join([x, x, x, x]) }}",
    "join with much between": "{% set x = 'x' * 90000 %}{{ [1, 2, 3, 4]|join(x) }}",
    "replace": "{% set x = 'x' * 90000 %}{{ x|replace('x', x) }}",
    "replace as a method": "{% set x = 'x' * 90000 %}{{ x.replace('x', x) }}",
    "replace nothing": "{% set x = 'x' * 90000 %}{{ x.replace('', x) }}",
    "translate": "{% set x = 'x' * 90000 %}{{ x.translate({120: x}) }}",
    "lipsum": "{{ lipsum(n=9999999) }}",
    "time": "{{ strftime_now('%9999999Y') }}",
    "a long format of time": "{{ strftime_now('%c' * 1000) }}",
}


@pytest.fixture(scope="module")
def peak() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", LARGE)
def test_SEC_03_no_template_makes_a_large_value(name: str, peak: None) -> None:
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    renderer = ChatRenderer(LARGE[name] + "{{ messages|length }}", {}, max_chars=100_000)
    with pytest.raises(RenderError if name == "lipsum" else RenderOverBudget):
        renderer.render(CHAT, variables={"width": 999999999})
    assert tracemalloc.get_traced_memory()[1] - before < 8_000_000


HARMLESS = {
    "{{ 'a' + 'b' ~ 1 ~ none }}": "ab1None",
    "{{ 2 ** 10 + 3 * 4 - 7 % 4 }}": "1033",
    "{{ 1.5 + 2 }}": "3.5",
    "{{ '-' * 3 }}{{ [1] * 2 + [3] }}": "---[1, 1, 3]",
    "{{ '%s is %d %%' % ('x', 3) }}": "x is 3 %",
    "{{ '{} {:>4} {a}'.format(1, 2, a=3) }}": "1    2 3",
    "{{ ['a', 1]|join(', ') }}{{ 'aXbX'|replace('X', '--') }}{{ 'aXbX'.replace('X', '') }}": "a, 1a--b--ab",
    "{{ ','.join(['a', 'b']) }}{{ messages|map(attribute='role')|join('|') }}": "a,buser|user|user|user",
    "{{ 'x'|center(5) }}|{{ 'a\nb'|indent(2) }}|{{ {'a': 1}|tojson(indent=1) }}": '  x  |a\n  b|{\n "a": 1\n}',
    "{% set x %}a{% endset %}{% filter upper %}{{ x }}b{% endfilter %}": "AB",
    "{% macro f(x) %}<{{ x }}{{ caller(2) if caller else '' }}>{% endmacro %}{{ f(1) }}"
    "{% call(y) f(3) %}{{ y }}{% endcall %}": "<1><32>",
    "{{ [3, 1]|sort|first }}{{ '%.2f'|format(1.234) }}": "11.23",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}": "234",
}


@pytest.mark.parametrize("source", HARMLESS)
def test_what_templates_do_is_as_before(source: str) -> None:
    assert ChatRenderer(source, {}).render(CHAT) == HARMLESS[source]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in x %}" * 21 + "{% endfor %}" * 21,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x" * (1024 * 1024 + 1),
        "{{ x | nosuchfilter }}",
    ],
)
def test_what_cannot_be_compiled_is_told_as_such(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatRenderer(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages|map('attr', '__class__')|list)[0] }}{{ x.__subclasses__() }}",
        "{{ ''|attr('format')|attr('__globals__') }}{{ self.__init__ }}{{ self._TemplateReference__context() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) + y.z }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_SEC_03_the_interpreter_is_out_of_reach(source: str) -> None:
    try:
        renderer = ChatRenderer(source, {})
    except TemplateError:
        return
    with pytest.raises(RenderError):
        renderer.render(CHAT)
