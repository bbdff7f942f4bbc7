"""`python -m slipstream.train METHOD --data D --out O`: training with torch alone.

`slipstream train` does the same with progress bars and more options.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.train.config import TrainConfig
from slipstream.train.joint.run import require_places, split_settings, train_jointly
from slipstream.train.run import TrainJob, train
from slipstream.train.settings import parsed
from slipstream.train.trainer import ProgressSink

_SHOW_EVERY = 10.0  # seconds


class _Lines:
    """Progress as plain lines, at most one per `_SHOW_EVERY` seconds."""

    def __init__(self) -> None:
        self._last = 0.0

    def show(self, line: str) -> None:
        if time.monotonic() - self._last >= _SHOW_EVERY:
            self._last = time.monotonic()
            print(line, flush=True)


def main() -> int:
    """Parse, train, report."""
    parser = argparse.ArgumentParser(prog="python -m slipstream.train", description=__doc__.splitlines()[0])
    parser.add_argument("method")
    parser.add_argument("--data", required=True, type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--init", default="")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from a piece; the data may have grown")
    parser.add_argument("--piece", action="store_true", help="end with a state that --resume continues")
    parser.add_argument("--joint", action="store_true", help="tune the target too: makes another model")
    parser.add_argument("--model-out", type=Path, help="directory of that model (default: beside --out)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    for field in dataclasses.fields(TrainConfig):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    given["data"] = tuple(given["data"])
    try:
        config = TrainConfig(**{field.name: given.pop(field.name) for field in dataclasses.fields(TrainConfig)})
        joint, model_out, settings = given.pop("joint"), given.pop("model_out"), parsed(given.pop("set"))
        sink = ProgressSink(lambda line: print(line, flush=True), _Lines().show)
        require_places(joint, given["out"], model_out)
        if joint:
            tuning, settings = split_settings(given["method"], settings)
            job = TrainJob(settings=settings, config=config, **given)
            _, place, drafter = train_jointly(job, tuning, sink, model_out)
        else:
            place, drafter = train(TrainJob(settings=settings, config=config, **given), sink)
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{place}: {drafter.figures}\n{drafter.provenance.get('training', '')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
