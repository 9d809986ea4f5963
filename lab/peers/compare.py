"""`python -m lab.peers`: the same weights, prompts and arithmetic in other engines, each with its own best settings.

Every engine runs in a process of its own, in float32, on the same number of threads, one sequence
at a time, and takes and gives token ids. First every way of decoding of every engine looks for its
best setting on prompts that are measured afterwards, which favours all alike. Then all arms of a
temperature are open together and decode each prompt in turns, in rotating order. Greedy arms must
give the reference's text; how often they do is reported, as is how often a text ends in a loop,
which flatters every drafter. Sampling is asked only of methods whose law is the target's.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from lab.peers.engines import Peer, Settings
from lab.peers.environments import install, python_of
from lab.peers.process import PeerProcess
from lab.peers.report import PROMPT_LENGTHS, PeerArm, arm_record, headline, read_fact
from monge.bench.arms import TokenIds
from monge.bench.provenance import provenance
from monge.core.errors import BackendError

WARM_UP_TOKENS: Final = 8
READINGS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Settings of a comparison of peers.

    Args:
        target: Folder of the target.
        draft: Folder of the draft model.
        work: Where environments and converted models are kept.
        threads: Threads of every engine.
        max_new_tokens: Length of every completion.
        repeats: Measured passes over the prompts.
        temperatures: 0 is greedy.
        seed: Of sampled arms.
        is_quick: A shorter search, at the first temperature only.
        installs: Make missing environments.
        texts: Token ids of texts whose perplexity is measured at the first temperature, with the
            memory and the times to a first token of a second start; without, nothing but speed is.
    """

    target: str
    draft: str
    work: Path
    threads: int
    max_new_tokens: int = 64
    repeats: int = 3
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0
    is_quick: bool = False
    installs: bool = False
    texts: TokenIds = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """An engine in its process."""

    process: PeerProcess
    settings: Settings
    version: str


class _Engines:
    """Opens engines as the settings say, and keeps for every way of decoding the fastest.

    Starting one takes longest.
    """

    def __init__(self, settings: PeerSettings, notify: Callable[[str], None]) -> None:
        self._settings, self._notify = settings, notify
        self._pythons: dict[str, Path | str] = {}
        self._kept: dict[str, _Running] = {}
        self._started: list[PeerProcess] = []

    def opened(self, peer: Peer, arm: PeerArm, settings: Settings) -> _Running:
        """A worker with an engine: the kept one if it has these settings."""
        kept = self._kept.get(arm.name)
        if kept is not None and kept.settings == settings:
            return kept
        return self.started(peer, arm, settings)

    def started(self, peer: Peer, arm: PeerArm, settings: Settings) -> _Running:
        """A worker with an engine, in a new process."""
        asked = self._settings
        process = PeerProcess(self._python(peer), peer.name)
        self._started.append(process)  # so that it ends whatever happens while it loads
        folders = {"target": asked.target, "draft": asked.draft, "work": str(asked.work)}
        try:
            version = process.open(
                **folders, threads=asked.threads, method=arm.method, settings=dict(settings)
            )
        except BackendError:
            process.stop()
            raise
        return _Running(process=process, settings=settings, version=version)

    def keep(self, arm: PeerArm, running: _Running) -> None:
        """Keep an engine for this way of decoding; the one that was kept before ends."""
        kept = self._kept.get(arm.name)
        self._kept[arm.name] = running
        if kept is not None and kept is not running:
            kept.process.stop()

    def leave(self, arm: PeerArm, running: _Running) -> None:
        """End an engine unless it is the kept one."""
        if running is not self._kept.get(arm.name):
            running.process.stop()

    def drop(self, arm: PeerArm) -> None:
        """End the kept one, which has failed."""
        kept = self._kept.pop(arm.name, None)
        if kept is not None:
            kept.process.stop()

    def keep_only(self, names: Collection[str]) -> None:
        """End the kept ones but those of these ways of decoding."""
        for name in [name for name in self._kept if name not in names]:
            self._kept.pop(name).process.stop()

    def close(self) -> None:
        """End all of them."""
        for process in self._started:
            process.stop()

    def _python(self, peer: Peer) -> Path:
        if peer.name not in self._pythons:
            try:
                if self._settings.installs:
                    install(peer, self._settings.work, self._notify)
                self._pythons[peer.name] = python_of(peer, self._settings.work)
            except BackendError as error:
                self._pythons[peer.name] = str(error)  # said once for every method, tried once
        found = self._pythons[peer.name]
        if isinstance(found, str):
            raise BackendError(found)
        return found


