"""The page in a headless Chromium: by keyboard, without an error in the console, text always as text."""

import pytest

from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.page.files import page_of
from monge.page.trace import document, rounds_of
from monge.testing.tabular import RandomTable, TabularModel
from tests.page.browser import browser, needs_chromium
from tests.serve.served import ALPHABET, Letters, live, toy_app, toy_decoder

pytestmark = [needs_chromium, pytest.mark.usefixtures("unchecked_types")]
HOSTILE = (
    "",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "&amp;",
    "\n",
    "é",
    "word ",
)
FOCUSED = "return document.activeElement.id"
TEXT = "return document.querySelector('.turn .tokens').textContent"
TREE = "return document.querySelector('svg.tree')?.outerHTML"


class Markup(Letters):
    """A tokenizer whose tokens look like HTML."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(HOSTILE[int(token) % len(HOSTILE)] for token in token_ids)


def markup_decoder():
    size = len(ALPHABET)
    target = TabularModel(RandomTable(size, 11), size, max_length=4000)
    parts = toy_decoder(target, tree="fixed_width((2, 2))").components
    return Decoder(parts, tokenizer=Markup(), max_batch_size=4)


@pytest.fixture(scope="module")
def window():
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def url():
    with live(toy_app(markup_decoder())) as made:
        yield made


@pytest.fixture
def page(window, url):
    """The page of a server; whatever a test does, the console stays silent."""
    window.go(url)
    window.wait("return document.getElementById('model').textContent.includes('verified by')")
    yield window
    assert window.errors() == []


def ask(page, text="hello"):
    page.run("document.getElementById('tokens').value = 40")
    page.run("document.getElementById('question').focus()")
    page.press(text, "Enter")
    page.wait("return document.getElementById('status').textContent.startsWith('Answered')")
    page.wait(TREE)


def test_every_control_is_reached_by_keyboard_in_order(page):
    order = []
    for _ in range(10):
        page.press("Tab")
        order.append(page.run(FOCUSED))
    first = ["theme", "tab-chat", "temperature", "tokens", "seed", "form", "speculation", "log"]
    assert order == [*first, "question", "send"]
    page.run("document.getElementById('tab-chat').focus()")
    page.press("Right")
    assert page.run(FOCUSED) == "tab-race"
    assert page.run("return document.getElementById('chat').hidden") is True
    names = """return [...document.querySelectorAll('button, input, select, textarea')].filter(
        (one) => !one.labels?.length && !one.textContent && !one.ariaLabel).length"""
    assert page.run(names) == 0


def test_a_chat_shows_markup_as_text(page):
    ask(page, "<b>hi</b>")
    shown = page.run(TEXT)
    assert "<script>" in shown
    assert "&amp;" in shown
    assert page.run("return document.querySelector('.turn.user p').textContent") == "<b>hi</b>"
    assert page.run("return document.querySelectorAll('main script, main img, main b').length") == 0
    assert page.run("return document.querySelectorAll('.turn .token').length") == 40
    ask(page, "again")  # the second turn sends the first answer back
    assert page.run("return document.querySelectorAll('.turn').length") == 4


def test_tokens_tell_their_probabilities_and_lead_to_their_round(page):
    ask(page)
    page.run("document.querySelector('.turn .token').focus()")
    tip = "return document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"
    assert "target p" in page.run(tip)
    page.press("End", "Left", "Left")
    place = "return [...document.querySelectorAll('.turn .token')].indexOf(document.activeElement)"
    assert page.run(place) == 37
    assert page.run("return document.querySelectorAll('.turn .token[tabindex=\"0\"]').length") == 1
    page.press("Escape")
    assert page.run(tip) == ""
    page.press("Home", "Enter")
    page.wait("return document.querySelector('.about').textContent.startsWith('Round 1 of')")
    assert page.run("return document.querySelector('.turn .token').classList.contains('current')")


def test_the_slider_changes_the_tree(page):
    ask(page)
    seen = set()
    page.run("document.getElementById('round').focus()")
    for number in range(1, 6):
        page.press("Home", *["Right"] * (number - 1))
        start = f"Round {number} of"
        page.wait(
            "return document.querySelector('.about').textContent.startsWith(arguments[0])", start
        )
        seen.add(page.run(TREE))
        count = page.run("return document.querySelectorAll('.table tbody tr').length")
        nodes = page.run(
            "return document.querySelectorAll('svg.tree .node:not(.root, .next)').length"
        )
        assert count == nodes > 0
    assert len(seen) == 5


def test_a_race_ends(page):
    page.click("#tab-race")
    page.run("document.getElementById('tokens').value = 30")
    page.run("document.getElementById('temperature').value = 0")
    for order in ("apart", "together"):
        page.run("document.getElementById('order').value = arguments[0]", order)
        page.run("document.getElementById('result').textContent = ''")
        page.click("#go")
        result = page.wait("return document.getElementById('result').textContent")
        assert "times the speed. The texts are equal." in result
        figures = page.run(
            "return [...document.querySelectorAll('.lane > .quiet')].map((one) => one.textContent)"
        )
        assert [one.split(" tokens")[0] for one in figures] == ["30", "30"]
        assert "1.00 a forward" in figures[1]
    page.wait("return document.querySelector('#live .bars') !== null")


def test_errors_are_told_and_a_key_is_asked_for(window):
    with live(toy_app(markup_decoder(), api_keys=("secret",))) as url:
        window.go(url)
        window.wait("return document.activeElement.id === 'key'")
        window.press("wrong", "Enter")
        window.wait(
            "return document.getElementById('status').textContent.includes('needs an API key')"
        )
        window.run(
            "document.getElementById('key').value = ''; document.getElementById('key').focus()"
        )
        window.press("secret", "Enter")
        window.wait("return document.getElementById('model').textContent.includes('verified by')")
        ask(window)
        assert all("401" in one for one in window.errors())
        window.run("document.getElementById('tokens').value = 100000")
        window.run("document.getElementById('question').focus()")
        window.press("hello", "Enter")
        window.wait(
            "return document.querySelector('.status.error')?.textContent.includes('exceeds')"
        )
        assert all("400" in one for one in window.errors())
        kept = "return document.documentElement.outerHTML + JSON.stringify(localStorage)"
        assert "secret" not in window.run(kept)
        window.go("about:blank")  # before the server ends
        window.errors()


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_file_shows_runs_without_a_server(window, tmp_path, is_dark):
    decoder = markup_decoder()
    sessions = decoder.sessions(["a", "b"], max_new_tokens=30, temperature=1.0, keeps_trees=True)
    for _ in decode(sessions, decoder.components, max_batch_size=2):
        pass
    runs = [
        {
            **{"prompt": "<script>alert(1)</script>", "error": None, "seed": 1},
            "finish_reason": "length",
            "rounds": rounds_of(one.records, one.request.prompt_ids, decoder),
        }
        for one in sessions
    ]
    path = tmp_path / "run.html"
    path.write_text(page_of(document(runs, decoder)))
    window.dark(is_on=is_dark)
    window.go(path.as_uri())
    before = window.wait(TREE)
    assert "<script>" in window.run("return document.querySelector('.tokens').textContent")
    assert window.run("return document.querySelectorAll('.tokens').length") == 2
    window.click("[aria-label='Next round']")
    window.wait("return document.querySelector('svg.tree').outerHTML !== arguments[0]", before)
    colour = window.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour.strip("rgb()").split(","))) < 300) is is_dark
    assert window.errors() == []
    window.dark(is_on=False)
