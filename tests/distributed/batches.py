"""Small batch files, and workers that are gone in the middle."""

import json

from monge.distributed.batch import ThisProcess, run_batch
from monge.distributed.shards import decode_shard

OPTIONS = {"max_new_tokens": 8, "temperature": 0.9}
PROMPTS = [f"Number {number} of many" for number in range(10)]


def run(job, workers=None):
    told = []
    report = run_batch(
        job, workers or ThisProcess(), lambda done, total: told.append((done, total))
    )
    return report, told


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Interrupted:
    """Workers that are gone after some shards, and that do them in any order."""

    def __init__(self, *numbers):
        self.numbers, self.done = numbers, []

    def decode(self, shards, spec, rules):
        decoder, known = spec.load(), {shard.number: shard for shard in shards}
        for number in self.numbers:
            self.done.append(number)
            yield number, decode_shard(decoder, known[number], rules)
        raise ConnectionError("gone")
