"""An OpenAI-compatible server over the engine. Needs the extra `slipstream[serve]`."""
