"""Compiles kernels: LLVM IR in, functions out. Compiled code is kept in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.folders import cache_directory
from slipstream.native.machine import CALLED, threads
from slipstream.notice import notice

if TYPE_CHECKING:
    from llvmlite import ir

log = logging.getLogger("slipstream")

Build = Callable[["ir.Module"], None]

_LEVEL = 3  # of optimisation
_DIGEST = 32  # bytes


class Library:
    """Compiled functions by name, and the threads that run them."""

    def __init__(self, code: bytes) -> None:
        from llvmlite import binding

        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target())
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self._start = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(self["start"])

    def __getitem__(self, name: str) -> int:
        """The address of a function."""
        return int(self._engine.get_function_address(name))

    def run(self, program: int, *, alone: bool = False) -> None:
        """Run the program at an address: the number of its steps, then a function and its arguments for each.

        `alone`: by this thread.
        """
        self._start(program, 1 if alone else threads())


def library(name: str, build: Build) -> Library:
    """The functions that `build` emits, and `start`; `name` distinguishes them from others of the same sources."""
    file = cache_directory() / "kernels" / _key(name)
    code = _kept(file)
    if code is None:
        _announce()
        code = _compiled(build)
        with contextlib.suppress(OSError):  # without a writable cache it is compiled every time
            _keep(file, code)
    return Library(code)


@functools.cache
def _announce() -> None:
    """Once per process: several libraries are compiled one after the other."""
    notice(log, "compiling CPU kernels (once for this processor and version, some seconds)")


def _kept(file: Path) -> bytes | None:
    """Code compiled before, if complete: incomplete code would crash."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(file: Path, code: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # removed in any case
        part = Path(folder) / "part"
        part.write_bytes(hashlib.sha256(code).digest() + code)
        part.replace(file)


def _key(name: str) -> str:
    """Everything that the compiled code depends on: the sources, the compiler and the CPU."""
    from llvmlite import binding

    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    facts = name, binding.llvm_version_info, binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return hashlib.sha256(sources + repr(facts).encode()).hexdigest()[:32]


def _target() -> Any:
    """A description of this CPU; an engine that is given one owns it."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    library = ctypes.CDLL(None)
    for name in CALLED:
        binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=_LEVEL,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


def _compiled(build: Build) -> bytes:
    from llvmlite import binding, ir

    from slipstream.native.team import add_team

    written = ir.Module("kernels")
    build(written)
    add_team(written)
    target = _target()
    module = binding.parse_assembly(str(written))
    module.triple, module.data_layout = target.triple, str(target.target_data)
    passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=_LEVEL))
    passes.getModulePassManager().run(module, passes)
    return bytes(target.emit_object(module))
