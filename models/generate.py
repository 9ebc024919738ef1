"""Writes the prototxts in this folder that are too long, or too regular, to be kept by hand.

python models/generate.py           every train_val.prototxt of NETS, and the deploy nets of all models
python models/generate.py --check   only says which files are not what this program writes; exits with 1 then
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from generator.classifiers import alexnet, densenet121, mobilenet, resnet152, squeezenet, vgg19
from generator.dense import fcn8s, lrcn
from generator.detectors import mobilenet_ssd, ssd300
from generator.inception import inception_v3
from generator.mnist import autoencoder, siamese
from generator.text import net_text

from caffepy.formats.load import read_net
from caffepy.formats.proto import caffe_pb2
from caffepy.net.deploy import Deploy, deploy_net

MODELS = Path(__file__).resolve().parent
Net = Callable[[], caffe_pb2.NetParameter]

BGR = "mean of ImageNet per channel, in the order blue, green, red."
IMAGENET = f"Images of 256 x 256 in two LMDBs beside this file; {BGR}"
VOC = "Annotated images in two LMDBs beside this file; values in the order blue, green, red."

NETS: dict[str, tuple[Net, str]] = {
    "mnist_autoencoder": (
        autoencoder,
        "The autoencoder of Caffe's examples: 784-1000-500-250-30 and back, 2,837,314 weights.\n"
        "Digits in two LMDBs beside this file; values from 0 to 1.",
    ),
    "mnist_siamese": (
        siamese,
        "A siamese net (Hadsell, Chopra and LeCun, 2006) on pairs of digits, 431,102 weights that both halves share.\n"
        "Pairs in two LMDBs beside this file: two channels, label 1 where both are the same digit.",
    ),
    "alexnet": (
        alexnet,
        "AlexNet (Krizhevsky, Sutskever and Hinton, 2012), with normalisation before pooling, 60,965,224 weights.\n"
        + IMAGENET,
    ),
    "vgg19": (vgg19, f"VGG-19 (Simonyan and Zisserman, 2014), 143,667,240 weights.\n{IMAGENET}"),
    "inception_v3": (
        inception_v3,
        "Inception-v3 (Szegedy et al., 2015), 23,834,568 learned weights and 3,325,928 in the auxiliary classifier.\n"
        "Images of at least 299 x 299, all of one size, in two LMDBs beside this file; values from -1 to 1.",
    ),
    "resnet152": (
        resnet152,
        "ResNet-152 (He, Zhang, Ren and Sun, 2015), 60,192,808 learned weights; the stride of a stage is in its first "
        f"1 x 1 convolution.\n{IMAGENET}",
    ),
    "squeezenet": (squeezenet, f"SqueezeNet 1.1 (Iandola et al., 2016), 1,235,496 weights.\n{IMAGENET}"),
    "mobilenet": (mobilenet, f"MobileNet v1 (Howard et al., 2017), 4,231,976 learned weights.\n{IMAGENET}"),
    "densenet121": (densenet121, f"DenseNet-121 (Huang et al., 2016), 7,978,856 learned weights.\n{IMAGENET}"),
    "fcn8s": (
        fcn8s,
        "FCN-8s (Long, Shelhamer and Darrell, 2015) for Pascal VOC's 21 classes, 134,362,751 learned weights.\n"
        "Images and labels of one size in LMDBs beside this file, a label image's values being classes, 255 for none; "
        + BGR,
    ),
    "ssd300": (
        ssd300,
        f"SSD-300 (Liu et al., 2015) with VGG-16 for Pascal VOC's 20 classes, 26,285,486 weights.\n{VOC}",
    ),
    "mobilenet_ssd": (
        mobilenet_ssd,
        f"SSD at 300 x 300 with MobileNet for Pascal VOC's 20 classes, 5,796,089 learned weights.\n{VOC}",
    ),
    "lrcn": (
        lrcn,
        "LRCN (Donahue et al., 2014): CaffeNet and two LSTMs that write a sentence, 41,715,801 learned weights.\n"
        "Lists of images and of HDF5 files beside this file; " + BGR,
    ),
}
"""Folders with a generated train_val.prototxt: its net, and the comment at its head."""


def _image(size: int, channels: int = 3) -> dict[str, tuple[int, ...]]:
    return {"data": (1, channels, size, size)}


def _classifier(size: int, softmax: str, whole: int = 256) -> Deploy:
    """A classifier of ImageNet: crops of `size` from images of `whole`, in pixels of a side."""
    return Deploy(_image(size), softmax=softmax, sizes={"data": (whole, whole)})


DEPLOYS: dict[str, tuple[str, Deploy]] = {
    "lenet/deploy": ("lenet/train_test", Deploy(_image(28, 1), softmax="ip2")),
    "cifar10/quick_deploy": ("cifar10/quick_train_test", Deploy(_image(32), softmax="ip2")),
    "cifar10/full_deploy": ("cifar10/full_train_test", Deploy(_image(32), softmax="ip1")),
    "caffenet/deploy": ("caffenet/train_val", _classifier(227, "fc8")),
    "vgg16/deploy": ("vgg16/train_val", _classifier(224, "fc8")),
    "googlenet/deploy": ("googlenet/train_val", _classifier(224, "loss3_classifier")),
    "resnet18/deploy": ("resnet18/train_val", _classifier(224, "fc1000")),
    "resnet50/deploy": ("resnet50/train_val", _classifier(224, "fc1000")),
    "mnist_autoencoder/deploy": ("mnist_autoencoder", Deploy(_image(28, 1), ["encode4", "decode1neuron"])),
    "mnist_siamese/deploy": ("mnist_siamese", Deploy(_image(28, 1), ["feat"])),
    "alexnet/deploy": ("alexnet", _classifier(227, "fc8")),
    "vgg19/deploy": ("vgg19", _classifier(224, "fc8")),
    "inception_v3/deploy": ("inception_v3", _classifier(299, "classifier", 320)),
    "resnet152/deploy": ("resnet152", _classifier(224, "fc1000")),
    "squeezenet/deploy": ("squeezenet", _classifier(227, "pool10")),
    "mobilenet/deploy": ("mobilenet", _classifier(224, "fc7")),
    "densenet121/deploy": ("densenet121", _classifier(224, "fc6")),
    "fcn8s/deploy": ("fcn8s", Deploy(_image(500), ["score"])),
    "ssd300/deploy": ("ssd300", Deploy(_image(300), ["detection_out"])),
    "mobilenet_ssd/deploy": ("mobilenet_ssd", Deploy(_image(300), ["detection_out"])),
    "lrcn/deploy": (
        "lrcn",
        Deploy(_image(227) | {"cont_sentence": (1, 1), "input_sentence": (1, 1)}, softmax="predict", axis=2),
    ),
}
"""Deploy nets: the train net that each is made of, from NETS or a file kept by hand, and its inputs and outputs."""


def generated() -> Iterator[tuple[Path, str]]:
    """Every file that this program writes, with its text."""
    nets = {name: net() for name, (net, _) in NETS.items()}
    for name, (_, comment) in NETS.items():
        yield MODELS / name / "train_val.prototxt", net_text(nets[name], comment)
    for path, (train, deploy) in DEPLOYS.items():
        source = "train_val" if train in nets else train.split("/")[1]
        net = nets[train] if train in nets else read_net(MODELS / f"{train}.prototxt")
        comment = f"{source}.prototxt for predictions, its values prepared as there; written by models/generate.py."
        yield MODELS / f"{path}.prototxt", net_text(deploy_net(net, deploy), comment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, differing = parser.parse_args().check, []
    for path, text in generated():
        if path.exists() and path.read_text() == text:
            continue
        differing.append(path)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    for path in differing:
        print(f"{path.relative_to(MODELS)}: {'differs' if check else 'written'}")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
