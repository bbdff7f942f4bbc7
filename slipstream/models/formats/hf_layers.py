"""What a config.json says about its layers: rotations, windows, and which of them have experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.errors import CorruptFile
from slipstream.models.config import LinearScaling, Llama3Scaling
from slipstream.models.formats.hf_reader import HFReader

if TYPE_CHECKING:
    from slipstream.models.formats.hf_config import Family, Mixture

FULL, SLIDING = "full_attention", "sliding_attention"


def rope(reader: HFReader, family: Family, context: int) -> dict[str, Any]:
    """The rope fields of ModelConfig.

    transformers 5 has base and scaling in `rope_parameters`, transformers 4 in two places. If layers with a window have
    another rotation, transformers 5 has a dictionary per kind of layer and transformers 4 has `rope_local_base_freq`.
    """
    fields: dict[str, Any] = {}
    given = reader.raw.get("rope_parameters") or {}
    if family.rope_local_theta is not None:
        if not isinstance(given, dict) or given.keys() - {FULL, SLIDING}:
            raise reader.refuse("has rope_parameters that do not differ by kind of layer")
        local = _flat(reader, "rope_parameters", given.get(SLIDING) or {})
        if local.get("rope_type", "default") != "default":
            raise reader.refuse(f"uses rope scaling {local['rope_type']!r} in layers with a window")
        theta = reader.number("rope_local_base_freq", family.rope_local_theta)
        fields["rope_local_theta"] = reader.number("rope_theta", theta, local)
        given = given.get(FULL) or {}
    whole = _flat(reader, "rope_parameters", given) | _flat(
        reader, "rope_scaling", reader.raw.get("rope_scaling") or {}
    )
    theta = reader.number("rope_theta", reader.number("rope_theta", family.rope_theta), whole)
    return fields | {"rope_theta": theta, "rope_scaling": _scaling(reader, whole, context)}


def _flat(reader: HFReader, key: str, given: Any) -> dict[str, Any]:
    """One rotation's parameters, checked; `rope_type` is there if its older name is."""
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise reader.refuse(f"has {key} that differ by kind of layer")
    if given.get("partial_rotary_factor") not in (None, 1):
        raise reader.refuse(f"needs partial_rotary_factor = {given['partial_rotary_factor']!r}")
    kind = given.get("rope_type") or given.get("type")
    return given | {"rope_type": kind} if kind else dict(given)


def _scaling(reader: HFReader, rope: dict[str, Any], context: int) -> Llama3Scaling | LinearScaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(reader.number("factor", None, rope))
    if kind == "llama3":
        original = reader.count("original_max_position_embeddings", context)
        return Llama3Scaling(
            factor=reader.number("factor", None, rope),
            low_freq_factor=reader.number("low_freq_factor", None, rope),
            high_freq_factor=reader.number("high_freq_factor", None, rope),
            original_context=reader.count("original_max_position_embeddings", original, rope),
        )
    raise reader.refuse(f"uses rope scaling {kind!r}", hint="supported: default, linear, llama3")


def windows(reader: HFReader, family: Family, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; () if no layer has one."""
    if not family.slides or (family.asks_to_slide and not reader.raw.get("use_sliding_window")):
        return ()
    if reader.raw.get("sliding_window", family.window) is None:
        if family.full_every:  # its layers are of two kinds, with or without a window
            raise reader.nonsense("sliding_window", None)
        return ()
    window = reader.count("sliding_window", family.window)
    kinds = reader.raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if slides else FULL for slides in _sliding_layers(reader, family, layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CorruptFile(f"{reader.source}: config.json has layer_types that do not name its {layers} layers")
    # Classes in which every layer slides support no other kind of layer, whatever the file says.
    allowed = {FULL, SLIDING} if family.full_every or family.slides_late else {SLIDING}
    if unknown := sorted({str(kind) for kind in kinds} - allowed):
        raise reader.refuse(f"has layer_types with {unknown[0]!r}", hint=f"supported: {', '.join(sorted(allowed))}")
    found = tuple(window if kind == SLIDING else None for kind in kinds)
    return found if any(found) else ()


def _sliding_layers(reader: HFReader, family: Family, layers: int) -> list[bool]:
    """Which layers slide, if the config does not list them."""
    if family.full_every:
        every = reader.count("sliding_window_pattern", family.full_every)
        return [(layer + 1) % every != 0 for layer in range(layers)]
    first = reader.raw.get("max_window_layers", 28) if family.slides_late else 0
    if not isinstance(first, int):
        raise reader.nonsense("max_window_layers", first)
    return [layer >= first for layer in range(layers)]


def mixture(reader: HFReader, known: Mixture | None, layers: int) -> dict[str, Any]:
    """The expert fields of ModelConfig; none for a family without experts."""
    if known is None:
        return {}
    renormalises = reader.raw.get("norm_topk_prob", known.norm_topk)
    if not isinstance(renormalises, bool):
        raise reader.nonsense("norm_topk_prob", renormalises)
    return {
        "experts": reader.count("num_experts", reader.count("num_local_experts", known.experts)),
        "experts_per_token": reader.count("num_experts_per_tok", known.per_token),
        "expert_size": 0 if known.size is None else reader.count("moe_intermediate_size", known.size),
        "norm_topk": renormalises,
        "dense_layers": _dense_layers(reader, layers) if known.has_dense_layers else (),
    }


def _dense_layers(reader: HFReader, layers: int) -> tuple[int, ...]:
    """The layers that `mlp_only_layers` names, and all but every `decoder_sparse_step`-th."""
    named = reader.raw.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise reader.nonsense("mlp_only_layers", named)
    step = reader.count("decoder_sparse_step", 1)
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)
