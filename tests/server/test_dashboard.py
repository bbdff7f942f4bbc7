"""The Grafana dashboard asks for metrics that the server has."""

from __future__ import annotations

import json
import re

from tests.invoking import ROOT
from tests.serving import Served


def test_every_metric_of_the_dashboard_is_there(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "abc abc abc"}], "max_tokens": 40, "temperature": 0}
    server.events("/v1/chat/completions", body)
    told = set(re.findall(r"^(slipstream:\w+)", server.http.get("/metrics").text, re.M))
    # Families without a sample have their TYPE line alone.
    told |= {
        f"{name}_total"
        for name in re.findall(r"^# TYPE (slipstream:\w+?)(?:_total)? counter", server.http.get("/metrics").text, re.M)
    }
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "slipstream.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"slipstream:\w+", target["expr"])
    }
    assert len(asked) > 20 and not asked - told
