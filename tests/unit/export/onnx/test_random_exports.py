"""Random nets of all exported types, as `tests/support/export_nets.py` makes them, and its templates."""

from __future__ import annotations

import re

import pytest
from export_layers import TEMPLATES, UNTRIED
from export_nets import outcomes

from caffepy.export.onnx import rules as onnx_rules
from caffepy.export.torch import rules as torch_rules
from caffepy.formats.fields import NO_MEANING, REFUSED
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.export_rules import ONNX, TORCH, import_families

LAYER = caffe_pb2.LayerParameter.DESCRIPTOR
_ = (onnx_rules, torch_rules)  # their functions register themselves

FILLERS = "FillerParameter"
"""Exports take the values of parameters, however they came about."""


@pytest.mark.parametrize("first", range(8, 33, 5))
def test_random_nets_are_exported_or_refused_by_name(first: int):
    found = [(seed, one) for seed in range(first, first + 5) for one in outcomes(seed)]
    assert found
    assert not [(seed, one) for seed, one in found if one.wrong]


def test_every_exported_type_has_templates():
    import_families()
    assert set(TEMPLATES) == set(ONNX.functions) | set(TORCH.functions)


def _messages() -> set[str]:
    """The fields of LayerParameter that templates have, and those of a type's name."""
    texts = " ".join(template[0] for templates in TEMPLATES.values() for template in templates)
    own = {f"{kind.lower()}param" for kind in TEMPLATES}
    found = set(re.findall(r"(\w+_param) \{", texts))
    return {name for name in LAYER.fields_by_name if name in found or name.replace("_", "") in own}


@pytest.mark.parametrize("holder", sorted(_messages()))
def test_templates_have_every_field_that_acts(holder: str):
    message = LAYER.fields_by_name[holder].message_type
    schema = message.full_name.partition(".")[2]
    texts = [template[0] for templates in TEMPLATES.values() for template in templates if holder in template[0]]
    acting = {
        field.name
        for field in message.fields
        if not {f"{schema}.{field.name}", f"{holder}.{field.name}"} & {*REFUSED, *NO_MEANING, *UNTRIED}
        and (field.message_type is None or field.message_type.name != FILLERS)
    }
    assert acting <= set(re.findall(r"\w+", " ".join(texts)))
