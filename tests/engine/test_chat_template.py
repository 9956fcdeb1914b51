"""Chat templates: what they may use, what they cannot reach, and what a caller is told."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from engine.chat_template import ChatTemplate
from engine.errors import RequestError

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HI, tokens: dict[str, str] | None = None, **options: Any) -> str:
    return ChatTemplate(source=source, tokens=tokens or {}).render(messages, **options)


def reason(source: str, messages: Any = HI) -> str:
    with pytest.raises(RequestError) as caught:
        render(source, messages)
    what, why, *rest = str(caught.value).splitlines()
    assert what == "the chat template does not render these messages"
    assert rest == ["  roles   user", "  next    give messages that the model's template takes"]
    assert why.startswith("  reason  ")
    return why.removeprefix("  reason  ")


def test_messages_become_the_text_of_the_template() -> None:
    source = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    both = [*HI, {"role": "assistant", "content": "<b> & 'yes'"}]
    assert render(source, both) == "<|user|>hi\n<|assistant|><b> & 'yes'\n<|assistant|>"
    assert render(source, both, add_generation_prompt=False) == "<|user|>hi\n<|assistant|><b> & 'yes'\n"


def test_lines_of_blocks_leave_no_space() -> None:
    assert render("a\n   {% if true %}\nb\n   {% endif %}\nc") == "a\nb\nc"


def test_special_tokens_and_options_are_names() -> None:
    assert (
        render("{{ bos_token }}{{ tools | length }}", tokens={"bos_token": "<s>"}, options={"tools": [1, 2]}) == "<s>2"
    )


def test_loops_may_break_and_continue() -> None:
    skipping = "{% if i == 1 %}{% continue %}{% endif %}"
    stopping = "{% if i == 3 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + skipping + stopping + "{{ i }}{% endfor %}") == "02"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ [3, 1, 2] | min }}{{ [3, 1, 2] | max }}", "13"),
        ("{{ '  x ' | trim }}{{ 'a,b'.split(',')[1] }}", "xb"),
        ("{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.items() | list }}", "2[('a', 1)]"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ messages[0] is mapping }}{{ 'x' is string }}{{ zzz is defined }}", "TrueTrueFalse"),
        ("{{ messages | map(attribute='role') | join }}", "user"),
    ],
)
def test_what_templates_rely_on_works(source: str, expected: str) -> None:
    assert render(source) == expected


def test_json_is_neither_escaped_nor_made_ascii() -> None:
    value = {"é": "<a href='x'>&</a>", "n": [1, None, True]}
    assert render("{{ v | tojson }}", options={"v": value}) == '{"é": "<a href=\'x\'>&</a>", "n": [1, null, true]}'
    assert render("{{ v | tojson(indent=2) }}", options={"v": {"a": 1}}) == '{\n  "a": 1\n}'


def test_the_date_is_the_callers() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "01 Jan 2024"
    assert render("{{ strftime_now('%Y-%m-%d') }}", today=date(2031, 12, 24)) == "2031-12-24"


def test_a_template_that_refuses_says_why() -> None:
    assert reason("{{ raise_exception('roles must alternate') }}") == "TemplateError: roles must alternate"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ zzz.content }}", "UndefinedError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(10000000) | list | length }}", "OverflowError"),
        ("{% include 'x' %}", "TypeError"),
        ("{{ 'x' | nonsense }}", "TemplateAssertionError"),
    ],
)
def test_a_template_that_fails_is_a_refusal(source: str, kind: str) -> None:
    assert reason(source).startswith(f"{kind}: ")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.pop() }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].clear() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).__subclasses__() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ strftime_now.__self__.today() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_change_the_messages(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert reason(source, messages).startswith("SecurityError: access to attribute ")
    assert messages == HI


@pytest.mark.parametrize("name", ["raise_exception.__globals__", "strftime_now.__self__", "messages.__class__"])
def test_an_unsafe_attribute_that_is_only_printed_is_empty(name: str) -> None:
    assert render("{{ " + name + " }}") == ""


def test_a_template_without_end_is_a_refusal() -> None:
    reason("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}")


# files


def folder_with(folder: Path, jinja: str | None = None, **config: Any) -> Path:
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_template_is_that_of_its_own_file_else_of_the_config(tmp_path: Path) -> None:
    assert ChatTemplate.open(folder_with(tmp_path, chat_template="from config")).source == "from config"
    assert ChatTemplate.open(folder_with(tmp_path, jinja="from file")).source == "from file"


def test_a_special_token_may_be_text_or_an_object(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
        "add_bos_token": True,
        "model_max_length": 9,
    }
    template = ChatTemplate.open(folder_with(tmp_path, jinja="{{ bos_token }}{{ eos_token }}", **config))
    assert template.tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert template.render(HI) == "<s></s>"


@pytest.mark.parametrize(
    "config", [{}, {"bos_token": "<s>"}, {"chat_template": None}, {"chat_template": [{"name": "x"}]}]
)
def test_a_snapshot_without_a_template_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate.open(folder_with(tmp_path, **config))
    assert str(caught.value) == (
        "the snapshot has no chat template\n"
        f"  folder  {tmp_path.name}\n"
        "  next    give the text as it should be tokenised (assay generate --raw)"
    )


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError):
        ChatTemplate.open(tmp_path)
