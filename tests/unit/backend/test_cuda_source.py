"""The text of CUDA kernels; needs no GPU."""

from __future__ import annotations

import re

import pytest

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.backend.cuda_source import Variant, apply_text, formula_text, reduce_columns_text, reduce_segments_text


@expression
def awkward(double: Each, int_: Each, class_: Channel, i: Scalar) -> tuple[Each, Each]:
    new = double * class_ + i
    new = new if new > 0 else -new
    return new**2, max(new, int_)


def test_words_of_cuda_c_may_be_names_in_a_formula() -> None:
    text = formula_text(awkward)
    assert "float v_new = ((v_double * v_class_) + v_i);" in text
    assert "v_new = ((v_new > 0.0f) ? v_new : (-v_new));" in text
    assert not re.search(r"\bfloat &?(new|double|i)\b", text)


def test_four_elements_a_thread() -> None:
    text = apply_text(awkward, Variant(4, splat=frozenset({"class_"})))
    calls = re.findall(r"formula_\((.*)\);", text)
    assert calls == [f"v_double.{k}, v_int_.{k}, v_class_, v_i, o0_.{k}, o1_.{k}" for k in "xyzw"]


def test_scalars_may_be_read_from_the_device() -> None:
    assert "const float v_i = *i_p_;" in apply_text(awkward, Variant(device_scalars=frozenset({"i"})))


@pytest.mark.parametrize("text", [reduce_columns_text, reduce_segments_text])
@pytest.mark.parametrize("width", [1, 4])
def test_every_sum_of_a_reduction_is_written_once(text: object, width: int) -> None:
    kernel = text(awkward, Variant(width, fixed=frozenset({"class_"})))  # type: ignore[operator]
    written = width if text is reduce_columns_text else 1
    for output in ("o0_p_", "o1_p_"):
        assert len(re.findall(rf"else {output}\[", kernel)) == written
