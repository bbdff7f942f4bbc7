"""The playground at `/`: static files of the package."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent.parent / "playground"


def mount_playground(app: FastAPI) -> None:
    """Serve the page, below all other routes."""
    if (FOLDER / "index.html").exists():
        app.mount("/", StaticFiles(directory=FOLDER, html=True), name="playground")
