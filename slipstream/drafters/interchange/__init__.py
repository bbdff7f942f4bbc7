"""Reads trained drafters in the layouts of other projects, wherever a checkpoint can be given."""

from slipstream.drafters.interchange.given import checkpoint_of, import_drafter, is_foreign

__all__ = ["checkpoint_of", "import_drafter", "is_foreign"]
