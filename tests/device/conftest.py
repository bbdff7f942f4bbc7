"""The fixture that every test in this folder uses."""

from tests.device.on_gpu import made as made
