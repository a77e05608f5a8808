"""The quick sandbox answers and refuses as Jinja's own does."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers.utils.chat_template_utils as chat_templates
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Undefined
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from vllm_forest_renderer import compat, plugin
from vllm_forest_renderer import renderer as forest_renderer
from vllm_forest_renderer.template_sandbox import QuickSandbox

from tests.support.models import load_qwen3_tokenizer

OWN, QUICK = ImmutableSandboxedEnvironment(), QuickSandbox()


class OddDict(dict[str, Any]):
    """No plain dictionary: it has an attribute of its own."""

    role = "attribute"


class OddStr(str):
    """No plain string."""

    def strip(self, chars: str | None = None) -> str:
        return "stripped"


def loop() -> LoopContext:
    made = LoopContext(iter("abc"), Undefined)
    next(made)
    return made


def some_function() -> None:
    """A function, whose internals a template may not see."""


def some_generator() -> Any:
    yield 1


OBJECTS: list[Callable[[], Any]] = [
    lambda: {"role": "user", "items": 1, "get": 2, "_hidden": 3, "__class__": 4, "format": "x"},
    dict,
    lambda: OddDict(role="key", other=1),
    lambda: "some {0.__class__} text",
    lambda: OddStr(" odd "),
    lambda: [1, 2],
    lambda: {1, 2},
    loop,
    lambda: Namespace(
        a=1, text="t", none=None, f="{0.__class__}".format, _b=2, items=[1], odd=loop
    ),
    lambda: some_function,
    some_generator,
    lambda: some_generator().gi_code,
    lambda: str,
    lambda: "".join,
    lambda: 5,
    lambda: None,
    Undefined,
]
NAMES = sorted(
    {name for made in OBJECTS for name in dir(made())}
    | {"role", "other", "a", "text", "none", "f", "_b", "odd", "missing", "_hidden", "", "mro"}
)


def outcome(environment: ImmutableSandboxedEnvironment, value: Any, name: str) -> Any:
    """What a look-up gives, in a form that can be compared."""
    try:
        found = environment.getattr(value, name)
    except Exception as error:
        return type(error), str(error)
    if isinstance(found, Undefined):
        hints = (found._undefined_message, found._undefined_name, found._undefined_exception)
        return type(found), hints
    if callable(found):
        return type(found), getattr(found, "__name__", None), getattr(found, "__wrapped__", None)
    return type(found), repr(found)


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_every_name_of_every_kind_of_value(number: int) -> None:
    value = OBJECTS[number]()
    for name in NAMES:
        assert outcome(QUICK, value, name) == outcome(OWN, value, name), name


ATTACKS = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].__class__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(1) }}",
    "{% set ns = namespace(x=1) %}{{ ns.__class__ }}{{ ns._Namespace__attrs }}",
    "{% for m in messages %}{{ loop._iterator }}{{ loop.__class__ }}{% endfor %}",
    "{{ messages[0].content.__add__('x') }}",
    "{{ cycler.__init__.__globals__ }}",
]


def rendered(environment: ImmutableSandboxedEnvironment, template: str, **values: Any) -> str:
    try:
        return environment.from_string(template).render(**values)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_leaves_the_sandbox_is_refused_alike(attack: str) -> None:
    def given_messages() -> list[dict[str, Any]]:
        return [{"role": "user", "content": "hi"}]

    messages = given_messages()
    quick = rendered(QUICK, attack, messages=messages)
    assert quick == rendered(OWN, attack, messages=given_messages())
    assert "SecurityError" in quick or "class" not in quick
    assert messages == given_messages()


COUNTERS = ["first", "last", "index", "index0", "revindex", "revindex0", "length", "depth",
            "depth0", "previtem", "nextitem"]  # fmt: skip


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("items", ["[{}, 1]|map('dictsort')", "[{}, {}]", "'ab'|map('upper')"])
def test_counters_of_what_fails_while_it_is_iterated(counter: str, items: str) -> None:
    template = f"{{% for x in {items} %}}[{{{{ loop.{counter} }}}}]{{% endfor %}}"
    assert rendered(QUICK, template) == rendered(OWN, template)


TEXT = st.text("a<>/think \n", max_size=12)
MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda t: {"role": "user", "content": t}, TEXT),
        st.builds(lambda t: {"role": "tool", "content": t}, TEXT),
        st.builds(
            lambda t, r, a: {
                "role": "assistant",
                "content": t,
                **({"reasoning_content": r} if r else {}),
                **(
                    {"tool_calls": [{"function": {"name": "f", "arguments": {"k": a}}}]}
                    if a
                    else {}
                ),
            },
            TEXT,
            TEXT,
            TEXT,
        ),
    ),
    min_size=1,
    max_size=6,
)


@pytest.fixture(scope="module")
def qwen3_template() -> str:
    template: str = load_qwen3_tokenizer().chat_template
    return template


@given(messages=MESSAGES, thinking=st.booleans())
def test_qwen3_renders_the_same(
    qwen3_template: str, messages: list[dict[str, Any]], thinking: bool
) -> None:
    values = {"messages": messages, "add_generation_prompt": True, "enable_thinking": thinking}
    assert rendered(QUICK, qwen3_template, **values) == rendered(OWN, qwen3_template, **values)


def test_a_server_s_templates_are_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "ImmutableSandboxedEnvironment", OWN.__class__)
    monkeypatch.setattr(forest_renderer, "_classes", {})
    template = "{{ messages[0].content }}"
    chat_templates._compile_jinja_template(template)
    plugin.wrap_renderers()
    mode = next(iter(plugin.wrapped))
    assert issubclass(getattr(forest_renderer, f"Forest_{mode}"), compat.BaseRenderer)
    compiled = chat_templates._compile_jinja_template(template)
    assert type(compiled.environment) is QuickSandbox
    assert compiled.render(messages=[{"content": "x"}]) == "x"
