"""The page in a headless Chromium: by keyboard, without an error in the console, text always as text."""

import pytest

from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.oracle.tabular import RandomTable, TabularModel
from monge.page.files import page_of
from monge.page.trace import document, rounds_of
from tests.page.browser import browser, needs_chromium
from tests.serve.served import ALPHABET, Letters, live, slow_decoder, toy_app, toy_decoder

pytestmark = [needs_chromium, pytest.mark.usefixtures("unchecked_types")]
HOSTILE = ("", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>")
HOSTILE += ("&amp;", "\n", "é", "word ")
FOCUSED = "return document.activeElement.id"
TEXT = "return document.querySelector('.turn .tokens').textContent"
RECORD = """window.sent = [];
const fetchNow = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) window.sent.push(JSON.parse(options.body));
  return fetchNow(path, options);
};"""
SENT = "return window.sent.at(-1)"
CONTENTS = "return JSON.parse(localStorage.getItem('monge chat')).turns.map((turn) => turn.content)"
NOTE = "return document.querySelector('.turn:last-child .note:not([hidden])')?.textContent"
EXCEEDS = "return document.querySelector('.status.error')?.textContent.includes('exceeds')"
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
    opened(window, url)
    yield window
    assert window.errors() == []


def opened(window, url):
    """Open the page of a server, without the chat of the test before."""
    window.go(url)
    window.wait("return document.getElementById('model').textContent.includes('verified by')")
    window.run("""for (const name of ["always", "by-token"]) document.getElementById(name).checked = false;
        const system = document.getElementById("system");
        system.value = "";
        system.dispatchEvent(new Event("input"))""")
    window.click("#fresh")
    window.run(RECORD)


def begin(page, text="hello", tokens=40):
    page.run("document.getElementById('tokens').value = arguments[0]", tokens)
    page.run("document.getElementById('status').textContent = ''")
    page.run("document.getElementById('question').focus()")
    page.press(text, "Enter")


def answered(page):
    page.wait("return document.getElementById('status').textContent.startsWith('Answered')")
    page.wait(TREE)


def ask(page, text="hello", tokens=40):
    begin(page, text, tokens)
    answered(page)


def click(page, text):
    """Click a button of the last answer."""
    page.run("document.getElementById('status').textContent = ''")
    buttons = "[...document.querySelectorAll('.turn:last-child .actions button')]"
    page.run(f"{buttons}.find((one) => one.textContent === arguments[0]).click()", text)


def show_tokens(page):
    if not page.run("return document.getElementById('by-token').checked"):
        page.click("#by-token")


def test_every_control_is_reached_by_keyboard_in_order(page):
    page.run("document.getElementById('theme').focus()")
    order = ["theme"]
    for _ in range(13):
        page.press("Tab")
        order.append(page.run(FOCUSED))
    first = ["theme", "tab-chat", "temperature", "top-p", "tokens", "seed", "form", "speculation"]
    assert order == [*first, "always", "by-token", "system-prompt", "log", "question", "send"]
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
    show_tokens(page)
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


MARKDOWN = {
    "a *b* **c `d` e**": "<p>a <em>b</em> <strong>c <code>d</code> e</strong></p>",
    "# One\n### Two": "<h4>One</h4><h6>Two</h6>",
    "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
    "2 * 3 * 4 and a_b_c": "<p>2 * 3 * 4 and a_b_c</p>",
    "- a\n  - b\n  ```\n  c\n  ```\n- d": "<ul><li><p>a</p><ul><li><p>b</p></li></ul>[c]</li><li><p>d</p></li></ul>",
    "3. a\n\n   b\n4. c": '<ol start="3"><li><p>a</p><p>b</p></li><li><p>c</p></li></ol>',
    "text\n- a\n- b\n\nend": "<p>text</p><ul><li><p>a</p></li><li><p>b</p></li></ul><p>end</p>",
    "> a\n> - b\n\n---": "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><hr>",
    "```python\nif x < 1:\n\n    **y**\n```\nz": "[if x &lt; 1:\n\n    **y**]<p>z</p>",
    "```\nnot closed": "[not closed]",
    "| a | b |\n|---|---|\n| 1 | `2` |": "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table>",
    "[a](https://b.c/d) [e](javascript:alert(1))": '<p><a href="https://b.c/d" rel="noreferrer" target="_blank">a</a>'
    " [e](javascript:alert(1))</p>",
    "<img src=x onerror=alert(1)> **<b>**": "<p>&lt;img src=x onerror=alert(1)&gt; <strong>&lt;b&gt;</strong></p>",
    "![a](https://b.c/d.png)": '<p>!<a href="https://b.c/d.png" rel="noreferrer" target="_blank">a</a></p>',
    "": "",
}
RENDER = """return import("/page/markdown.js").then(({ showMarkdown }) => {
  const element = document.createElement("div");
  showMarkdown(element, arguments[0]);
  const text = element.textContent;
  for (const code of element.querySelectorAll(".code")) {
    code.replaceWith(`[${code.querySelector("code").textContent}]`);
  }
  return [element.innerHTML, text];
})"""


@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown_becomes_elements_and_nothing_is_parsed_as_html(page, text):
    assert page.run(RENDER, text)[0] == MARKDOWN[text]


@pytest.mark.parametrize(
    "part",
    ["> ", "- ", "* ", "*", "**", "`", "```", "[", "[a](", "|", "|-", "# ", "1. ", "  - a\n"],
)
def test_no_markdown_is_too_deep_or_lost(page, part):
    text = 3000 * part + "end"
    assert "end" in page.run(RENDER, text)[1]


def test_blocks_that_are_shown_stay_when_text_is_added(page):
    script = """return import("/page/markdown.js").then(({ showMarkdown }) => {
      const element = document.createElement("div");
      showMarkdown(element, "a\\n\\n```\\nb\\n```\\nc");
      const before = [...element.children];
      showMarkdown(element, "a\\n\\n```\\nb\\n```\\nc d");
      return [...element.children].map((child, index) => child === before[index]);
    })"""
    assert page.run(script) == [True, True, False]


def test_a_cut_answer_is_marked_and_goes_on(page):
    ask(page, tokens=7)
    assert page.run(NOTE) == "Cut by the limit of tokens."
    (_, begun) = page.run(CONTENTS)
    click(page, "Continue")
    answered(page)
    sent = page.run(SENT)
    assert sent["messages"][-1] == {"role": "assistant", "content": begun}
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    (_, text) = page.run(CONTENTS)
    assert text.startswith(begun)
    assert len(text) > len(begun)
    assert page.run("return document.querySelectorAll('.turn').length") == 2
    assert page.run("return document.querySelectorAll('.turn .token').length") == 14


def test_a_chat_survives_a_reload(page, url):
    page.run("document.getElementById('system-prompt').click()")
    page.run("document.getElementById('system').focus()")
    page.press("Be brief.")
    ask(page, "one")
    ask(page, "two")
    before = page.run(CONTENTS)
    shown = page.run("return [...document.querySelectorAll('.turn p')].length")
    page.go(url)
    assert page.run("return document.querySelectorAll('.turn').length") == 4
    assert page.run("return document.getElementById('system').value") == "Be brief."
    assert shown >= page.run("return [...document.querySelectorAll('.turn p')].length") > 0
    page.run(RECORD)
    ask(page, "three")
    sent = page.run(SENT)["messages"]
    assert [one["content"] for one in sent] == ["Be brief.", *before, "three"]
    assert [one["role"] for one in sent] == ["system", *3 * ["user", "assistant"]][:6]
    page.click("#fresh")
    page.go(url)
    assert page.run("return document.querySelectorAll('.turn').length") == 0


@pytest.mark.parametrize("stored", ["{", "null", '{"turns": 3}', '{"turns": [{"role": "user"}]}'])
def test_a_stored_chat_that_cannot_be_read_is_left_out(page, url, stored):
    store = "() => localStorage.setItem('monge chat', text)"
    page.run(f"const text = arguments[0]; addEventListener('pagehide', {store})", stored)
    page.go(url)
    ask(page)
    assert len(page.run(CONTENTS)) == 2


def test_an_answer_is_made_anew_and_stays_if_that_fails(page):
    ask(page, "one")
    (_, before) = page.run(CONTENTS)
    click(page, "Regenerate")
    answered(page)
    (question, after) = page.run(CONTENTS)
    assert question == "one"
    assert after != before
    assert [one["role"] for one in page.run(SENT)["messages"]] == ["user"]
    page.run("document.getElementById('tokens').value = 100000")
    click(page, "Regenerate")
    page.wait(EXCEEDS)
    assert page.run(CONTENTS) == ["one", after]
    assert page.run("return document.querySelectorAll('.turn').length") == 2
    assert all("400" in one for one in page.errors())


def test_an_answer_is_copied(page):
    ask(page)
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    click(page, "Copy")
    assert page.wait("return window.copied") == page.run(CONTENTS)[1]


def test_drafts_can_be_asked_for_in_every_round(page):
    for is_always, field in ((False, True), (True, {"adaptive": False})):
        if is_always:
            page.click("#always")
        ask(page)
        assert page.run(SENT)["speculation"] == field
    page.click("#speculation")
    ask(page)
    assert page.run(SENT)["speculation"] is False
    page.click("#speculation")


@pytest.fixture
def slow(window):
    """The page of a server whose answers last: no token ends them."""
    parts = slow_decoder().components
    with live(toy_app(Decoder(parts, tokenizer=Letters()))) as url:
        opened(window, url)
        yield window
        window.press("Escape")
        window.go("about:blank")  # before the server ends
        assert window.errors() == []


LONG = "return document.querySelectorAll('.turn .token').length > arguments[0]"


def test_escape_stops_an_answer_which_can_go_on(slow):
    begin(slow, tokens=9000)
    slow.wait(LONG, 3)
    slow.press("Escape")
    slow.wait("return document.getElementById('status').textContent === 'Stopped.'")
    assert slow.run(NOTE) == "Stopped."
    (_, begun) = slow.run(CONTENTS)
    assert begun
    click(slow, "Continue")
    slow.wait("return window.sent.length === 2")
    assert slow.run(SENT)["messages"][-1]["content"] == begun


GROWING = """return import("/page/chat.js").then(async ({ Chat }) => {
  const frames = async () => {
    for (let count = 0; count < 3; count++) await new Promise(requestAnimationFrame);
  };
  const log = document.createElement("div");
  log.className = "log";
  log.style.height = "200px";
  document.body.append(log);
  const chat = new Chat(log, {});
  const { view } = chat.add({ role: "assistant", content: "", end: null });
  const grow = async () => {
    view.turn.content += "word\\n\\n".repeat(40) + "```\\n" + "wide ".repeat(300) + "\\n```\\n";
    view.show();
    chat.follow();
    await frames();
  };
  const bottom = () => Math.round(log.scrollHeight - log.clientHeight - log.scrollTop);
  const places = [];
  await grow();
  places.push(bottom());
  log.scrollTo(0, 5);
  await frames();
  await grow();
  places.push(log.scrollTop);
  log.scrollTo(0, log.scrollHeight);
  await frames();
  await grow();
  places.push(bottom(), log.scrollWidth - log.clientWidth);
  log.remove();
  return places;
})"""


def test_the_view_follows_an_answer_only_from_its_end(page):
    assert page.run(GROWING) == [0, 5, 0, 0]  # the last one: wide code scrolls by itself


def test_the_slider_changes_the_tree(page):
    ask(page)
    seen = set()
    page.run("document.getElementById('round').focus()")
    for number in range(1, 6):
        page.press("Home", *["Right"] * (number - 1))
        shown = "return document.querySelector('.about').textContent.startsWith(arguments[0])"
        page.wait(shown, f"Round {number} of")
        seen.add(page.run(TREE))
        found = [".table tbody tr", "svg.tree .node:not(.root, .next)"]
        counts = [page.run(f"return document.querySelectorAll('{one}').length") for one in found]
        assert counts[0] == counts[1] > 0
    assert len(seen) == 5


def test_a_race_ends(page):
    page.click("#tab-race")
    page.run("document.getElementById('tokens').value = 30")
    for order in ("apart", "together"):
        page.run("document.getElementById('order').value = arguments[0]", order)
        page.run("document.getElementById('result').textContent = ''")
        page.click("#go")
        result = page.wait("return document.getElementById('result').textContent")
        assert "times the speed. The texts are equal." in result
        lanes = "[...document.querySelectorAll('.lane > .quiet')]"
        figures = page.run(f"return {lanes}.map((one) => one.textContent)")
        assert [one.split(" tokens")[0] for one in figures] == ["30", "30"]
        assert "1.00 a forward" in figures[1]
    page.wait("return document.querySelector('#live .bars') !== null")


def test_settings_live_through_a_reload(page, url):
    page.run("document.getElementById('top-p').value = 0.5")
    page.run("document.getElementById('top-p').dispatchEvent(new Event('change', {bubbles: true}))")
    page.go(url)
    assert page.run("return document.getElementById('top-p').value") == "0.5"
    page.run("localStorage.removeItem('monge settings')")


def test_it_starts_from_the_defaults_of_the_server_and_sends_what_was_changed(window):
    ids = "['temperature', 'top-p', 'tokens']"
    shown = f"return {ids}.map((id) => document.getElementById(id).value)"
    sampling = ("temperature", "top_p", "max_tokens")
    sent = f"return Object.entries(window.sent.at(-1)).filter(([name]) => {list(sampling)}.includes(name))"
    change = """const control = document.getElementById(arguments[0]);
        control.value = arguments[1];
        control.dispatchEvent(new Event("change", {bubbles: true}))"""

    def asked():
        window.run("document.getElementById('status').textContent = ''")
        window.run("document.getElementById('question').focus()")
        window.press("hello", "Enter")
        answered(window)
        return dict(window.run(sent))

    stated = '{"temperature": 0.6, "top_k": 5, "max_new_tokens": 30}'
    with live(toy_app(markup_decoder(), override_generation_config=stated)) as url:
        opened(window, url)
        assert window.run(shown) == ["0.6", "1", "30"]
        assert asked() == {}
        window.run(change, "temperature", "0.2")
        assert asked() == {"temperature": 0.2}
        opened(window, url)
        assert window.run(shown) == ["0.2", "1", "30"]
        assert asked() == {"temperature": 0.2}
        window.run(change, "temperature", "")
        assert asked() == {}, "the server's own"
        window.run(change, "form", "text")
        assert asked() == {"max_tokens": 30}, "the default is one of chats"
        window.run(change, "form", "chat")
        window.click("#tab-race")
        window.click("#go")
        window.wait("return document.getElementById('result').textContent")
        assert dict(window.run(sent)) == {"temperature": 0}
        window.click("#tab-chat")
        assert window.errors() == []
        window.go("about:blank")  # before the server ends
    with live(toy_app(markup_decoder())) as url:
        opened(window, url)
        window.run(change, "tokens", "40")
        assert asked() == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 40}
        window.go("about:blank")
        assert window.errors() == []


