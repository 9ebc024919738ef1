import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_rng import Parts, ScriptedRng

from caffepy.data.random import SampleRng
from caffepy.data.transforms.boxes import check_samplers, random_patches, sample_patch, satisfies
from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import BatchSampler, SampleConstraint, Sampler

OBJECTS = np.array([[0.1, 0.1, 0.4, 0.5], [0.6, 0.5, 0.9, 0.9]], np.float32)


def sampler(text):
    return text_format.Parse(text, BatchSampler())


def plain_overlap(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0)


def plain_area(a):
    return (a[2] - a[0]) * (a[3] - a[1])


def test_patches_lie_within_the_image_and_have_the_scale_and_ratio():
    text = "min_scale: 0.3 max_scale: 0.9 min_aspect_ratio: 0.5 max_aspect_ratio: 2"
    patches = random_patches(text_format.Parse(text, Sampler()), 4000, SampleRng(1, 2, 3))
    width, height = patches[:, 2] - patches[:, 0], patches[:, 3] - patches[:, 1]
    assert patches.min() >= 0
    assert patches.max() <= 1 + 1e-6
    scale, ratio = np.sqrt(width * height), width / height
    assert scale.min() > 0.299
    assert scale.max() < 0.901
    assert abs(scale.mean() - 0.6) < 0.01
    assert ratio.min() > 0.499
    assert ratio.max() < 2.001
    slack = patches[:, 0][width < 0.8] / (1 - width[width < 0.8])
    assert abs(slack.mean() - 0.5) < 0.02


def plain_patch(param, scale_part, ratio_part, x_part, y_part):
    """From four numbers; a ratio with which a side would be longer than the image's is brought back."""
    scale = param.min_scale + (param.max_scale - param.min_scale) * scale_part
    ratio = param.min_aspect_ratio + (param.max_aspect_ratio - param.min_aspect_ratio) * ratio_part
    ratio = min(max(ratio, scale**2), 1 / scale**2)
    width, height = scale * ratio**0.5, scale / ratio**0.5
    left, top = (1 - width) * x_part, (1 - height) * y_part
    return [left, top, left + width, top + height]


PART = st.floats(0, 0.9999)
SAMPLERS = [
    "min_scale: 0.3 max_scale: 0.9 min_aspect_ratio: 0.5 max_aspect_ratio: 2",
    "min_scale: 0.3 max_scale: 0.4 min_aspect_ratio: 1.5 max_aspect_ratio: 4",
    "min_scale: 0.7 max_scale: 0.8 min_aspect_ratio: 0.1 max_aspect_ratio: 0.9",
    "min_scale: 0.5",
    "max_aspect_ratio: 3",
]


@given(st.sampled_from(SAMPLERS), st.tuples(PART, PART, PART, PART))
@settings(max_examples=150)
def test_patches_against_a_plain_computation(text, parts):
    param = text_format.Parse(text, Sampler())
    wanted = plain_patch(param, *parts)
    np.testing.assert_allclose(random_patches(param, 1, ScriptedRng(parts))[0], wanted, rtol=1e-5, atol=1e-6)


@given(st.lists(PART, min_size=97, max_size=97))
@settings(max_examples=60, derandomize=True)
def test_what_samplers_find_against_a_plain_computation(parts):
    """The first gives all of its patches, the second none at all, the third its first two with an object's half."""
    third = "min_scale: 0.2 max_scale: 0.9 min_aspect_ratio: 0.7 max_aspect_ratio: 1.4"
    samplers = [
        sampler(f"max_trials: 3 sampler {{ {SAMPLERS[0]} }}"),
        sampler(f"max_trials: 7 sampler {{ {SAMPLERS[1]} }} use_original_image: false"),
        sampler(f"max_sample: 2 max_trials: 21 sampler {{ {third} }} sample_constraint {{ min_object_coverage: 0.5 }}"),
    ]
    chances, wanted = Parts(parts), []
    for one in (samplers[0], samplers[2]):
        numbers = [[chances.next() for _ in range(one.max_trials)] for _ in range(4)]
        patches = [plain_patch(one.sampler, *four) for four in zip(*numbers, strict=True)]
        if one is samplers[2]:
            objects = OBJECTS.astype(float)
            shares = [[plain_overlap(patch, box) / plain_area(box) for box in objects] for patch in patches]
            patches = [patch for patch, own in zip(patches, shares, strict=True) if max(own) >= 0.5][:2]
        wanted += patches
    drawn = ScriptedRng(parts)
    found = sample_patch(samplers, OBJECTS, drawn)
    np.testing.assert_allclose(found, wanted[int(chances.next() * len(wanted))], rtol=1e-4, atol=1e-5)
    assert not drawn.left


