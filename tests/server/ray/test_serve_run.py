"""The command line that the documents show, as a process of its own, from its start to Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slipstream import LLM, SamplingParams

pytest.importorskip("ray")
from tests.server.ray.cluster import NAME, PATIENCE_S, until

pytestmark = [pytest.mark.replicas, pytest.mark.filterwarnings("ignore")]

if TYPE_CHECKING:
    from tests.server.ray.cluster import Cluster

TOP = Path(__file__).parents[3]


def test_serve_run_answers_a_chat_until_it_is_stopped(ray_cluster: Cluster, tiny: str, tmp_path: Path) -> None:
    """On the tests' own Ray: a port of its own cannot be asked for, and a machine may use 8000 for something else."""
    import ray

    # An application of this name that other tests have left is replaced.
    where = ["--address", ray.get_runtime_context().gcs_address, "--name", NAME]
    line = ["slipstream.server.ray:app", f"model={tiny}", "speculate=auto", "cpus=0.1", "served_model_name=by-hand"]
    serve = Path(sys.executable).with_name("serve")
    said = tmp_path / "said"
    with said.open("wb") as output:
        run = subprocess.Popen([serve, "run", *where, *line], cwd=TOP, stdout=output, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            assert run.poll() is None, said.read_text()
            answer = ray_cluster.http.get("/v1/models")
            return answer.status_code == 200 and answer.json()["data"][0]["id"] == "by-hand"

        until(ready)
        messages = [{"role": "user", "content": "Hello"}]
        answer = ray_cluster.post({"messages": messages, "max_tokens": 40, "temperature": 0}).json()
        (wanted,) = LLM(tiny, speculate="none").chat(messages, SamplingParams(temperature=0, max_tokens=40))
        assert answer["choices"][0]["message"]["content"] == wanted.text
        assert "auto" in ray_cluster.http.get("/v1/models").json()["data"][0]["drafters"]
        os.kill(run.pid, signal.SIGINT)
        assert run.wait(PATIENCE_S) == 0, said.read_text()
        until(lambda: not ray_cluster.replicas())
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
        ray_cluster.start()  # Ctrl-C ends Serve as well
