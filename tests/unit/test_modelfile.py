"""A Modelfile says what the chat template says, or there is none."""

from __future__ import annotations

import pytest

from lamplighter.data.chat import rendering
from lamplighter.data.chat.template import ChatTemplate, load_template
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import BadConfig
from lamplighter.export.modelfile import go_template, modelfile, take_apart

DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|endoftext|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|endoftext|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("name", ["chatml", "alpaca", "plain"])
def test_the_built_in_templates_are_taken_apart(name: str) -> None:
    template = load_template(name, byte_level())
    turns = take_apart(template)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert turns.render(talk) == template.render(talk, True)
    text = modelfile("x.gguf", template)
    assert text.startswith("FROM ./x.gguf\n") and f'PARAMETER stop "{template.stop}"' in text
    assert text.count("{{") == text.count("}}") and '.Role "assistant"' in text
    template.close()


def test_a_system_prompt_that_a_template_brings_becomes_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "Elsewhere", rendering.Here)
    template = ChatTemplate("x", DEFAULT_SYSTEM, byte_level())
    turns = take_apart(template)
    assert turns.default_system == "Be kind" and turns.begin == ""
    assert 'SYSTEM """Be kind"""' in modelfile("x.gguf", template)
    assert '{{ "<|im_start|>user\\n" }}{{ .Content }}' in go_template(turns)


def test_a_template_that_changes_what_is_said_is_refused() -> None:
    shouting = "{% for m in messages %}{{ m['content'] | upper }}<|endoftext|>{% endfor %}"
    template = ChatTemplate.__new__(ChatTemplate)
    template.render = lambda messages, opened: rendering.Here(shouting)._text(messages, opened, {})  # type: ignore[method-assign]
    with pytest.raises(BadConfig, match="cannot be written for Ollama"):
        take_apart(template)
