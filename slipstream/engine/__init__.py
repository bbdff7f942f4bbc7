"""The engine: a scheduler and a step."""

from slipstream.engine.step import Engine, Progress

__all__ = ["Engine", "Progress"]
