"""Optional packages are asked for by the name of their extra, before any model is read."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import monge
from monge.core.errors import OptionError
from monge.core.extras import require
from monge.loading.named_models import NAMED, PackagedModel, why_no_model

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {re.split(r"[\[<>=!; ]", one)[0].lower().replace("_", "-") for one in requirements}


def test_what_is_imported_is_a_dependency_or_in_an_extra():
    extras = PROJECT["optional-dependencies"]
    users = [one for name, one in extras.items() if name not in {"test", "docs", "dev"}]
    known = names([*PROJECT["dependencies"], *(one for extra in users for one in extra)])
    known |= {"monge", "vllm", "hypothesis"}  # vLLM imports our plugin, tests import the test kit
    modules = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.split(".")[0])
    distributions = packages_distributions()
    for module in modules - sys.stdlib_module_names:
        assert names(distributions.get(module, [module])) & known, module


def test_the_error_names_what_is_missing_or_too_old_and_the_extra(without, monkeypatch):
    require("gguf", "a GGUF file")
    with monkeypatch.context() as patch:
        patch.setattr("monge.core.extras.version", lambda _: "0.16.1")
        with pytest.raises(OptionError, match=r"needs gguf>=0.17 \(here is 0.16.1\)"):
            require("gguf", "a file", "gguf")
    without("accelerate", "gguf")
    with pytest.raises(
        OptionError,
        match=r'^a file needs accelerate, gguf, which .* pip install "\.\[gguf\]" in a checkout of monge$',
    ):
        require("gguf", "a file")
    with pytest.raises(
        OptionError, match=r"a file needs accelerate, .* in a checkout of monge, or wait$"
    ):
        require("gguf", "a file", "accelerate", otherwise="wait")


def test_packages_of_an_extra_of_a_package_count(without, monkeypatch):
    listed = {
        "monge": ["host[part]; extra == 'distributed'", "beside; extra == 'other'"],
        "host": ["piece>=2; extra == 'part'", "unasked; extra == 'whole'", "always"],
    }
    monkeypatch.setattr("monge.core.extras.requires", listed.get)
    without("piece", "unasked", "always", "beside")
    found = sys.modules["monge.core.extras"].version
    version = lambda name: "1.0" if name == "host" else found(name)  # noqa: E731
    monkeypatch.setattr("monge.core.extras.version", version)
    with pytest.raises(OptionError, match="a cluster needs piece, which"):
        require("distributed", "a cluster")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_is_not_read_without_its_packages(without, tmp_path, monkeypatch, package):
    monkeypatch.setenv("MONGE_CACHE", str(tmp_path / "cache"))
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    without(package)
    message = rf'model.gguf needs {package}, .* pip install "\.\[gguf\]"'
    with pytest.raises(OptionError, match=message):
        monge.load(file)
    monkeypatch.setattr("monge.api.load_network", None)  # the draft model is asked for first
    with pytest.raises(OptionError, match=message):
        monge.load(draft=file)
    assert not (tmp_path / "cache").exists()
    file.touch()
    monkeypatch.setattr(PackagedModel, "path", lambda _: file)
    name = next(iter(NAMED))
    assert f'{name} needs {package}, which cannot be found: pip install ".[gguf]"' in str(
        why_no_model(name)
    )


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (("serve",), "fastapi", "serve"),
        (("audit", "--url", "http://localhost/v1", "--target", "smollm2"), "httpx", "audit"),
        (("audit", "--engine", "monge"), "uvicorn", "serve"),
        (("batch", "in.jsonl", "out.jsonl", "--ray"), "ray", "distributed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_commands_ask_before_they_load(
    run, without, monkeypatch, tmp_path, command, package, extra
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "A"}')
    for name in [one for one in sys.modules if one == "monge.serve"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)  # nothing is read
    without(package)
    result = run(*command)
    assert result.exit_code == 2
    assert f'needs {package}, which cannot be found: pip install ".[{extra}]"' in result.stderr


def test_nobody_is_told_to_install_a_name_that_no_index_has():
    """The name is not registered, so an index may hold anything under it."""
    folders, kinds = ("docs", "examples", "lab", "src", "tests"), {".html", ".md", ".py", ".yml"}
    pages = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    pages = [*ROOT.glob("*.md"), *(path for path in pages if path.suffix in kinds)]
    by_name = re.compile(r"""install(?: -\S+)* ["'\\]*monge\b|\bmonge\[[a-z]""")
    assert by_name.search("pip install -U mon" + "ge")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in pages
        for line in path.read_text(encoding="utf-8").splitlines()
        if by_name.search(line)
    ]
    assert found == [], 'write pip install ".[extra]", in a checkout'
