"""Decoders that run rounds as one, without compiling them."""

from dataclasses import replace

import monge
from monge.engine.compiled_round import CompiledRound
from monge.engine.decoder import Decoder
from monge.engine.round_module import Round
from monge.engine.step_check import step_spec
from monge.engine.step_module import Step
from monge.engine.whole_round import WholeRound
from tests.engine.tiny import network, perturbed, prompts

RULES = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.5}]


class Counted:
    """A program that counts its rounds, and notes how many tokens the draft model had to read in each."""

    def __init__(self, program):
        self.program, self.count, self.longest_text = program, 0, program.longest_text
        self.num_unread = []

    def __call__(self, inputs):
        self.count += 1
        self.num_unread.append(len(inputs.text))
        return self.program(inputs)


def modules(parts, depth=None):
    """The rounds of some parts, not compiled."""
    chain, networks = parts.drafter.own_chain, (parts.drafter.own_chain.model.network, parts.target.network)
    specs = tuple(map(step_spec, networks))
    steps = tuple(map(Step, networks, specs))
    return {greedy: Round(*steps, specs, depth or chain.depth, parts.on_chains, is_greedy=greedy) for greedy in (True, False)}


def uncompiled(module):
    def run(flat):
        text, *places, uniforms, temperature = flat[:6]
        count = len(module.specs[0].cache_shapes)
        return module(text, tuple(places), (uniforms, temperature), flat[6 : 6 + count], flat[6 + count :])

    return Counted(CompiledRound(run, module.depth))


def with_programs(decoder, programs):
    parts = decoder.parts
    chain = parts.drafter.own_chain
    depth = chain.depth if parts.whole_round is None else parts.whole_round.depth
    whole = WholeRound(parts.target, chain.model, chain, parts.on_chains, programs, depth=depth)
    return Decoder(replace(parts, whole_round=whole), max_batch_size=decoder.max_batch_size)


def both(name="llama", attention="sdpa", **settings):
    """Decoders that run rounds stage by stage and as one, and the programs of the latter."""
    target = network(name, attention)
    plain = monge.load(target, perturbed(target), **{"controller": "fixed", **settings})
    programs = {greedy: uncompiled(module) for greedy, module in modules(plain.parts).items()}
    return plain, with_programs(plain, programs), programs


def written(decoder, count=1, **options):
    options = {"max_new_tokens": 24, "seed": 3, "ignore_eos": True, **options}
    results = decoder.generate(list(prompts((9, 4), seed=5)[:count]), **options)
    facts = [
        [(one.token_ids, one.num_accepted, one.examined, one.next_kind, one.num_nodes, one.depth) for one in result.records]
        for result in results
    ]
    return [result.token_ids for result in results], facts


def num_whole(programs):
    return sum(program.count for program in programs.values())
