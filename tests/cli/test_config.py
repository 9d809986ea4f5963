import inspect
import json
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

import monge
from monge.cli import options
from monge.config import read_config, write_config
from monge.options import LoadOptions, SamplingOptions, ServeOptions, changed


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Models and rows that the commands of this page name, as far as they look at them."""
    monkeypatch.chdir(tmp_path)
    for name in "abcde":
        (tmp_path / name).mkdir()
    (tmp_path / "in.jsonl").touch()


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "monge.toml"
        path.write_text(text)
        return path

    return write


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "monge.toml"
    settings = {
        "target": 'C:\\my "models"\tü',
        "draft": ["a", "b"],
        "tree": "chain(8, 'top')",
        "max_batch_size": 3,
        "cross_tokenizer": True,
    }
    write_config(path, settings, ["made by\na command"])
    assert read_config(path) == settings
    assert path.read_text().startswith("# made by a command\n")


def test_the_list_of_options_is_the_signature(tmp_path):
    """Names and defaults; `load` and `requests` write them out for editors."""

    def signature(function):
        parameters = inspect.signature(function).parameters.values()
        return {one.name: one.default for one in parameters}

    load = signature(monge.load)
    del load["config"]
    assert load == {one.name: one.default for one in fields(LoadOptions)}
    requests = signature(monge.Decoder.requests)
    asked = {one.name: one.default for one in fields(SamplingOptions)}
    assert {name: requests[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("draftr = 'ngram'", "unknown key 'draftr'; did you mean 'drafter'?"),
        ("max_batch_size = 'many'", "batch_size must be a whole number; got 'many'"),
        ("max_batch_size = true", "batch_size must be a whole number; got True"),
        ("controller = []", "controller must be text or a list of texts; got []"),
        ("tree = 3", "tree must be text; got 3"),
        ("drafter = ngram", "is not TOML"),
        ("port = 'x'", "port must be a whole number; got 'x'"),
        ("graceful_timeout = 1.5", "graceful_timeout must be a whole number"),
        (
            "drain = 1.5",
            "graceful_timeout must be a whole number",
        ),  # its name of an earlier release
        ("max_wating = 1", "did you mean 'max_waiting'?"),
    ],
)
def test_wrong_files_are_refused(config, text, said):
    path = config(text)
    with pytest.raises(monge.OptionError, match=r"monge\.toml") as error:
        read_config(path, ServeOptions)
    assert said in str(error.value)
    path.unlink()
    with pytest.raises(monge.OptionError, match="cannot read the configuration"):
        monge.load(config=path)


def test_replicas_are_a_number_or_a_range(config):
    for text, value in (("3", 3), ("'1-4'", "1-4")):
        assert read_config(config(f"replicas = {text}"), ServeOptions) == {"replicas": value}
    with pytest.raises(monge.OptionError, match="replicas must be a whole number or text; got"):
        read_config(config("replicas = [1, 4]"), ServeOptions)


def test_load_takes_what_is_not_given(config, tiny_paths):
    target, draft = map(str, tiny_paths)
    lines = (f"target = '{target}'", "drafter = 'ngram(num_draft_tokens=3)'", "max_batch_size = 2")
    path = config("\n".join((*lines, "controller = 'fixed'")))
    decoder = monge.load(config=path)
    assert decoder.components.drafter.num_draft_tokens == 3
    assert decoder.max_batch_size == 2
    other = monge.load(target, draft, config=path, drafter="model", max_batch_size=8)
    assert "model" in type(other.components.drafter).__name__.lower()
    assert other.max_batch_size == 8


def invoked(*arguments):
    """The result of a command with two options, and what it got."""
    told, app = [], typer.Typer()

    @app.command()
    @options.command(without=("tree",), one=("controller",))
    def run(*, load: LoadOptions) -> None:
        told.append(changed(load))

    return CliRunner().invoke(app, list(map(str, arguments))), told


def test_options_of_a_command_win(config):
    path = config("draft = 'a'\ncontroller = ['fsm']\nmax_batch_size = 4\ncross_tokenizer = true\n")
    expected = {"draft": ("a",), "controller": "fsm", "max_batch_size": 4, "cross_tokenizer": True}
    _, (told,) = invoked("--config", path)
    assert told == expected
    given = ("--draft", "b", "--batch-size", 1, "--controller", "fixed", "--no-cross-tokenizer")
    _, (told,) = invoked("--config", path, *given)
    assert told == {"draft": ("b",), "controller": "fixed", "max_batch_size": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "controller = ['fsm', 'fixed']",
            "--controller is given 2 times (fsm, fixed); this command",
        ),
        ("tree = 'chain(2)'", "this command has no option for tree"),
    ],
)
def test_what_a_command_cannot_take_is_refused(config, text, said):
    result, told = invoked("--config", config(text))
    assert (result.exit_code, told) == (2, [])
    assert said in result.stderr


def test_generate_with_a_file(run, config, tiny_paths):
    path = config(f"target = '{tiny_paths[0]}'\ndrafter = 'none'\n")
    arguments = ("generate", "Once", "--config", path, "--max-new-tokens", 4, "--json")
    assert json.loads(run(*arguments).stdout)["token_ids"]


@pytest.mark.parametrize("command", ["generate Once", "chat", "serve", "batch in.jsonl out.jsonl"])
def test_every_door_reads_the_file(run, config, command):
    result = run(*command.split(), "--config", config("drafer = 'none'"))
    assert result.exit_code == 2
    assert "unknown key 'drafer'; did you mean 'drafter'?" in result.stderr


@pytest.mark.parametrize("text", ["prot = 1", "port = 1"])
@pytest.mark.parametrize("command", ["generate Once", "chat", "batch in.jsonl out.jsonl"])
def test_keys_of_another_command_are_not_named(run, config, command, text):
    result = run(*command.split(), "--config", config(text))
    assert result.exit_code == 2
    assert "unknown key" in result.stderr
    assert "drafter" in result.stderr
    assert "max_waiting" not in result.stderr


@pytest.fixture
def serving(run, monkeypatch):
    """What `monge serve` is asked for, and the result of the command."""

    def serve(*arguments):
        told = []
        monkeypatch.setattr("monge.cli.serve._serve_here", lambda *asked, **_: told.extend(asked))
        return told, run("serve", *arguments)

    return serve


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        ([], ("a", ("b",))),
        (["--target", "c"], ("c", ("b",))),
        (["c"], ("c", ("b",))),
        (["c", "--draft", "d"], ("c", ("d",))),
        (["c", "d", "e"], ("c", ("d", "e"))),
    ],
)
def test_serve_takes_models_by_place_and_by_name(serving, config, arguments, models):
    (load, _), _ = serving(*arguments, "--config", config("target = 'a'\ndraft = 'b'\n"))
    assert (load.target, load.draft) == models


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--target", "b"], "--target 'b' is given as 'a' too; give it once"),
        (["a", "b", "--draft", "c"], "--draft ['c'] is given as ['b'] too; give it once"),
    ],
)
def test_serve_refuses_models_given_twice(serving, arguments, said):
    told, result = serving(*arguments)
    assert (result.exit_code, told) == (2, [])
    assert said in result.stderr


def test_a_server_takes_its_own_options_from_the_file(config, serving):
    path = config(
        "host = '0.0.0.0'\nport = 1\nmax_waiting = 7\nrequest_timeout = 2.5\napi_key = 'a'\n"
        "access_log = true\nlogprobs_of = 'raw'\nround_timeout = 1.5\ndrafter = 'ngram'\n"
    )
    (load, settings), _ = serving("--config", path, "--port", 8000)
    assert load == LoadOptions(drafter="ngram")
    assert settings == ServeOptions(
        host="0.0.0.0",
        port=8000,  # the default, but given
        max_waiting=7,
        request_timeout_s=2.5,
        api_keys=("a",),
        access_log=True,
        round_timeout_s=1.5,
    )
