# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tensorrt_llm.serve.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def test_a_checkpoint_s_template_and_the_option_over_it(tmp_path: Path) -> None:
    assert ChatTemplate.find(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("own")
    (tmp_path / "other.jinja").write_text("file")
    found = [
        ChatTemplate.find(tmp_path),
        ChatTemplate.find(tmp_path, str(tmp_path / "other.jinja")),
        ChatTemplate.find(tmp_path, "{{ messages[0].content }}"),
    ]
    assert [template.render(USER) for template in found if template] == ["own", "file", "hi"]


def test_faulty_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chat template of --chat_template, line 1: "):
        ChatTemplate.find(tmp_path, "{% if %}")
    with pytest.raises(ValueError, match=r"chat template 'no\.jinja': there is no such file"):
        ChatTemplate.find(tmp_path, "no.jinja")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[7].role.name }}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{% for _ in range(10 ** 9) %}{% endfor %}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
    ],
)
def test_what_a_template_trips_over_is_a_value_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, name="t").render(USER)


def test_what_templates_rely_on() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}\n"
        "{% endfor %}\n"
        "{{ mode }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(source, name="t")
    text = template.render([{"content": "<é>"}, {"content": "b"}], values={"mode": "fast", "messages": []})
    assert text == '{"content": "<é>"}\nfastTrue'
    assert template.render([], add_generation_prompt=False) == "False"
