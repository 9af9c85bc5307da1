"""Chat templates render as their models expect, and cannot reach out of the sandbox.

Method: templates of the shapes that models carry, plain expectations, hostile templates.
"""

from __future__ import annotations

import datetime

import pytest

from common.errors import ModelError, RequestError
from services.gateway import template as template_module
from services.gateway.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "čau <b>"}]


def test_a_chatml_template_ends_with_the_assistants_turn():
    assert ChatTemplate(CHATML).render(HELLO) == (
        "<|im_start|>user\nčau <b><|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_names_templates_expect_are_there():
    source = (
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}|{{ {'a': 'č<'} | tojson }}|"
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content | trim }}{% endfor %}"
        "{{ eos_token }}{{ enable_thinking | default(true) }}"
    )
    template = ChatTemplate(
        source,
        bos_token="<s>",
        eos_token="</s>",
        now=lambda: datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC),
    )
    messages = [{"role": "user", "content": " one "}, {"role": "user", "content": "two"}]
    assert template.render(messages, {"enable_thinking": False}) == '<s>26 Jul 2024|{"a": "č<"}|one</s>False'


def test_blocks_leave_no_blank_lines():
    source = "{% for m in messages %}\n    {{ m.content }}\n{% endfor %}\nend"
    assert ChatTemplate(source).render(HELLO) == "    čau <b>\nend"


def test_a_templates_own_refusal_is_the_clients_error():
    template = ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}")
    with pytest.raises(RequestError, match="Conversation roles must alternate") as caught:
        template.render(HELLO)
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_error():
    with pytest.raises(ModelError, match="cannot be compiled"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{{ nothing.at_all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_must_not_do_fails_the_request_only(source):
    with pytest.raises(RequestError, match="fails on these messages"):
        ChatTemplate(source).render(HELLO)


def test_private_names_of_functions_are_not_there():
    assert ChatTemplate("[{{ raise_exception.__globals__ }}]").render(HELLO) == "[]"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools"])
def test_reserved_names_cannot_be_replaced(name):
    with pytest.raises(RequestError, match=f"may not set '{name}'"):
        ChatTemplate(CHATML).render(HELLO, {name: [], "harmless": 1})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n else '' }}{% endfor %}{% endmacro %}{{ m(90) }}",
        "{{ 'x' * 1000000000000 }}",
        "{{ [0] * 1000000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(template_module, "RENDER_S_MAX", 0.2)
    template = ChatTemplate(source)
    with pytest.raises(RequestError, match="runs away on these messages"):
        template.render(HELLO)
    assert ChatTemplate(CHATML).render(HELLO), "the next one has its own time"


def test_nothing_is_computed_while_a_template_is_compiled():
    ChatTemplate("{% if false %}{{ 9 ** 999999999 }}{{ 'x' | center(1000000000000) }}{% endif %}").render(
        HELLO
    )


@pytest.mark.parametrize("source", ["{{ (" * 900 + "1" + ") }}" * 900, "{% if 1 %}" * 3000, "x" * (1 << 21)])
def test_a_template_too_deep_or_too_long_is_the_models_error(source):
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source)


def test_operators_within_bounds_are_what_they_are():
    source = "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 1 + 2 }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 2.5 * 2 }}{{ 3 * 'x' }}"
    assert ChatTemplate(source).render(HELLO) == "---10243ab[1, 2]5.0xxx"
