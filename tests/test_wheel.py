"""What `pip install .` gives works outside the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_is_complete_and_works_outside_the_repository(tmp_path: Path) -> None:
    """Built by pip as a user would; run from another folder with nothing but the wheel's own files on the path."""
    source = tmp_path / "source"  # a copy: building leaves folders that would go into the next wheel
    shutil.copytree(ROOT / "slipstream", source / "slipstream", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("slipstream-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    ours = {str(p.relative_to(ROOT)) for p in (ROOT / "slipstream").rglob("*.py")}
    assert ours == {str(p.relative_to(installed)) for p in (installed / "slipstream").rglob("*.py")}
    assert (installed / "slipstream" / "py.typed").exists()
    folders = [ROOT / "slipstream" / name for name in ("drafters", "bench", "server", "policy")]
    found = (p for folder in folders for p in folder.rglob("*") if p.is_file())
    data = {str(p.relative_to(ROOT)) for p in found if p.suffix not in (".py", ".pyc")}
    assert "slipstream/server/playground/index.html" in data and data <= {
        str(p.relative_to(installed)) for p in (installed / "slipstream").rglob("*") if p.is_file()
    }
    code = "import slipstream, sys; from slipstream import LLM; print(slipstream.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout.strip().startswith(str(installed)), run.stderr
    drafters = [sys.executable, "-m", "slipstream", "drafters"]
    listed = subprocess.run(drafters, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert listed.returncode == 0 and "suffix" in listed.stdout, listed.stderr
