"""`monge chat` from a pipe, with the built-in target."""

import json

import pytest

from monge.engine import sources


@pytest.fixture
def talk(run):
    def invoke(*lines, options=()):
        return run(
            "chat",
            "--draft",
            draft_folder(),
            "--max-new-tokens",
            "12",
            *options,
            stdin="\n".join(lines) + "\n",
        )

    return invoke


def draft_folder():
    from monge.api import built_in

    return built_in("draft")


def test_every_line_is_answered_and_commands_are_obeyed(talk):
    result = talk(
        "Name a colour.",
        "/stats",
        "/reset",
        "/stats",
        "/nonsense",
        "",
        "Another.",
        "/exit",
        "Never asked.",
    )
    assert result.exit_code == 0
    assert len(result.stdout.strip().splitlines()) >= 2
    assert "1 answer, " in result.stderr
    assert "tokens a forward" in result.stderr
    assert "the conversation is forgotten" in result.stderr
    assert "nothing was answered yet" in result.stderr
    assert "unknown command /nonsense" in result.stderr


def test_without_the_real_model_the_built_in_target_answers_and_a_line_says_so(run, monkeypatch):
    monkeypatch.setitem(
        sources.NAMED,
        "smollm2",
        sources.PackagedModel("no-such-package", "pip install no-such-package"),
    )
    result = run("chat", "--max-new-tokens", "4", stdin="Hello\n")
    assert result.exit_code == 0
    assert "built-in target" in result.stderr
    assert "pip install no-such-package" in result.stderr


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_goes_on(talk):
    result = talk("word " * 4000, "Name a colour.")
    assert result.exit_code == 0
    assert "shorten the prompt" in result.stderr
    assert result.stdout.strip()


def test_a_broken_template_is_refused_at_the_start(talk, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for %}")
    result = talk("Hello", options=("--chat-template", tmp_path / "broken.jinja"))
    assert result.exit_code == 2
    assert "TemplateSyntaxError" in result.stderr


def test_a_model_without_a_template_is_refused_before_it_is_asked(run, tiny_paths):
    target, _ = tiny_paths
    result = run("chat", "--target", target, stdin="Hello\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_generate_takes_a_prompt_as_a_message(run):
    options = ("--draft", draft_folder(), "--max-new-tokens", "8", "--json")
    written = run("generate", "Instruction: Name a colour.\nResponse:", *options)
    asked = run("generate", "Name a colour.", "--chat", *options)
    assert asked.exit_code == 0
    assert json.loads(asked.stdout)["token_ids"] == json.loads(written.stdout)["token_ids"]
    refused = run("generate", "Name a colour.", "--system", "Be brief.", *options)
    assert refused.exit_code == 2
    assert "give --chat beside them" in refused.stderr
