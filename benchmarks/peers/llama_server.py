"""llama.cpp's own server, as the package xllamacpp brings it; runs in an environment of its own, with nothing of ours.

python benchmarks/peers/llama_server.py MODEL.gguf PORT CLIENTS CONTEXT THREADS
"""

from __future__ import annotations

import signal
import sys

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    model, port, clients, context, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = clients
    params.n_ctx = clients * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.use_jinja = True  # the chat template of the file
    print(xllamacpp.get_system_info(), flush=True)
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
