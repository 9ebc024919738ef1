import numpy as np
from training import build_net

PLAIN = "crop_prob: -1 scale_prob: -1 rotation_prob: -1 hue_rotation_prob: -1 desaturation_prob: -1"


def transformed(images, labels, augmentation):
    """The tops of a DetectNetTransformation in training with a grid of 4 pixels."""
    shapes = " ".join(f"shape {{ {' '.join(f'dim: {size}' for size in one.shape)} }}" for one in (images, labels))
    net = build_net(
        f"layer {{ name: 'i' type: 'Input' top: 'x' top: 'y' input_param {{ {shapes} }} }} "
        "layer { name: 'L' type: 'DetectNetTransformation' bottom: 'x' bottom: 'y' top: 'a' top: 'b' "
        "detectnet_groundtruth_param { stride: 4 image_size_x: 16 image_size_y: 8 "
        "object_class { src: 1 dst: 0 } } "
        f"detectnet_augmentation_param {{ {augmentation} }} }}"
    )
    for top, values in (("x", images), ("y", labels)):
        net.context.backend.from_host(values, net.blobs[top].data)
    net.forward()
    found = [net.blobs[top].host_data().copy() for top in ("a", "b")]
    net.close()
    return found


def test_detectnet_augmentation_param_mirrors_images_and_their_coverage():
    images = np.random.default_rng(0).uniform(0, 255, (2, 3, 8, 16)).astype(np.float32)
    labels = np.zeros((2, 1, 2, 16), np.float32)
    labels[:, 0, 0, :2] = 1, 16
    labels[:, 0, 1, :6] = 0, 0, 8, 8, 0, 1
    plain, plain_maps = transformed(images, labels, f"{PLAIN} flip_prob: -1")
    flipped, flipped_maps = transformed(images, labels, f"{PLAIN} flip_prob: 1")
    np.testing.assert_allclose(plain, images, atol=1e-4)
    np.testing.assert_allclose(flipped, images[..., ::-1], atol=1e-4)
    covered = np.zeros((2, 4))
    covered[:, :2] = 1  # the middle half of the box, the pixels 2 to 6 each way, has a part in four squares of 4
    np.testing.assert_array_equal(plain_maps[:, 0], [covered, covered])
    np.testing.assert_array_equal(plain_maps[:, 3, 0, :2], [[8, 4], [8, 4]])  # the right edge, from each square
    np.testing.assert_array_equal(flipped_maps[:, 0], plain_maps[:, 0, :, ::-1])
