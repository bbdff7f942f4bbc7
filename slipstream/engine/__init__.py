"""The engine: scheduler, step, two runners, the loop."""

from slipstream.engine.loop import EngineLoop
from slipstream.engine.step import Engine

__all__ = ["Engine", "EngineLoop"]
