"""The shape of the project: imports go one way, files stay readable."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream import SamplingParams
from slipstream.drafters import drafter_names

PACKAGE = Path(slipstream.__file__).parent
# A room imports only from rows above its own (and from its own row).
ROOMS = [
    ["errors", "folders", "checks", "params", "types", "profiles", "notice"],
    ["text", "native"],
    ["draw", "tree_check", "tree", "noise", "gumbel_max", "sampling", "verify", "grammar"],
    ["cache", "sequence"],
    ["policy", "inputs"],
    ["gpu", "attention"],
    ["models"],
    ["drafters"],
    ["engine"],
    ["progress_bar", "llm", "async_llm"],
    ["bench", "train"],
    ["server"],
    ["commands"],
    ["cli", "__main__"],
]


def row(module: str) -> int:
    return next(number for number, rooms in enumerate(ROOMS) if module in rooms)


def runtime_imports(tree: ast.Module) -> set[str]:
    """Modules of the package that are imported anywhere but under TYPE_CHECKING."""
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            guarded.update(ast.walk(node))
    found = set()
    for node in ast.walk(tree):
        if node in guarded:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] if node.module != "slipstream" else [f"slipstream.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found.update(name.split(".")[1] for name in names if name.startswith("slipstream."))
    return found


def sources() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_rows_above_its_own(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    public = {"LLM": "llm", "AsyncLLM": "async_llm", "SamplingParams": "types", "__version__": "errors"}
    for imported in runtime_imports(ast.parse(path.read_text())):
        assert row(public.get(imported, imported)) <= row(own), f"{path.name} imports {imported}"


def test_no_method_is_named_outside_the_drafters() -> None:
    """The engine does not know the method."""
    # "none" and "auto" are values of other options too; a parameter may have the name of the drafter that it is for.
    methods = set(drafter_names()) - {"none", "auto", "grammar"} - {f.name for f in dataclasses.fields(SamplingParams)}
    for path in sources():
        if path.relative_to(PACKAGE).parts[0] in ("drafters", "bench", "commands", "cli.py"):
            continue
        strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        field = {"suffix"} if path.parent.name == "wire" else set()  # of OpenAI's completions
        assert not [s for s in strings if s in methods - field], path


def test_drafters_call_each_other_by_public_names() -> None:
    """A device loop asks its drafter for nothing that only the host's half of it knows."""
    for path in sorted((PACKAGE / "drafters").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert ast.unparse(node.value) in ("self", "cls", "super()"), f"{path.name}: {ast.unparse(node)}"


def test_files_stay_readable_in_one_sitting() -> None:
    for path in sources():
        assert len(path.read_text().splitlines()) <= 400, path
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        assert len(path.read_text().splitlines()) <= 450, path


def test_folders_stay_readable_at_a_glance() -> None:
    """A folder with more files than these has rooms of its own."""
    for folder in {path.parent for top in (PACKAGE, Path(__file__).parent) for path in top.rglob("*.py")}:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 24, folder


def test_the_core_needs_little_more_than_torch() -> None:
    """Machines without gguf, huggingface_hub, typer, rich, fastapi or llguidance can import and run the engine."""
    blocked = ["gguf", "huggingface_hub", "typer", "rich", "fastapi", "transformers", "llguidance"]
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
from slipstream import LLM, SamplingParams
from tests.tiny import tiny_llm
llm = tiny_llm(speculate="suffix")
print(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1))[0].token_ids)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr


def listed_modules() -> list[str]:
    """The paths in the tables of "Every module"; in a row a name without a folder is in that of the name before it."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    room = found = ""
    listed: list[str] = []
    for line in page.partition("## Every module")[2].partition("\n## ")[0].splitlines():
        if line.startswith(("### ", "`")):
            rooms = re.findall(r"`(\w+/(?:\w+/)?)`", line)
            if line.startswith("### "):
                room = found = rooms[0] if len(rooms) == 1 else ""
            else:
                found = room + (rooms[0] if len(rooms) == 1 else "")
        elif line.startswith("| `"):
            folder = ""
            for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1]):
                folder = name[: name.rindex("/") + 1] if "/" in name else folder
                listed.append(found + folder + name.rpartition("/")[2])
    return listed


def test_every_module_has_one_line_in_the_architecture() -> None:
    modules = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
    modules = [module for module in modules if not module.endswith("/__init__.py")]
    assert sorted(listed_modules()) == sorted(modules)


def pages() -> list[Path]:
    root = PACKAGE.parent
    return [*root.glob("*.md"), *(root / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_lines_of_a_document_are_short_and_the_files_that_it_names_exist(page: Path) -> None:
    text, root = page.read_text(), PACKAGE.parent
    assert not [line for line in text.splitlines() if len(line) > 120]
    rooms = [root / name for name in ("slipstream", "tests", "benchmarks")]
    files = ["/" + str(path.relative_to(root)) for room in rooms for path in room.rglob("*.py")]
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert not [name for name in named if not any(file.endswith("/" + name) for file in files)]
