"""What several files about batches start from."""

import json

import pytest

from monge.distributed.batch import BatchJob
from monge.distributed.files import RowFile
from monge.distributed.spec import DecoderSpec
from tests.distributed.batches import OPTIONS, PROMPTS
from tests.serve.served import toy_decoder


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job over ten rows, in shards of three, decoded by tables."""
    monkeypatch.setattr(DecoderSpec, "load", lambda _: toy_decoder())
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(json.dumps({"prompt": text, "id": f"row-{text[7]}"}) + "\n" for text in PROMPTS)
    )

    def make(output="out.jsonl", source=source, **settings):
        given = {"options": OPTIONS, "seed": 1, "shard_rows": 3} | settings
        return BatchJob(source=RowFile(source), output=tmp_path / output, **given)

    return make
