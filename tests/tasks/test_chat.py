"""Chats go through the tokenizer's template, whose options really change the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import build, q3
from vexact.model.tokenizer import Tokenizer, TokenizerError, load_tokenizer, prompt_ids
from vexact.recipe import TaskSection
from vexact.tasks import TaskError, load_task

# In the manner of Qwen3: thinking is cut short by an empty thought where it is switched off.
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}"
    " <think></think>{% endif %}{% endif %}"
)
ASKED = ({"role": "user", "content": "hello"},)


def tokenizer(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    build(folder, q3())
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**about, **({"chat_template": template} if template else {})})
    )
    return load_tokenizer(folder)


def text(tokens: Tokenizer, prompt: Any, **options: Any) -> str:
    return tokens.decode(prompt_ids(tokens, prompt, options))  # <|user|> is special and leaves nothing


def test_text_stays_text_and_messages_become_the_templates_prompt(tmp_path: Path) -> None:
    found = tokenizer(tmp_path / "m")
    assert text(found, "user: hello") == "user: hello"
    assert text(found, ASKED) == "user: hello\nassistant:"
    assert prompt_ids(found, ASKED).count(299) == 1  # one special token a message, not its spelling
    assert found.encode("hello", chat=True) == prompt_ids(found, ASKED)


def test_an_option_of_the_template_changes_the_prompt(tmp_path: Path) -> None:
    found = tokenizer(tmp_path / "m")
    assert text(found, ASKED, enable_thinking=False) == "user: hello\nassistant: <think></think>"
    assert text(found, ASKED, enable_thinking=True) == text(found, ASKED)


def test_a_last_message_of_the_assistant_is_gone_on_with(tmp_path: Path) -> None:
    begun = (*ASKED, {"role": "assistant", "content": "so"})
    assert text(tokenizer(tmp_path / "m"), begun) == "user: hello\nassistant: so"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinkin": False}, "the chat template does not read the option enable_thinkin"),
        ({"thinking": False}, "the chat template does not read the option thinking"),
        ({"add_generation_prompt": False}, "option add_generation_prompt of the chat template is set by the engine"),
    ],
)
def test_an_option_that_the_template_does_not_read_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=message):
        prompt_ids(tokenizer(tmp_path / "m"), ASKED, options)


def test_a_template_that_refuses_or_is_missing_is_one_line(tmp_path: Path) -> None:
    refusing = tokenizer(tmp_path / "a", "{{ raise_exception('only\n two roles') }}")
    with pytest.raises(
        TokenizerError, match=f"^{tmp_path}/a: the chat template refuses the messages \\(only two roles\\)$"
    ):
        prompt_ids(refusing, ASKED)
    with pytest.raises(TokenizerError, match="has no chat template"):
        prompt_ids(tokenizer(tmp_path / "b", None), ASKED)


def test_a_task_of_text_becomes_a_chat_where_the_recipe_says_so() -> None:
    plain = load_task(TaskSection(name="countdown"), 0).item(3)
    chat = load_task(TaskSection(name="countdown", chat=True, system="Be brief."), 0)
    assert chat.item(3).prompt == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": plain.prompt},
    )
    assert chat.reward(chat.item(3), plain.answer) == 1.0
    assert chat.item(3).columns == plain.columns


def test_a_key_of_chats_has_an_effect_or_is_refused(tmp_path: Path) -> None:
    for key, value in (("system", "Be brief."), ("chat_template_kwargs", {"enable_thinking": False})):
        with pytest.raises(
            TaskError, match=f"^task.{key} is of chats, but task countdown asks in plain text; set task.chat$"
        ):
            load_task(TaskSection(name="countdown", **{key: value}), 0)  # type: ignore[arg-type]
    rows = [{"prompt": [{"role": role, "content": "a"}], "answer": "b"} for role in ("user", "system")]
    for name, row in zip("us", rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    kwargs = {"enable_thinking": False}
    section = TaskSection("file", {"path": f"{tmp_path}/u.jsonl"}, system="Be brief.", chat_template_kwargs=kwargs)
    assert [message["role"] for message in load_task(section, 0).item(0).prompt] == ["system", "user"]  # type: ignore[index]
    with pytest.raises(TaskError, match=r"^task\.system: item 0 has a system message already$"):
        load_task(TaskSection("file", {"path": f"{tmp_path}/s.jsonl"}, system="Be brief."), 0)
