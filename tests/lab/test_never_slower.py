"""The matrix of the defaults over plain decoding: its intervals on made-up times, and its command."""

import json

import numpy as np
import pytest

from lab.never_slower import measure as module
from lab.never_slower.__main__ import PROMPTS, lowest, table
from lab.never_slower.measure import measured_cells
from monge.bench import runner
from monge.bench.arms import Arm, DecodedCall
from monge.bench.runner import Settings
from monge.bench.statistics import ratio_of_sums
from monge.prompts import read_prompts

PROMPT_IDS = tuple((number,) for number in range(12))


class Clock:
    """Seconds that arms say they take."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def cells(monkeypatch, tiny_pair):
    """Cells of arms that take as long per prompt as functions of prompt and call say."""

    def measured(ours, plain, *, batch=1, repeats=3):
        clock = Clock()
        arms = []
        for seconds in (ours, plain):

            class Fake(Arm):
                calls = -1  # the warm-up
                takes = staticmethod(seconds)

                def decode(self, pair, call):
                    clock.now += 1000 if self.calls < 0 else self.takes(call.prompt_ids, self.calls)
                    type(self).calls += 1
                    rows = ((0,) * call.max_new_tokens,) * len(call.prompt_ids)
                    return DecodedCall(token_ids=rows)

            arms.append(Fake(name="fake"))
        monkeypatch.setattr(module, "arms_of", lambda way: arms)
        monkeypatch.setattr(runner, "CLOCKS", {"wall": clock})
        settings = Settings(
            max_new_tokens=8, repeats=repeats, batch_sizes=(batch,), temperatures=(0.0,)
        )
        found = measured_cells(
            tiny_pair, "chat", "monge", PROMPT_IDS, settings, on_call=lambda *_: None
        )
        (cell,) = found
        return cell

    return measured


def test_a_constant_ratio_has_no_spread_whatever_prompts_take(cells):
    cell = cells(lambda ids, _: 0.5 * (1 + ids[0][0]), lambda ids, _: 1 + ids[0][0])
    assert (cell.ratio, cell.low, cell.high) == pytest.approx((2, 2, 2))
    assert cell.num_calls == 36, "the warm-up of 1000 s is left out"
    assert cell.plain_tokens_per_s == pytest.approx(36 * 8 / (3 * 78))
    assert cell.tokens_per_s == pytest.approx(2 * cell.plain_tokens_per_s)


def test_intervals_are_of_prompts_and_not_of_repeats(cells):
    half = lambda ids, _: 1.0 if ids[0][0] % 2 else 2.0  # noqa: E731
    few, many = (cells(half, lambda *_: 1.0, repeats=count) for count in (2, 40))
    assert few.ratio == many.ratio == pytest.approx(1 / 1.5)
    assert (few.low, few.high) == (many.low, many.high), "more repeats say nothing about prompts"
    assert 0.5 < few.low < 0.58
    assert 0.75 < few.high < 1
    noise = cells(lambda ids, call: 1.0 + call // 12 % 2, lambda *_: 1.0, repeats=4)
    assert (noise.low, noise.high) == pytest.approx((1 / 1.5, 1 / 1.5)), "which means cancel"


def test_batches_are_resampled_as_wholes(cells):
    cell = cells(lambda _, call: 1.0 + call % 2, lambda *_: 1.0, batch=16, repeats=8)
    assert cell.num_calls == 8
    assert 0.5 < cell.low < cell.ratio < cell.high < 1
    assert cells(lambda *_: 1.0, lambda *_: 1.0, batch=16, repeats=1).low is None


def test_the_interval_covers_the_ratio_of_the_population():
    draws, covered = np.random.default_rng(0), 0
    for _ in range(200):
        gains = draws.normal(1.0, 0.2, 24)
        seconds = np.concatenate([1 + gains, 1 + gains])
        found = ratio_of_sums(np.full(48, 2.0), seconds, np.arange(48) % 24)
        covered += found.low <= 1 <= found.high
    assert 170 <= covered <= 199


def test_the_worst_cell_is_shown_first_and_failures_last(cells):
    def broken(*_):
        raise RuntimeError("no such thing")

    bad = cells(broken, lambda *_: 1.0)
    assert bad.failure == "fake: RuntimeError: no such thing"
    single = cells(lambda *_: 1.1, lambda *_: 1.0, batch=16, repeats=1)
    slow, fast = cells(lambda *_: 1.05, lambda *_: 1.0), cells(lambda *_: 0.5, lambda *_: 1.0)
    ordered = sorted((bad, fast, slow, single), key=lowest)
    assert ordered == [single, slow, fast, bad]
    shown = table(ordered)
    assert "1 of 2 intervals begin at 0.97" in shown.caption
    assert [*shown.columns[4].cells] == ["one call", "0.952 to 0.952", "2.000 to 2.000", ""]


def test_the_shipped_prompts_are_twelve_a_class():
    tasks = [one.task for one in read_prompts(PROMPTS)]
    names = ("chat", "prose", "code edit", "translation", "summary")
    assert {name: tasks.count(name) for name in tasks} == dict.fromkeys(names, 12)


def quick(lab, tiny_paths, folder, *arguments):
    target, draft = tiny_paths
    (folder / "p.jsonl").write_text('{"task": "a", "prompt": "ab"}\n{"task": "a", "prompt": "b"}')
    pair = f"--target {target} --draft {draft} --quick --minutes 0.001 --json"
    files = f"--prompts {folder}/p.jsonl --out {folder}/out"
    result = lab("never_slower", pair, files, *arguments)
    assert result.exit_code == 0, result.output
    return result


def test_the_command(lab, tiny_paths, tmp_path):
    result = quick(lab, tiny_paths, tmp_path, "--max-new-tokens 6 --temperature 1")
    assert "| a, drop-in | temperature 1 | 4 |" in result.output
    document = json.loads(result.output.strip().splitlines()[-1])
    assert len(document["cells"]) == 4
    assert document["worst"] == document["cells"][0]
    assert all(cell["failure"] is None for cell in document["cells"])


def test_the_usual_top_p_is_measured_beside_its_temperature(lab, tiny_paths, tmp_path):
    words = "--max-new-tokens 4 --batch 1 --way monge --temperature 0.7"

    def rules(*more):
        result = quick(lab, tiny_paths, tmp_path, words, *more)
        cells = json.loads(result.output.strip().splitlines()[-1])["cells"]
        return result.output, [cell["truncation"] for cell in cells if cell["failure"] is None]

    output, truncations = rules()
    assert "| a, monge | temperature 0.7, top-p 0.9 | 1 |" in output
    assert sorted(truncations, key=len) == [{}, {"top_p": 0.9}]
    assert rules("--top-k 3")[1] == [{"top_k": 3}]
