"""The parts of which replicas are made, without Ray Serve: arguments, a replica's health, merged metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import EngineClosed, OptionError, SlipstreamError
from slipstream.server.ray.arguments import Arguments
from slipstream.server.ray.calls import Call
from slipstream.server.ray.merging import merged
from slipstream.server.ray.prefixes import longest, prefixes_of, unpacked


def test_arguments_of_a_command_line_are_those_of_a_file() -> None:
    line = {
        "model": "m", "speculate": "ngram:max_n=4,depth=8", "drafters": '["suffix"]', "max_num_seqs": "8",
        "autoscaling": '{"min_replicas": 1, "max_replicas": 4}', "cpus": "0.5", "playground": "false",
    }  # fmt: skip
    file = {
        "model": "m", "speculate": "ngram:max_n=4,depth=8", "drafters": ["suffix"], "max_num_seqs": 8,
        "autoscaling": {"min_replicas": 1, "max_replicas": 4}, "cpus": 0.5, "playground": False,
    }  # fmt: skip
    assert Arguments.read(line) == Arguments.read(file)
    assert Arguments.read({"served_model_name": "a"}).server.names == ("a",)
    assert Arguments.read({"speculate": '{"method": "ngram"}'}).engine["speculate"] == {"method": "ngram"}
    assert "speculate" not in Arguments.read({}).engine, "the engine has its own default"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modle": "m"}, "modle: Extra inputs are not permitted"),
        ({"capture": "folder"}, "capture: Extra"),
        ({"max_num_seqs": "0"}, "max_num_seqs: Input should be greater than or equal to 1"),
        ({"autoscaling": "{"}, "autoscaling"),
        ({"replicas": 2, "autoscaling": {"max_replicas": 4}}, "either replicas or autoscaling"),
        ({"speculate": "nonsense"}, "nonsense"),
        ({"drafters": "nonsense"}, "nonsense"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SlipstreamError, match=said):
        Arguments.read(given)


def test_keys_are_read_where_the_replica_runs(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# team\nsecret\n")
    given = Arguments.read({"api_key_file": str(tmp_path / "keys")})
    assert given.server.api_keys == ("secret",)
    with pytest.raises(OptionError, match="nowhere"):
        _ = Arguments.read({"api_key_file": str(tmp_path / "nowhere")}).server


@pytest.mark.filterwarnings("ignore")  # Ray has some
def test_a_replica_is_well_as_long_as_its_engine_lives_and_publishes_what_it_holds(tiny: str) -> None:
    pytest.importorskip("ray")
    from slipstream.server.ray.replica import Replica

    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    call = Call.of(scope, body, prefixes_of(body))

    async def held(replica: Replica) -> int:
        stats = await replica.record_routing_stats()
        return longest(call.prefixes, unpacked(stats["prefixes"]))

    async def life() -> None:
        replica = Replica(Arguments.read({"model": tiny, "speculate": "none"}))
        assert await held(replica) == 0
        await replica.check_health()
        refused = Call.of(scope, b"{}", call.prefixes)
        messages = [message async for batch in replica.answer(refused) for message in batch]
        assert messages[0]["status"] == 422 and await held(replica) == 0
        messages = [message async for batch in replica.answer(call) for message in batch]
        assert messages[0]["status"] == 200 and await held(replica) == call.prefixes[-1].length
        replica._service.llm.engine.step = lambda: 1 / 0  # type: ignore[assignment, method-assign]
        messages = [message async for batch in replica.answer(call) for message in batch]
        assert messages[0]["status"] == 200, "it had not begun, and was kept"
        assert await held(replica) == 0, "an engine that was made anew is empty"
        await replica.check_health()
        replica._service.close()
        with pytest.raises(EngineClosed):
            await replica.check_health()

    asyncio.run(life())


def test_metrics_of_several_replicas_are_one_page() -> None:
    page = b'# HELP a:b_total What.\n# TYPE a:b_total counter\na:b_total{x="1"} %d\n# TYPE g gauge\ng 3\n'
    whole = merged([("one", page % 1), ("two", page % 2)]).decode().splitlines()
    assert whole.count("# TYPE a:b_total counter") == 1
    assert {'a:b_total{replica="one",x="1"} 1.0', 'a:b_total{replica="two",x="1"} 2.0'} <= set(whole)
    assert {'g{replica="one"} 3.0', 'g{replica="two"} 3.0'} <= set(whole)
