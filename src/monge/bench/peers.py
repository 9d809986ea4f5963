"""`monge bench peers`: the same weights, prompts and arithmetic in other engines, each with its own best settings.

Every engine runs in a process of its own, in float32, on the same number of threads, one sequence at a time, and takes and
gives token ids. First every way of decoding of every engine looks for its best setting on prompts that are measured
afterwards, which favours all alike. Then all arms of a temperature are open together and decode each prompt in turns, in
rotating order. Greedy arms must give the reference's text; how often they do is reported, as is how often a text ends in a
loop, which flatters every drafter. Sampling is asked only of methods whose law is the target's.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from monge.bench.arms import TokenIds
from monge.bench.peer_environments import install, python_of
from monge.bench.peer_list import Peer, Settings
from monge.bench.peer_process import PeerProcess
from monge.bench.peer_report import PeerArm, arm_record, headline
from monge.bench.provenance import provenance
from monge.core.errors import BackendError

WARM_UP_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How peers are compared.

    Args:
        target: Folder of the target.
        draft: Folder of the draft model.
        work: Where environments and converted models are kept.
        threads: Threads of every engine.
        max_new_tokens: Length of every completion.
        repeats: Measured passes over the prompts.
        temperatures: 0 is greedy.
        seed: Of sampled arms.
        is_quick: A shorter search.
        installs: Make missing environments.
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


class _Engines:
    """Opens engines as the settings say."""

    def __init__(self, settings: PeerSettings, notify: Callable[[str], None]) -> None:
        self._settings, self._notify = settings, notify
        self._pythons: dict[str, Path | str] = {}

    def opened(self, peer: Peer, method: str, settings: Settings, stack: ExitStack) -> tuple[PeerProcess, str]:
        """A worker with an engine, and the engine's version; it ends with the stack."""
        asked = self._settings
        process = stack.enter_context(PeerProcess(self._python(peer), peer.name))
        folders = {"target": asked.target, "draft": asked.draft, "work": str(asked.work)}
        return process, process.open(**folders, threads=asked.threads, method=method, settings=dict(settings))

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
    peers: Sequence[Peer], prompts: TokenIds, settings: PeerSettings, *, notify: Callable[[str], None]
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
    for temperature in settings.temperatures:
        cell: list[tuple[Peer, PeerArm]] = []
        for peer in peers:
            for name, method in peer.methods.items():
                if temperature > 0 and not method.is_sampled:
                    left_out.append({"arm": f"{peer.name} {name}", "reason": method.why_not_sampled or ""})
                    continue
                arm = PeerArm(peer=peer.name, method=name, temperature=temperature)
                notify(f"looking for settings of {arm.name}, temperature {temperature:g}")
                _search(engines, peer, arm, prompts, settings)
                cell.append((peer, arm))
        _measure(engines, cell, prompts, settings, notify)
        arms += [arm for _, arm in cell]
    return {
        "headline": {f"{temperature:g}": headline(arms, temperature) for temperature in settings.temperatures},
        "arms": [arm_record(arm, arms) for arm in arms],
        "not_sampled": left_out,
        "settings": {**asdict(settings), "work": str(settings.work)},
        "num_prompts": len(prompts),
        "provenance": before | {"load_average_after": provenance(torch.device("cpu"))["load_average"]},
    }


def _search(engines: _Engines, peer: Peer, arm: PeerArm, prompts: TokenIds, settings: PeerSettings) -> None:
    method, best = peer.methods[arm.method], 0.0
    candidates = method.candidates[: method.quick] if settings.is_quick else method.candidates
    for candidate in candidates:
        tried: dict[str, Any] = {"settings": dict(candidate)}
        arm.tried.append(tried)
        try:
            with ExitStack() as stack:
                process, arm.version = engines.opened(peer, arm.method, candidate, stack)
                _warm_up(process, prompts[0], arm, settings)
                if len(candidates) == 1:
                    arm.settings = candidate
                    return
                tried["tokens_per_s"] = speed = _pass(process, prompts, arm, settings)
        except BackendError as error:
            tried["failure"] = str(error)
            continue
        if speed > best:
            best, arm.settings = speed, candidate
    if best == 0:
        arm.failure = arm.tried[-1]["failure"]


def _measure(
    engines: _Engines,
    cell: Sequence[tuple[Peer, PeerArm]],
    prompts: TokenIds,
    settings: PeerSettings,
    notify: Callable[[str], None],
) -> None:
    with ExitStack() as stack:
        running: list[tuple[PeerArm, PeerProcess]] = []
        for peer, arm in cell:
            if arm.failure is None:
                try:
                    process, arm.version = engines.opened(peer, arm.method, arm.settings, stack)
                    _warm_up(process, prompts[0], arm, settings)
                    running.append((arm, process))
                except BackendError as error:
                    _fail(arm, error)
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


def _timed(process: PeerProcess, prompt: Sequence[int], arm: PeerArm, settings: PeerSettings, repeat: int) -> float:
    """Seconds of one completion, which is kept; a failure is the arm's."""
    rules = {"max_new_tokens": settings.max_new_tokens, "temperature": arm.temperature, "seed": settings.seed + repeat}
    try:
        completion = process.generate(prompt, **rules)
    except BackendError as error:
        _fail(arm, error)
        return 0.0
    arm.completions.append(completion.token_ids)
    return completion.seconds


def _pass(process: PeerProcess, prompts: TokenIds, arm: PeerArm, settings: PeerSettings) -> float:
    rules = {"max_new_tokens": settings.max_new_tokens, "temperature": arm.temperature, "seed": settings.seed}
    seconds = sum(process.generate(prompt, **rules).seconds for prompt in prompts)
    return len(prompts) * settings.max_new_tokens / seconds


def _warm_up(process: PeerProcess, prompt: Sequence[int], arm: PeerArm, settings: PeerSettings) -> None:
    for _ in range(2):  # the second call sees what the first one made
        process.generate(prompt, max_new_tokens=WARM_UP_TOKENS, temperature=arm.temperature, seed=settings.seed)
    time.sleep(0.1)  # threads that wait for work at full speed go to sleep


def _fail(arm: PeerArm, error: BackendError) -> None:
    arm.failure = str(error)
    arm.tokens_per_s.clear()
    arm.completions.clear()
