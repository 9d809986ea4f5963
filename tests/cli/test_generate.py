import io
import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from monge.api import load
from monge.cli.app import app

PROMPT = "The sea was calm"


@pytest.fixture(scope="module")
def expected(tiny_paths):
    """The greedy completion, from the library."""
    (result,) = load(*tiny_paths).generate([PROMPT], max_new_tokens=12)
    return result


def test_piped_output_is_the_text_alone(generate, expected):
    result = generate(PROMPT, "--max-new-tokens", 12)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    assert result.stderr == ""
    assert generate("--max-new-tokens", 12, stdin=PROMPT + "\n").stdout == result.stdout
    result = generate("--max-new-tokens", 2, stdin=b"\xff\xfe")
    assert result.exit_code == 2
    assert "standard input is not UTF-8" in result.stderr


def test_json(generate, expected):
    result = generate(PROMPT, "--max-new-tokens", 12, "--json", "--seed", 5)
    record = json.loads(result.stdout)
    assert record["text"] == expected.text
    assert record["token_ids"] == list(expected.token_ids)
    assert (record["finish_reason"], record["seed"], record["prompt"]) == ("length", 5, PROMPT)
    assert record["stats"]["num_tokens"] == 12
    assert record["stats"]["block_efficiency"] >= 1


def test_every_option_arrives(generate, tiny_paths):
    parts = {"tree": "chain(2)", "verifier": "speculative_sampling", "dtype": "float64"}
    parts |= {"drafter": "model(top_k=2)"}
    settings = {"max_new_tokens": 30, "temperature": 0.9, "seed": 3}
    settings |= {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
    decoder = load(*tiny_paths, **parts)
    (result,) = decoder.generate([PROMPT], ignore_eos=True, **settings)
    given = (parts | settings).items()
    arguments = [part for name, value in given for part in (f"--{name.replace('_', '-')}", value)]
    record = json.loads(generate(PROMPT, *arguments, "--ignore-eos", "--json").stdout)
    assert record["token_ids"] == list(result.token_ids)
    assert len(record["stats"]["acceptance_by_depth"]) <= 2
    stop = result.text[8:11]
    arguments += ["--stop", "never", "--stop", stop, "--ignore-eos", "--json"]
    record = json.loads(generate(PROMPT, *arguments).stdout)
    assert record["finish_reason"] == "stop"
    assert record["text"] == result.text[: result.text.index(stop)]


def test_a_drawn_seed_is_reported_where_the_text_goes_into_a_pipe(generate):
    first = generate(PROMPT, "--max-new-tokens", 6, "--temperature", 1, "--controller", "fixed")
    seed = re.fullmatch(r"seed (\d+)\n", first.stderr)
    assert seed is not None
    again = generate(PROMPT, "--max-new-tokens", 6, "--temperature", 1, "--seed", seed[1])
    assert (again.stdout, again.stderr) == (first.stdout, "")
    assert "seed " in generate(PROMPT, "--max-new-tokens", 2, "--verbose").stderr


def test_a_drawn_seed_that_does_not_give_the_text_again_is_not_told(generate):
    options = ("--max-new-tokens", 6, "--temperature", 1)
    assert generate(PROMPT, *options).stderr == ""
    told = generate(PROMPT, *options, "--verbose").stderr
    assert re.search(r"seed \d", told) is None
    assert "controller goodput" in told
    assert "sampled requests with a seed that name none have: fixed" in told
    assert "controller fixed" in generate(PROMPT, *options, "--seed", 3, "--verbose").stderr
    assert json.loads(generate(PROMPT, *options, "--json").stdout)["seed"] is None
    first, again = (generate(PROMPT, *options, "--seed", 3, "--json").stdout for _ in range(2))
    assert json.loads(first)["text"] == json.loads(again)["text"]
    assert json.loads(first)["seed"] == 3


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_file_of_prompts_is_decoded_as_a_batch(generate, tmp_path, name, expected):
    prompts = [PROMPT, "Once", "Question: why?"]
    is_json = name.endswith("jsonl")
    lines = [json.dumps({"prompt": one}) if is_json else one for one in prompts]
    (tmp_path / name).write_text("\n".join(lines))
    limits = ("--max-new-tokens", 12, "--batch-size", 2)
    result = generate("--file", tmp_path / name, *limits, "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["prompt"] for record in records] == prompts
    assert records[0]["text"] == expected.text
    plain = generate("--file", tmp_path / name, "--max-new-tokens", 12)
    assert plain.stdout == "".join(record["text"] + "\n" for record in records)


def test_html_is_a_page_of_every_text(generate, tmp_path, expected):
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\nOnce <b>")
    path = tmp_path / "new" / "run.html"
    limits = ("--max-new-tokens", 12, "--html", path)
    assert generate("--prompts", tmp_path / "prompts.txt", *limits).exit_code == 0
    page = path.read_text()
    data = json.loads(page.partition('id="trace">')[2].partition("</script>")[0])
    assert [run["prompt"] for run in data["runs"]] == [PROMPT, "Once <b>"]
    tokens = [token for one in data["runs"][0]["rounds"] for token in one["tokens"]]
    assert [token["id"] for token in tokens] == list(expected.token_ids)
    assert "<b>" not in page
    refused = generate(PROMPT, "--html", tmp_path)
    assert refused.exit_code == 2
    assert "name a file in it" in refused.stderr


def test_trace_and_verbose(generate, tmp_path, expected):
    numbers = tmp_path / "rounds.json"
    parts = (
        "--tree",
        "chain(2)",
        "--verifier",
        "recursive_rejection",
        "--controller",
        "goodput",
        "--verbose",
    )
    result = generate(PROMPT, "--max-new-tokens", 12, "--trace", numbers, *parts)
    assert result.stdout == expected.text + "\n"
    for part in ("verifier recursive_rejection", "chain(depth=2", "engine efficiency"):
        assert part in result.stderr
    (completion,) = json.loads(numbers.read_text())["completions"]
    assert sum(entry["tokens"] for entry in completion["rounds"]) == 12
    assert {"window", "depth", "nodes", "accepted"} <= set(completion["rounds"][0])
    assert sum(completion["stats"]["acceptance_histogram"]) == len(completion["rounds"])
    assert "rounds by drafted depth " in result.stderr
    assert "by drafter " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--verifier", "nonsense"], "sample_and_match"),
        (["--controller", "goodput", "--controller", "fixed"], "given 2 times (goodput, fixed)"),
        (["--tree", "chain(dept=2)"], "did you mean 'depth'"),
        (
            ["--verifier", "speculative_sampling", "--tree", "best_first"],
            "legal here: sample_and_match, recursive_rejection, recursive_rejection_without_replacement",
        ),
        (["--temperature", "-1"], "temperature must be"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--max-new-tokens", "99999"], "exceeds the target's context length of 4096 tokens"),
        (["--batch-size", "0"], "--max-batch-size must be at least 1"),
        (["--file", __file__], "not both"),
        (["--stop", ""], "a stop string is empty"),
        (["--drafter", "ngram", "--tree", "chain"], "drafter 'ngram' takes no"),
        ([""], "the prompt is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_status_2(generate, arguments, message):
    result = generate(*arguments) if arguments == [""] else generate(PROMPT, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no folder"), ("", "no config.json"), ("config", "cannot load a model")],
)
def test_bad_checkpoints(run, tmp_path, tiny_paths, content, message):
    folder = tmp_path / "checkpoint"
    if content is not None:
        folder.mkdir()
    if content == "config":
        shutil.copy(f"{tiny_paths[0]}/config.json", folder)
        (folder / "model.safetensors").write_text("broken")
    assert "--temperature" in run("generate", PROMPT, "--temprature", "1").stderr
    result = run("generate", PROMPT, "--target", folder)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_failed_request_leaves_the_others(run, tmp_path, tiny_paths):
    target = tmp_path / "target"
    shutil.copytree(tiny_paths[0], target)
    weights = load_file(target / "model.safetensors")
    bad = load(*tiny_paths, controller="fixed").tokenizer("\N{SNOWMAN}")["input_ids"][0]
    weights["model.embed_tokens.weight"][bad] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "prompts.txt").write_text("Once\n\N{SNOWMAN} Once\n")
    options = ("--target", target, "--max-new-tokens", 5, "--json")
    result = run("generate", "--file", tmp_path / "prompts.txt", *options)
    good, failed = (json.loads(line) for line in result.stdout.splitlines())
    assert (good["finish_reason"], failed["finish_reason"]) == ("length", "error")
    assert len(good["token_ids"]) == 5
    assert result.exit_code == 2
    assert result.stderr.startswith("error: prompt 2: ")


def command(tiny_paths, *options):
    target, draft = tiny_paths
    words = [sys.executable, "-m", "monge", "generate", PROMPT, "--target", target]
    return [*words, "--draft", draft, "--max-new-tokens", *options]


@pytest.fixture
def heeds_ctrl_c():
    """A suite that was started in the background ignores Ctrl-C, and so would the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_keeps_the_text(tiny_paths):
    endless, pipe = command(tiny_paths, "4000", "--ignore-eos"), subprocess.PIPE
    with subprocess.Popen(endless, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        start = process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted; the text so far is kept\n"
    (result,) = load(*tiny_paths).generate([PROMPT], max_new_tokens=200, ignore_eos=True)
    shorter, longer = sorted([(start + rest).removesuffix("\n"), result.text], key=len)
    assert len(shorter) >= 40
    assert longer.startswith(shorter)


def test_ctrl_c_before_the_first_token(generate, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("monge.cli.generation.monge_load", interrupted)
    result = generate(PROMPT)
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "interrupted")


def test_a_terminal_shows_prompt_text_and_figures(tiny_paths, expected, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    app([str(word) for word in command(tiny_paths, "12")[3:]], standalone_mode=False)
    assert PROMPT in shown.getvalue()
    assert expected.text.split("\n")[-1].strip() in shown.getvalue()
    errors = capsys.readouterr().err
    assert errors.startswith("12 tokens in ")
    assert "block efficiency" in errors
