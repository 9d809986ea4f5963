import io
import json

import pytest

from monge.cli.lazy import check_early
from monge.core.errors import OptionError
from monge.loading.networks import load_tokenizer
from monge.prompts import SHIPPED, read_prompts, shipped, written
from tests.bench.tiny import save_pair


def test_shipped_prompts():
    assert [prompt.task for prompt in shipped(per_task=1)] == ["gsm8k", "humaneval", "prose"]
    for task in SHIPPED:
        prompts = shipped([task])
        assert len({prompt.text for prompt in prompts}) == 8
        assert all(prompt.task == task and prompt.text.strip() for prompt in prompts)
    for prompt in shipped(["gsm8k"]):
        assert prompt.text.startswith("Question: ")
        assert prompt.text.endswith("\nAnswer:")
    with pytest.raises(OptionError, match="did you mean 'gsm8k'"):
        shipped(["gsm8"])
    with pytest.raises(OptionError, match="prompts per task .* must be at least 1; got 0"):
        shipped(per_task=0)


@pytest.fixture
def read(tmp_path):
    """Prompts of a file with these records, or of this text."""

    def prompts_of(*records, name="mine.jsonl", **options):
        lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
        (tmp_path / name).write_bytes("\n".join(lines).encode())
        return read_prompts(tmp_path / name, **options)

    return prompts_of


def test_lines(read):
    """They do not end at a form feed or U+2028, which `str.splitlines` takes for ends."""
    plain = read("\ufeffOne\x0cpage\r\n\n  Two\u2028parts\n", name="mine.txt")
    assert {prompt.task for prompt in plain} == {"mine"}
    assert [prompt.text for prompt in plain] == ["One\x0cpage", "  Two\u2028parts"]
    found = read('\ufeff{"prompt": "Two\u2028parts"}\n{"prompt": "b"}\n')
    assert [prompt.text for prompt in found] == ["Two\u2028parts", "b"]
    records = ({"prompt": "a\nb"}, {"question": "Why?", "answer": "x"}, {"turns": ["1", "2"]})
    found = [prompt.text for prompt in read(*records)]
    assert found == ["a\nb", "Question: Why?\nAnswer:", "1"]


def test_tasks_of_a_file(read):
    records = ({"prompt": "a", "task": "x"}, {"turns": ["b"], "category": "y"})
    records += ({"prompt": "c", "task": "x"}, {"prompt": "d"})
    assert [prompt.task for prompt in read(*records)] == ["x", "y", "x", "mine"]
    assert [prompt.text for prompt in read(*records, per_task=1)] == ["a", "b", "d"]
    with pytest.raises(OptionError, match="prompts per task .* must be at least 1; got -1"):
        read(*records, per_task=-1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ', "line 2: not JSON"),
        ("a.jsonl", '{"text": "x"}', "line 1: no text under 'prompt'"),
        ("a.jsonl", '{"turns": []}', "line 1: no text under"),
        ("a.jsonl", "[1]", "line 1: no text under"),
        ("a.jsonl", '{"messages": []}', "line 1: messages must be a list of objects"),
        ("a.jsonl", '{"messages": "text"}', "line 1: messages must be a list of objects"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "line 1: messages must be a list"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 1}]}', "messages must be a list"),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            r"line 1: messages\[0\]: part 0 is of type 'image_url', and only text is read here",
        ),
        ("a.txt", " \n\n", "holds no prompts"),
        ("a.txt", b"\xff\xfe\x00", "cannot read prompts"),
        ("nowhere.txt", None, "cannot read prompts from .*nowhere"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(OptionError, match=message):
        read_prompts(file)


def test_messages(read):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    conversation, raw = read({"messages": messages}, {"prompt": "raw"})
    assert (conversation.text, conversation.messages) == ("Why?", tuple(messages))
    assert written(conversation, len) == 2
    assert written(raw, len) == "raw"


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """A target whose tokenizer has a chat template."""
    target, _ = save_pair(tmp_path_factory.mktemp("templated"))
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    )
    tokenizer.save_pretrained(target)
    return target


MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
WRITTEN = "<user>Why?<assistant>So.<answer>"


def tokens_of(run, target, *arguments):
    result = run("generate", *arguments, "--target", target, "--max-new-tokens", 5, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["token_ids"], result.stderr


def test_generate_writes_messages_by_the_template(run, templated, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"messages": MESSAGES}))
    expected, said = tokens_of(run, templated, WRITTEN)
    assert said.count("decoded as raw text; --chat writes them as messages") == 1
    found, said = tokens_of(run, templated, "--prompts", file)
    assert found == expected
    assert "raw text" not in said


def test_batches_write_messages_by_the_template(run, templated, tmp_path):
    file, texts = (tmp_path / name for name in ("mine.jsonl", "texts.jsonl"))
    file.write_text(json.dumps({"messages": MESSAGES}))
    limits = ("--target", templated, "--max-new-tokens", 5)
    expected, _ = tokens_of(run, templated, WRITTEN)
    result = run("batch", file, texts, *limits)
    assert result.exit_code == 0, result.stderr
    assert json.loads(texts.read_text())["token_ids"] == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--json"],
        ["--target", "smollm2", "--max-new-tokens=3"],
        ["--seed", "1", "--trace", "rounds.json"],
    ],
)
def test_no_prompt_is_refused_before_imports(monkeypatch, arguments):
    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(OptionError, match="no prompt; write one"):
        check_early(arguments, "generate")


@pytest.mark.parametrize(
    "arguments",
    [
        ["Once"],
        ["--json", "Once"],
        ["--seed", "1", "Once"],
        ["--ignore-eos", "Once"],
        ["--", "-1"],
        ["--prompts", "tiny.txt"],
        ["--file=tiny.txt"],
        ["--help"],
    ],
)
def test_a_prompt_is_found_among_options(monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("Once")
    monkeypatch.setattr("sys.stdin", Terminal())
    check_early(arguments, "generate")


class Terminal(io.StringIO):
    def isatty(self):
        return True