def test_errors_are_told_and_a_key_is_asked_for(window):
    with live(toy_app(markup_decoder(), api_keys=("secret",))) as url:
        window.go(url)
        window.wait("return document.activeElement.id === 'key'")
        window.press("wrong", "Enter")
        status = "document.getElementById('status').textContent"
        window.wait(f"return {status}.includes('needs an API key')")
        key = "document.getElementById('key')"
        window.run(f"{key}.value = ''; {key}.focus()")
        window.press("secret", "Enter")
        window.wait("return document.getElementById('model').textContent.includes('verified by')")
        ask(window)
        assert all("401" in one for one in window.errors())
        window.run("document.getElementById('tokens').value = 100000")
        window.run("document.getElementById('question').focus()")
        window.press("hello", "Enter")
        window.wait(EXCEEDS)
        assert all("400" in one for one in window.errors())
        kept = "return document.documentElement.outerHTML + JSON.stringify(localStorage)"
        assert "secret" not in window.run(kept)
        window.go("about:blank")  # before the server ends
        window.errors()


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_file_shows_runs_without_a_server(window, tmp_path, is_dark):
    decoder = markup_decoder()
    sessions = decoder.sessions(["a", "b"], max_new_tokens=30, temperature=1.0, return_trees=True)
    list(decode(sessions, decoder.components, max_batch_size=2))
    run = {"prompt": HOSTILE[1], "error": None, "seed": 1, "finish_reason": "length"}
    traces = [rounds_of(one.records, one.request.prompt_ids, decoder) for one in sessions]
    runs = [run | {"rounds": rounds} for rounds in traces]
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