def compare_peers(
    peers: Sequence[Peer],
    prompts: TokenIds,
    settings: PeerSettings,
    *,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Search, measure and sum up; engines that fail are reported as such and stop nobody.

    Args:
        peers: The engines.
        prompts: Token ids.
        settings: How they are compared.
        notify: Told about progress.
    """
    before = provenance(torch.device("cpu"))
    settings.work.mkdir(parents=True, exist_ok=True)
    engines = _Engines(settings, notify)
    arms: list[PeerArm] = []
    left_out: list[dict[str, str]] = []
    try:
        for temperature in settings.temperatures:
            cell = _cell(peers, temperature, left_out)
            engines.keep_only([arm.name for _, arm in cell])
            for peer, arm in cell:
                notify(f"looking for settings of {arm.name}, temperature {temperature:g}")
                _search(
                    engines,
                    peer,
                    arm,
                    prompts,
                    settings,
                    candidates=_candidates(peer, arm, arms, settings),
                )
            _measure(engines, cell, prompts, settings, notify)
            if settings.texts and not arms:  # they are the same at all temperatures
                for peer, arm in cell:
                    notify(f"start, memory and perplexity of {arm.name}")
                    if arm.failure is None:
                        _note_facts(engines, peer, arm, prompts, settings)
            arms += [arm for _, arm in cell]
    finally:
        engines.close()
    return {
        "headline": {
            f"{temperature:g}": headline(arms, temperature) for temperature in settings.temperatures
        },
        "arms": [arm_record(arm, arms) for arm in arms],
        "not_sampled": left_out,
        "settings": {**asdict(settings), "work": str(settings.work), "texts": len(settings.texts)},
        "num_prompts": len(prompts),
        "provenance": before
        | {"load_average_after": provenance(torch.device("cpu"))["load_average"]},
    }


def _cell(
    peers: Sequence[Peer], temperature: float, left_out: list[dict[str, str]]
) -> list[tuple[Peer, PeerArm]]:
    """The ways of decoding that are asked at a temperature; the others are noted."""
    cell: list[tuple[Peer, PeerArm]] = []
    for peer in peers:
        for name, method in peer.methods.items():
            if temperature > 0 and not method.is_sampled:
                left_out.append(
                    {"arm": f"{peer.name} {name}", "reason": method.why_not_sampled or ""}
                )
            else:
                cell.append((peer, PeerArm(peer=peer.name, method=name, temperature=temperature)))
    return cell


def _candidates(
    peer: Peer, arm: PeerArm, before: Sequence[PeerArm], settings: PeerSettings
) -> tuple[Settings, ...]:
    """Settings to be tried: quickly, few at the first temperature and the best of them at the others."""
    method = peer.methods[arm.method]
    if not settings.is_quick:
        return method.candidates
    found = next(
        (other for other in before if other.name == arm.name and other.failure is None), None
    )
    return method.candidates[: method.quick] if found is None else (found.settings,)


def _search(
    engines: _Engines,
    peer: Peer,
    arm: PeerArm,
    prompts: TokenIds,
    settings: PeerSettings,
    *,
    candidates: Sequence[Settings],
) -> None:
    best = -1.0
    for candidate in candidates:
        tried: dict[str, Any] = {"settings": dict(candidate)}
        arm.tried.append(tried)
        running: _Running | None = None
        try:
            running = engines.opened(peer, arm, candidate)
            _warm_up(running.process, prompts[0], arm, settings)
            speed = 0.0  # nothing to compare with: the only one is the best
            if len(candidates) > 1:
                tried["tokens_per_s"] = speed = _pass(running.process, prompts, arm, settings)
        except BackendError as error:
            tried["failure"] = str(error)
            if running is not None:
                engines.leave(arm, running)
            continue
        if speed > best:
            best, arm.settings, arm.version = speed, candidate, running.version
            engines.keep(arm, running)
        else:
            engines.leave(arm, running)
    if best < 0:
        arm.failure = arm.tried[-1]["failure"]
        engines.drop(arm)


def _measure(
    engines: _Engines,
    cell: Sequence[tuple[Peer, PeerArm]],
    prompts: TokenIds,
    settings: PeerSettings,
    notify: Callable[[str], None],
) -> None:
    running: list[tuple[PeerArm, PeerProcess]] = []
    for peer, arm in cell:
        if arm.failure is None:
            try:
                opened = engines.opened(peer, arm, arm.settings)
                engines.keep(arm, opened)
                _warm_up(opened.process, prompts[0], arm, settings)
                running.append((arm, opened.process))
            except BackendError as error:
                _fail(arm, error)
                engines.drop(arm)
    for repeat in range(settings.repeats):
        notify(f"temperature {cell[0][1].temperature:g}: repeat {repeat + 1} of {settings.repeats}")
        totals = {arm.name: 0.0 for arm, _ in running}
        for number, prompt in enumerate(prompts):
            for place in range(len(running)):
                arm, process = running[(place + repeat + number) % len(running)]
                if arm.failure is None:
                    totals[arm.name] += _timed(process, prompt, arm, settings, repeat)
        for arm, _ in running:
            if arm.failure is None:
                arm.tokens_per_s.append(len(prompts) * settings.max_new_tokens / totals[arm.name])
    for arm, _ in running:
        if arm.failure is not None:
            engines.drop(arm)


def _note_facts(
    engines: _Engines, peer: Peer, arm: PeerArm, prompts: TokenIds, settings: PeerSettings
) -> None:
    """Start an engine anew, when all that a first start makes is there, and note what it takes."""
    rules = {"max_new_tokens": 1, "temperature": arm.temperature, "seed": settings.seed}
    try:
        process = engines.started(peer, arm, arm.settings).process
        arm.facts = {"start_s": process.start_s}
        arm.facts["start_s"] += process.generate(prompts[0], **rules).seconds
        _pass(process, prompts, arm, settings)
        first = [process.generate(prompt, **rules).seconds for prompt in prompts]
        arm.facts |= {"first_token_s": median(first), "peak_bytes": process.peak_bytes()}
        if arm.method.endswith("plain"):  # drafts do not change the law
            nats = sum(map(process.nats, settings.texts))
            count = sum(len(text) - 2 for text in settings.texts)
            arm.facts |= {"perplexity": math.exp(nats / count)}
            arm.facts |= _reading(process, settings, rules)
        process.stop()
    except BackendError as error:
        _fail(arm, error)


def _reading(
    process: PeerProcess, settings: PeerSettings, rules: Mapping[str, Any]
) -> dict[str, float]:
    """Tokens of prompts a second, by length; no prompt begins as another one does."""
    text = [token for passage in settings.texts for token in passage]
    speeds = dict[str, float]()
    for length in PROMPT_LENGTHS:
        if len(text) < length + READINGS:
            break
        prompts = (text[start : start + length] for start in range(READINGS))
        seconds = median(process.generate(prompt, **rules).seconds for prompt in prompts)
        speeds[read_fact(length)] = length / seconds
    return speeds


def _timed(
    process: PeerProcess, prompt: Sequence[int], arm: PeerArm, settings: PeerSettings, repeat: int
) -> float:
    """Seconds of one completion, which is kept; a failure is the arm's."""
    rules = {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": arm.temperature,
        "seed": settings.seed + repeat,
    }
    try:
        completion = process.generate(prompt, **rules)
    except BackendError as error:
        _fail(arm, error)
        return 0.0
    arm.completions.append(completion.token_ids)
    return completion.seconds


def _pass(process: PeerProcess, prompts: TokenIds, arm: PeerArm, settings: PeerSettings) -> float:
    rules = {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": arm.temperature,
        "seed": settings.seed,
    }
    seconds = sum(process.generate(prompt, **rules).seconds for prompt in prompts)
    return len(prompts) * settings.max_new_tokens / seconds


def _warm_up(
    process: PeerProcess, prompt: Sequence[int], arm: PeerArm, settings: PeerSettings
) -> None:
    for _ in range(2):  # the second call sees what the first one made
        process.generate(
            prompt, max_new_tokens=WARM_UP_TOKENS, temperature=arm.temperature, seed=settings.seed
        )
    time.sleep(0.1)  # threads that wait for work at full speed go to sleep


def _fail(arm: PeerArm, error: BackendError) -> None:
    arm.failure = str(error)
    arm.tokens_per_s.clear()
    arm.completions.clear()
