"""Converts the model to OpenVINO's format, once per kind of weights. Runs before anything is measured."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.openvino import converted
from benchmarks.peers.protocol import Task

# 4-bit weights share a scale by groups, which must divide the width of the model.
_OPTIONS = {"int4": ["--group-size", "64"]}


def main() -> None:
    task = Task.from_json(sys.stdin.read())
    export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    for weights in sorted({mode.split()[0] for mode in task.modes}):
        target = converted(task, weights)
        if target.exists():
            continue
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [*export, "--model", task.paths.directory, "--task", "text-generation-with-past"]
        command += ["--weight-format", weights, *_OPTIONS.get(weights, []), str(part)]
        subprocess.run(command, stdout=sys.stderr, check=True)
        part.rename(target)


if __name__ == "__main__":
    main()
