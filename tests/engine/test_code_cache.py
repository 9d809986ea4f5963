"""Folders and locks of what is kept on disk."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest

from monge.backends.cpu import code_cache
from monge.backends.cpu.code_cache import (
    FOLDER_VARIABLE,
    MODELS,
    PROGRAMS,
    cache_folder,
    load_or_make,
    only_process,
    store_code,
    writable_folder,
)
from monge.core.errors import OptionError

PLACE = ("some", ".so", "a program")
LOCKS = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def told(monkeypatch):
    """What is told the user."""
    texts = []
    monkeypatch.setattr(code_cache, "notify", texts.append)
    return texts


@pytest.fixture
def make(folder):
    """Makes a program, and counts how often."""

    def made():
        made.count += 1
        package = folder / "new.so"
        package.write_bytes(b"code")
        return store_code("some", package, {})

    made.count = 0
    return made


def path_of(stored):
    return stored.path.name


def test_the_second_process_waits_for_the_first(make, monkeypatch):
    texts, waits = [], threading.Event()
    monkeypatch.setattr(code_cache, "notify", lambda text: (texts.append(text), waits.set()))

    def second():
        texts.append(load_or_make(PLACE, make, path_of, "a program (9 s)"))

    with only_process(PROGRAMS, "some", "a program (9 s)"):
        thread = threading.Thread(target=second)
        thread.start()
        waits.wait()
        make()
    thread.join()
    assert texts == ["another process makes a program (9 s); waiting for it", "some.so"]
    assert make.count == 1, "the second makes none"


def test_a_dead_process_keeps_no_lock(make, told):
    lock = writable_folder(PROGRAMS) / "some.lock"
    command = [sys.executable, "-c", LOCKS, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
        process.wait()
        assert load_or_make(PLACE, make, path_of, "a program") == "some.so"
    assert told == []


def test_file_systems_without_locks(make, monkeypatch):
    def refuses(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuses)
    assert load_or_make(PLACE, make, path_of, "a program") == "some.so"


def test_a_stored_program_needs_no_lock(make, monkeypatch):
    """The folder may be read-only."""
    writable_folder(PROGRAMS)
    make()
    monkeypatch.setattr(code_cache, "only_process", None)
    assert load_or_make(PLACE, make, path_of, "a program") == "some.so"


@pytest.mark.parametrize("variable", [FOLDER_VARIABLE, "XDG_CACHE_HOME", "HOME"])
@pytest.mark.parametrize("name", [PROGRAMS, MODELS])
def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, variable, name):
    (tmp_path / "file").touch()
    for one in (FOLDER_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "file" / "below"))
    with pytest.raises(OptionError, match="cannot write to the cache folder .*name another one in"):
        writable_folder(name)


def test_a_read_only_folder(folder, monkeypatch):
    writable_folder(PROGRAMS)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="programs: it is read-only"):
        writable_folder(PROGRAMS)


def test_a_user_without_a_home(monkeypatch):
    def no_home(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr("pathlib.Path.expanduser", no_home)
    with pytest.raises(OptionError, match="no cache folder: .*home.*name one in MONGE_CACHE"):
        cache_folder()


def test_a_gguf_file_that_finds_no_room_is_refused_in_one_line(run, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    result = run("generate", "Once", "--target", tmp_path / "model.gguf")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot write to the cache folder")
    assert len(result.stderr.splitlines()) == 1