@pytest.mark.parametrize("kind", ["jaccard_overlap", "sample_coverage", "object_coverage"])
def test_constraints(kind):
    patches = random_patches(text_format.Parse("min_scale: 0.2 max_scale: 0.8", Sampler()), 300, SampleRng(1, 2, 3))
    for limits in ((0.2, None), (None, 0.1), (0.1, 0.6)):
        names = (f"min_{kind}", f"max_{kind}")
        given = {name: limit for name, limit in zip(names, limits, strict=True) if limit is not None}
        found = satisfies(patches, OBJECTS, SampleConstraint(**given))
        wanted = []
        for patch in patches:
            values = []
            for box in OBJECTS:
                shared = plain_overlap(patch, box)
                whole = {
                    "jaccard_overlap": plain_area(patch) + plain_area(box) - shared,
                    "sample_coverage": plain_area(patch),
                    "object_coverage": plain_area(box),
                }[kind]
                values.append(shared / whole)
            low, high = (
                limit if limit is not None else default for limit, default in zip(limits, (-1, 9), strict=True)
            )
            wanted.append(any(low <= value <= high for value in values))
        np.testing.assert_array_equal(found, wanted)
        assert 0 < found.sum() < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_jaccard_overlap", 1 / 6),
        ("max_jaccard_overlap", 1 / 6),
        ("min_sample_coverage", 1 / 4),
        ("max_sample_coverage", 1 / 4),
        ("min_object_coverage", 1 / 3),
        ("max_object_coverage", 1 / 3),
    ],
)
def test_each_limit_parts_the_patches_at_its_value(field, value):
    """The patch and the box share 1/16 of the image; their areas are 4/16 and 3/16."""
    patch, box = (np.array([one], np.float32) for one in ([0, 0, 0.5, 0.5], [0.25, 0.25, 0.5, 1]))
    below, above = (satisfies(patch, box, SampleConstraint(**{field: value + step})) for step in (-0.01, 0.01))
    assert (below.item(), above.item()) == ((True, False) if field.startswith("min") else (False, True))


@pytest.mark.parametrize("first", range(3))
def test_the_first_measure_that_is_limited_decides(first):
    """As in Caffe's loop over the objects, which never takes back what it found by the first measure."""
    kinds = ["jaccard_overlap", "sample_coverage", "object_coverage"][first:]
    patches = random_patches(text_format.Parse("min_scale: 0.2 max_scale: 0.8", Sampler()), 300, SampleRng(1, 2, 3))
    alone = satisfies(patches, OBJECTS, SampleConstraint(**{f"min_{kinds[0]}": 0.2}))
    more = satisfies(
        patches, OBJECTS, SampleConstraint(**{f"min_{kind}": 0.2 + 0.6 * n for n, kind in enumerate(kinds)})
    )
    np.testing.assert_array_equal(more, alone)
    assert 0 < alone.sum() < 300


def test_without_objects_only_a_sampler_without_constraints_finds_patches():
    none = np.empty((0, 4), np.float32)
    text = "sampler { min_scale: 0.5 } "
    assert sample_patch([sampler(text)], none, SampleRng(0, 0, 0)) is not None
    constrained = sampler(text + "sample_constraint { min_jaccard_overlap: 0 }")
    assert sample_patch([constrained], none, SampleRng(0, 0, 0)) is None


def test_samplers_give_as_many_patches_as_they_may():
    whole, small = (
        sampler("max_sample: 1 max_trials: 1"),
        sampler("sampler { min_scale: 0.3 max_scale: 0.4 } max_trials: 130"),
    )
    small.max_sample = 3
    counts = {True: 0, False: 0}
    for sample in range(400):
        patch = sample_patch([whole, small], OBJECTS, SampleRng(1, 1, sample))
        counts[bool((patch == [0, 0, 1, 1]).all())] += 1
    assert 60 < counts[True] < 140  # one of four


def test_a_sampler_may_not_take_the_image():
    assert sample_patch([sampler("use_original_image: false")], OBJECTS, SampleRng(0, 0, 0)) is None


def test_a_hopeless_constraint_ends_after_its_trials():
    text = "sampler { min_scale: 0.1 max_scale: 0.2 } sample_constraint { min_jaccard_overlap: 0.99 } max_trials: 200"
    assert sample_patch([sampler(text)], OBJECTS, SampleRng(0, 0, 0)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_scale: 0", "0 < min_scale <= max_scale <= 1, not 0 and 1"),
        ("max_scale: 2", "0 < min_scale <= max_scale <= 1, not 1 and 2"),
        ("min_scale: nan", "not nan and 1"),
        ("min_aspect_ratio: 2", "0 < min_aspect_ratio <= max_aspect_ratio, not 2 and 1"),
        ("max_aspect_ratio: inf", "not 1 and inf"),
    ],
)
def test_ranges_that_are_refused(text, message):
    with pytest.raises(ConfigError, match=f"layer 'x': a sampler needs .*{message}"):
        check_samplers([sampler(f"sampler {{ {text} }}")], "layer 'x'")
