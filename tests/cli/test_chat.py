"""`monge chat` from a pipe and from a terminal, with the built-in target."""

import io
import json
import os
import pty
import readline
import select
import subprocess
import sys

import pytest

from monge.api import built_in
from monge.cli.chat_input import messages
from monge.loading import named_models
from monge.prompts import read_prompts

SCRIPT = (
    "import json; from monge.cli.chat_input import messages; print(json.dumps(list(messages())))"
)


@pytest.fixture
def talk(run):
    draft = ("--draft", built_in("draft"), "--max-new-tokens", 12)
    return lambda *lines, options=(): run(
        "chat", *draft, *options, stdin="".join(f"{line}\n" for line in lines)
    )


def test_every_line_is_answered_and_commands_are_obeyed(talk):
    commands = ("/stats", "/reset", "/stats", "/nonsense", "", "Another.", "/exit", "Never asked.")
    result = talk("word " * 4000, "Name a colour.", *commands)
    assert result.exit_code == 0
    assert "shorten the prompt" in result.stderr, "and the conversation goes on"
    assert len(result.stdout.strip().splitlines()) >= 2
    for said in (
        "1 answer, ",
        "tokens a forward",
        "the conversation is forgotten",
        "nothing was answered yet",
        "/nonsense: unknown command",
    ):
        assert said in result.stderr


def test_files_go_before_the_next_message_and_a_refused_command_loses_nothing(run, tmp_path):
    notes, latin, long = (tmp_path / name for name in ("my notes.txt", "latin.txt", "long.txt"))
    notes.write_text("A robin is a bird.\n", encoding="utf-8")
    latin.write_bytes(b"caf\xe9")
    long.write_text("word " * 4000, encoding="utf-8")
    (tmp_path / "mine.txt").write_text("keep me", encoding="utf-8")
    saved = tmp_path / "talk.jsonl"
    lines = (
        f"/save {saved}",
        f"/file '{notes}'",
        *(f"/file {path}" for path in (tmp_path / "none.txt", latin, long, tmp_path, "~no-user/x")),
        "word " * 4000,  # refused: the file waits for the next message
        "What is a robin?",
        f"/save {saved}",
        "And a rose?",
        *(f"/save {path}" for path in (saved, tmp_path / "mine.txt", notes / "x.txt", "")),
        f"/save {tmp_path / 'talk.txt'}",
    )
    options = ("--draft", built_in("draft"), "--system", "Be brief.", "--max-new-tokens", 8)
    result = run("chat", *options, stdin="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0
    for said in (
        "nothing was said yet",
        "my notes.txt stands before your next message",
        "none.txt: [Errno 2]",
        "latin.txt: not UTF-8 at byte 3",
        "long.txt: prompt of 4",
        "Is a directory",
        "~no-user/x: Could not determine home directory",
        "3 messages written",
        "5 messages written",
        "mine.txt: the file is there already",
        "x.txt: [Errno 20]",
        "name a file",
    ):
        assert said in result.stderr, said
    (prompt,) = read_prompts(saved)
    turns = prompt.messages
    assert [one["role"] for one in turns] == ["system", "user", "assistant", "user", "assistant"]
    assert turns[1]["content"] == "A robin is a bird.\n\nWhat is a robin?"
    assert turns[3]["content"] == "And a rose?"
    told = "\n\n".join(f"{one['role']}:\n{one['content']}" for one in turns)
    assert (tmp_path / "talk.txt").read_text(encoding="utf-8") == f"{told}\n"
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "keep me"
    assert not [*tmp_path.glob("*.unfinished")]


def test_without_the_real_model_the_built_in_target_answers_and_a_line_says_so(run, monkeypatch):
    missing = named_models.PackagedModel("no-such-package", "pip install no-such-package")
    monkeypatch.setitem(named_models.NAMED, "smollm2", missing)
    result = run("chat", "--max-new-tokens", "4", stdin="Hello\n")
    assert result.exit_code == 0
    assert "built-in target" in result.stderr
    assert "pip install no-such-package" in result.stderr


def test_a_template_is_needed_before_anything_is_asked(talk, run, tiny_paths, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for %}")
    broken = talk("Hello", options=("--chat-template", tmp_path / "broken.jinja"))
    assert broken.exit_code == 2
    assert "TemplateSyntaxError" in broken.stderr
    result = run("chat", "--target", tiny_paths[0], stdin="Hello\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_generate_takes_a_prompt_as_a_message(run):
    options = ("--draft", built_in("draft"), "--max-new-tokens", "8", "--json")
    written = run("generate", "Instruction: Name a colour.\nResponse:", *options)
    asked = run("generate", "Name a colour.", "--chat", *options)
    assert asked.exit_code == 0
    assert json.loads(asked.stdout)["token_ids"] == json.loads(written.stdout)["token_ids"]
    refused = run("generate", "Name a colour.", "--system", "Be brief.", *options)
    assert refused.exit_code == 2
    assert "give --chat beside them" in refused.stderr


@pytest.mark.parametrize(
    ("entered", "understood"),
    [
        ("a\n\n  b  \n", ["a", "b"]),
        ('"""first\n\n  second\n"""\nnext\n', ["first\n\n  second", "next"]),
        ('"""\ndef f():\n    return 1\n"""', ["def f():\n    return 1"]),
        ('"""one line"""\nnext', ["one line", "next"]),
        ('"""never\nclosed', ["never\nclosed"]),
        ('say """this"""\n', ['say """this"""']),
        ('""""""\nnext\n', ["next"]),
        ("one \\\n  two\\\n\nnext\\", ["one \n  two", "next\\"]),
        ("", []),
    ],
)
def test_messages_of_a_pipe(monkeypatch, entered, understood):
    monkeypatch.setattr(sys, "stdin", io.StringIO(entered))
    assert list(messages()) == understood


def test_triple_quotes_and_ctrl_c_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    lines = ['"""one', 'two"""', '"""dropped', KeyboardInterrupt(), "pasted\nlines", EOFError()]
    entered, shown = iter(lines), []

    def typed(prompt):
        shown.append(prompt)
        if isinstance(one := next(entered), BaseException):
            raise one
        return one

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert list(messages()) == ["one\ntwo", "pasted\nlines"]
    assert shown == ["\n> ", "... ", "\n> ", "... ", "\n> ", "\n> "]


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="knows no bracketed paste")
def test_a_pasted_text_is_one_message():
    parent, child = pty.openpty()
    command = [sys.executable, "-c", SCRIPT]
    env = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env)
    os.close(child)
    typed = [b"\x1b[200~def f():\n    return 1\n\nf()\x1b[201~\r", b"and a line\r", b"\x04"]
    shown = b""
    try:
        while select.select([parent], [], [], 60)[0]:
            try:
                shown += os.read(parent, 4096)
            except OSError:  # the other end is closed
                break
            if typed and shown.endswith(b"\n> "):
                os.write(parent, typed.pop(0))
        else:
            pytest.fail(f"it waits after {shown!r}, and {typed} was not typed")
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    understood = json.loads(shown.decode().splitlines()[-1])
    assert understood == ["def f():\n    return 1\n\nf()", "and a line"]
