"""A GGUF file's model in 8 bits, for a peer that reads such files: what our `int8` is to be compared with."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

_BLOCK = 32
_OWN = ("GGUF.", "general.architecture", "general.file_type")  # keys that the writer makes


def write_q8_0(source: Path, target: Path) -> None:
    """The same keys, and all matrices in blocks of Q8_0; vectors stay float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for name, key in reader.fields.items():
        if not name.startswith(_OWN):
            inner = key.types[-1] if key.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, key.contents(), key.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values, kind = dequantize(tensor.data, tensor.tensor_type), GGMLQuantizationType.F32
        if values.ndim > 1 and values.shape[-1] % _BLOCK == 0:
            kind = GGMLQuantizationType.Q8_0
            values = quantize(values, kind)
        writer.add_tensor(tensor.name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
