"""The fixtures that tests in this folder use."""

from tests.device.on_gpu import made as made
from tests.device.on_gpu import table_of_logits as table_of_logits
