import json

import pytest

from monge.core.errors import OptionError
from monge.loading.networks import load_tokenizer
from monge.prompts import SHIPPED, read_prompts, shipped, written
from monge.replay.file import read_log
from tests.bench.tiny import save_pair


@pytest.mark.parametrize("task", SHIPPED)
def test_shipped_prompts(task):
    prompts = shipped([task])
    assert len({prompt.text for prompt in prompts}) == 8
    assert all(prompt.task == task and prompt.text.strip() for prompt in prompts)
    assert [prompt.task for prompt in shipped(per_task=1)] == ["gsm8k", "humaneval", "prose"]
    if task == "gsm8k":
        for prompt in prompts:
            assert prompt.text.startswith("Question: ")
            assert prompt.text.endswith("\nAnswer:")


def test_unknown_task_names_the_nearest():
    with pytest.raises(OptionError, match="did you mean 'gsm8k'"):
        shipped(["gsm8"])


def test_plain_lines(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("One.\n\n  Two.\n")
    assert [(prompt.task, prompt.text) for prompt in read_prompts(file)] == [
        ("mine", "One."),
        ("mine", "  Two."),
    ]


def test_json_lines(tmp_path):
    file = tmp_path / "mine.jsonl"
    records = [
        {"prompt": "a\nb"},
        {"question": "Why?", "answer": "x"},
        {"turns": ["first", "second"]},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    assert [prompt.text for prompt in read_prompts(file)] == [
        "a\nb",
        "Question: Why?\nAnswer:",
        "first",
    ]


def test_lines_end_where_lines_end(tmp_path):
    """Not at a form feed or U+2028, which `str.splitlines` takes for ends, and which JSON may hold as they are."""
    (tmp_path / "a.txt").write_bytes("\ufeffOne\x0cpage\r\nTwo\u2028parts\n".encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / "a.txt")] == [
        "One\x0cpage",
        "Two\u2028parts",
    ]
    (tmp_path / "a.jsonl").write_bytes(
        '\ufeff{"prompt": "Two\u2028parts"}\n{"prompt": "b"}\n'.encode()
    )
    assert [prompt.text for prompt in read_prompts(tmp_path / "a.jsonl")] == ["Two\u2028parts", "b"]


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_prompt_a_task(tmp_path, count):
    (tmp_path / "a.txt").write_text("One.\n")
    with pytest.raises(OptionError, match=f"prompts per task .* must be at least 1; got {count}"):
        shipped(per_task=count)
    with pytest.raises(OptionError, match=f"prompts per task .* must be at least 1; got {count}"):
        read_prompts(tmp_path / "a.txt", per_task=count)


def test_tasks_of_a_file(tmp_path):
    file = tmp_path / "mine.jsonl"
    records = [
        {"prompt": "a", "task": "x"},
        {"turns": ["b"], "category": "y"},
        {"prompt": "c", "task": "x"},
        {"prompt": "d"},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    assert [prompt.task for prompt in read_prompts(file)] == ["x", "y", "x", "mine"]
    assert [prompt.text for prompt in read_prompts(file, per_task=1)] == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ', "line 2: not JSON"),
        ("a.jsonl", '{"text": "x"}', "line 1: no text under 'prompt'"),
        ("a.jsonl", '{"turns": []}', "line 1: no text under"),
        ("a.jsonl", "[1]", "line 1: no text under"),
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


def test_messages(tmp_path):
    file = tmp_path / "mine.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "raw"}))
    conversation, raw = read_prompts(file)
    assert (conversation.text, conversation.messages) == ("Why?", tuple(messages))
    assert written(conversation, len) == 2
    assert written(raw, len) == "raw"


@pytest.mark.parametrize(
    "wrong", [[], "text", [{"role": "user"}], [{"role": "user", "content": 1}]]
)
def test_wrong_messages_are_refused(tmp_path, wrong):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"messages": wrong}))
    with pytest.raises(OptionError, match="line 1: messages must be a list of objects"):
        read_prompts(file)


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


def test_logs_and_batches_write_messages_by_the_template(run, templated, tmp_path):
    file, log, texts = (tmp_path / name for name in ("mine.jsonl", "run.mlog", "texts.jsonl"))
    file.write_text(json.dumps({"messages": MESSAGES}))
    limits = ("--target", templated, "--max-new-tokens", 5)
    result = run("replay", "record", "--prompts", file, *limits, "--no-costs", "--out", log)
    assert result.exit_code == 0, result.stderr
    expected, _ = tokens_of(run, templated, WRITTEN)
    (text,) = read_log(log).texts
    tokenizer = load_tokenizer(templated)
    assert list(text.prompt_ids) == tokenizer(WRITTEN, add_special_tokens=False)["input_ids"]
    assert list(text.token_ids) == expected[: len(text.token_ids)]
    result = run("batch", file, texts, *limits)
    assert result.exit_code == 0, result.stderr
    assert json.loads(texts.read_text())["token_ids"] == expected
