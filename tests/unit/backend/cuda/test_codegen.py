"""The text of CUDA kernels; needs no GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.backend.cuda.codegen import (
    Access,
    Variant,
    apply_text,
    formula_text,
    reduce_columns_text,
    reduce_segments_text,
)


@expression
def awkward(double: Each, int_: Each, class_: Channel, i: Scalar) -> tuple[Each, Each]:
    new = double * class_ + i
    new = new if new > 0 else -new
    return new**2, max(new, int_)


def variant(width: int = 1, access: Access = Access(), scalars: tuple[str, ...] = ()) -> Variant:  # noqa: B008
    """Four kinds of dtype at once."""
    return Variant(
        ("float", "float16"), ("bfloat16", "float"), width, 2, device_scalars=frozenset(scalars), channels=(access,)
    )


def test_words_of_cuda_c_may_be_names_in_a_formula() -> None:
    text = formula_text(awkward)
    assert "float v_new = ((v_double * v_class_) + v_i);" in text
    assert "v_new = ((v_new > 0.0f) ? v_new : (-v_new));" in text
    assert not re.search(r"\bfloat &?(new|double|i)\b", text)


def test_arguments_and_outputs_keep_their_storage() -> None:
    text = apply_text(awkward, variant(4))
    for parameter in ("const float *double_p_", "const float16 *int__p_", "bfloat16 *o0_p_", "float *o1_p_"):
        assert parameter in text
    assert "load_raw<4>(int__p_, i_)" in text and "store<4>(o0_p_, i_, o0_)" in text


@pytest.mark.parametrize(
    ("access", "place"),
    [
        (Access(), "class__p_[i_]"),
        (Access(divides=True), "class__p_[class__by_inner_(i_)]"),
        (Access(wraps=True), "class__p_[remainder_(i_, class__size_, class__by_size_)]"),
        (Access(wraps=True, packed=True), "load<4>(class__p_, remainder_(i_, class__size_, class__by_size_))"),
        (Access(once=True), "class__p_[0]"),
        (Access(wraps=True, packed=True, once=True), "load<4>(class__p_, threadIdx.x % class__size_)"),
    ],
)
def test_channel_arguments_are_found(access: Access, place: str) -> None:
    text = apply_text(awkward, variant(4, access))
    found = re.search(r"v_class_(\[u_\])? = (.*);", text)
    assert found is not None and found[2] == place
    assert (found[1] is None) == access.once


def test_scalars_may_be_read_from_the_device() -> None:
    assert "const float v_i = *i_p_;" in apply_text(awkward, variant(scalars=("i",)))


@pytest.mark.parametrize("width", [1, 4])
def test_every_sum_of_a_reduction_is_written_once(width: int) -> None:
    chosen = variant(width, Access(wraps=True, once=True))
    for text in (reduce_columns_text(awkward, chosen, 8), reduce_segments_text(awkward, chosen)):
        for output in ("o0_p_", "o1_p_"):
            assert len(re.findall(rf"put_total\({output} ", text)) == 1


def test_each_image_has_its_part_of_a_channel_argument() -> None:
    chosen = replace(variant(4, Access(wraps=True, packed=True, once=True)), images=True)
    text = apply_text(awkward, chosen)
    for line in ("double_p_ += blockIdx.y * (size_t)n_ * 4;", "o1_p_ += blockIdx.y * (size_t)n_ * 4;"):
        assert line in text
    assert "class__p_ += blockIdx.y * (size_t)class__size_ * 4;" in text
    text = reduce_columns_text(awkward, chosen, 8)
    for line in ("double_p_ += blockIdx.z * (size_t)rows_ * size_ * 4;", "o1_p_ += blockIdx.z * (size_t)size_ * 4;"):
        assert line in text
    assert "partial_ += blockIdx.z * (size_t)gridDim.y * 8 * size_;" in text
