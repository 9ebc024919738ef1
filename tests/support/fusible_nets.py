"""Random nets to train, made of few layer types: fusible chains, branches, sums, losses and shared parameters."""

from __future__ import annotations

from random_nets import RandomNet, Shape, Stem, input_layer

from caffepy.formats.proto import caffe_pb2

CLASSES = 3
KEEPS, FALSE, TRUE = None, False, True

ELEMENTWISE: dict[str, list[tuple[str, bool | None]]] = {
    "ReLU": [
        ("", TRUE),
        ("", TRUE),
        ("", TRUE),
        ("relu_param { negative_slope: 0.1 }", FALSE),
        ("relu_param { negative_slope: -0.2 }", TRUE),
    ],
    "PReLU": [
        ('prelu_param { filler { type: "uniform" min: -0.3 max: 0.6 } }', FALSE),
        ("prelu_param { channel_shared: true }", KEEPS),
    ],
    "Dropout": [("", KEEPS), ("dropout_param { dropout_ratio: 0.3 }", KEEPS)],
    "AbsVal": [("", TRUE)],
    "Power": [
        ("power_param { scale: -0.7 shift: 0.2 }", FALSE),
        ("power_param { power: 2 shift: 0.5 }", TRUE),
        ("power_param { power: 3 scale: 0.5 }", KEEPS),
    ],
    "Clip": [("clip_param { min: -0.5 max: 0.8 }", KEEPS)],
    "Swish": [("", KEEPS), ("swish_param { beta: 1.5 }", KEEPS)],
    "BNLL": [("", TRUE)],
    "Log": [("log_param { shift: 1.1 }", TRUE)],
    "Exp": [("exp_param { scale: 0.2 }", TRUE)],
    "ELU": [("", KEEPS), ("elu_param { alpha: 0.5 }", KEEPS)],
    "Sigmoid": [("", TRUE)],
    "TanH": [("", KEEPS)],
    "Scale": [
        *[("scale_param { %s }", FALSE)] * 4,
        *[("scale_param { bias_term: true %s }", FALSE)] * 4,
        ("scale_param { axis: 0 num_axes: -1 %s }", FALSE),
        ("scale_param { num_axes: 0 %s }", FALSE),
    ],
    "Bias": [('bias_param { filler { type: "uniform" min: -1 max: 1 } }', FALSE)],
    "BatchNorm": [
        ("batch_norm_param { eps: %g }", FALSE),
        ("batch_norm_param { eps: %g }", FALSE),
        ("batch_norm_param { eps: %g scale_bias: true }", FALSE),
        ("batch_norm_param { use_global_stats: true eps: 1 }", FALSE),
    ],
    "BN": [
        ('bn_param { slope_filler { type: "uniform" min: 0.5 max: 2 } bias_filler { value: 0.3 } eps: 1 }', FALSE),
        ("bn_param { slope_filler { value: 1 } eps: 1 inverse_std: true }", FALSE),
        ("bn_param { slope_filler { value: 1 } frozen: true eps: 1 }", FALSE),
        ('bn_param { bn_mode: INFERENCE scale_filler { type: "uniform" min: 0.5 max: 2 } }', FALSE),
    ],
}
"""Layers that may work in place: settings, and whether no element of the top is below 0 (None: if the bottom's are)."""

FACTORS = 'filler { type: "uniform" min: 0.5 max: 2 } bias_filler { type: "uniform" min: -1 max: 1 }'
WEIGHTS = {"BatchNorm": 6, "BN": 3, "Scale": 6, "ReLU": 6, "Dropout": 2, "Eltwise": 2}
"""How often each type is taken; 1 if not here."""

USUAL = {
    "Convolution": "BatchNorm",
    "InnerProduct": "ReLU",
    "BatchNorm": "Scale",
    "Scale": "ReLU",
    "ReLU": "Dropout",
    "Eltwise": "ReLU",
}
"""What often follows a type."""

GROWING = ("Exp",)
"""Types whose outputs may be huge, to be used on bounded bottoms only; Power with an exponent as well."""
BOUNDING = ("BatchNorm", "Sigmoid", "TanH", "Clip")
PARAMETERS = {"Convolution": 2, "Deconvolution": 2, "InnerProduct": 2, "Scale": 2, "Bias": 1, "PReLU": 1}


class FusibleNet(RandomNet):
    """A net to train, or in one of ten cases to test, with the inputs `data`, `label` and `target`.

    Args:
        seed: of everything, the parameters' values not counted.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._shared: dict[str, str] = {}
        self._losses = 0
        self.phase = caffe_pb2.TEST if self._chance(0.1) else caffe_pb2.TRAIN
        self.force_backward = self._chance(0.2)
        self.inputs: dict[str, Shape] = {}
        self._open: list[Stem] = []
        self._build()

    @property
    def text(self) -> str:
        return ("force_backward: true\n" if self.force_backward else "") + super().text

    # -- the course of things --------------------------------------------------------------------------

    def _build(self) -> None:
        pick = self._random.randint
        shape = (pick(2, 4), pick(1, 4), pick(2, 5), pick(2, 5))
        self.inputs = {"data": shape, "label": (shape[0],), "target": (shape[0], CLASSES)}
        for name, dims in self.inputs.items():
            self._layers.append(input_layer(name, dims))
        self._open = [Stem("data", shape, free=False)]
        self._unused = {"label", "target"}
        for _ in range(pick(2, 5)):
            self._step()
        while self._open:
            self._finish()
        for name in sorted(self._unused):
            self._layer("Silence", [name], [])

    def _step(self) -> None:
        """Something behind one of the open blobs."""
        stem = self._take()
        what = self._random.choices(["grow", "branch", "residual", "join"], [4, 2, 3, 1])[0]
        if what == "branch":
            self._branch(stem)
        elif what == "residual" and len(stem.shape) == 4:
            self._residual(stem)
        elif what == "join" and self._join(stem):
            return
        else:
            self._open.append(self._grow(stem))

    def _grow(self, stem: Stem) -> Stem:
        """A layer and up to four of one top and one bottom behind it."""
        for _ in range(self._random.choice([1, 1, 2])):
            stem = self._chain(self._base(stem), self._random.randint(0, 4))
        return stem

    def _branch(self, stem: Stem) -> None:
        """Two to six readers, of which all but two are added up again."""
        readers = self._random.choice([2, 2, 3, 3, 4, 5, 6])
        if self._chance(0.2):
            stem = self._explicit_split(stem, readers)
            return
        stem = self._unit(stem) if self._chance(0.7) else stem
        stem.free = False
        grown = [self._chain(self._reader(stem), self._random.randint(0, 2)) for _ in range(readers)]
        self._random.shuffle(grown)
        self._gather(grown)

    def _explicit_split(self, stem: Stem, readers: int) -> Stem:
        """A Split that somebody wrote: its tops may be worked on in place."""
        stem = self._chain(self._base(stem), self._random.randint(1, 3))
        tops = [Stem(self._new("split"), stem.shape, stem.positive, stem.bounded) for _ in range(readers)]
        self._layer("Split", [stem.name], [top.name for top in tops], self._down(1))
        self._gather([self._chain(top, self._random.randint(0, 2)) for top in tops])
        return stem

    def _gather(self, stems: list[Stem]) -> None:
        """Add up blobs of one shape until few are left."""
        while len(stems) > 2:
            first = stems.pop()
            same = next((other for other in stems if other.shape == first.shape), None)
            if same is None:
                self._open.append(first)
            else:
                stems.remove(same)
                stems.insert(0, self._chain(self._combine(first, same), self._random.randint(0, 2)))
        self._open += stems

    def _residual(self, stem: Stem) -> None:
        """Layers beside a way past them, and the sum of the two."""
        stem = self._unit(self._convolution(stem) if self._chance(0.3) else stem)
        if len(stem.shape) != 4:
            self._open.append(stem)
            return
        stem.free = False
        inner, outputs = stem, stem.shape[1]
        for last in (False, True) if self._chance(0.4) else (True,):
            inner = self._chain(self._convolution(inner, outputs if last else 0, same=True), self._random.randint(0, 3))
        past = stem
        if self._chance(0.3):
            past = self._chain(self._convolution(stem, outputs, same=True), self._random.randint(0, 3))
        pair = [inner, past] if self._chance(0.5) else [past, inner]
        self._open.append(self._chain(self._combine(*pair), self._random.randint(0, 3)))
        if self._chance(0.3):  # one more reader
            stem.free = False
            self._open.append(self._reader(stem))

    def _join(self, stem: Stem) -> bool:
        """With another open blob; whether there was one that fits."""
        for other in self._open:
            if other.shape == stem.shape:
                self._open.remove(other)
                self._open.append(self._combine(stem, other))
                return True
            if len(other.shape) == len(stem.shape) and other.shape[2:] == stem.shape[2:]:
                self._open.remove(other)
                shape = (stem.shape[0], stem.shape[1] + other.shape[1], *stem.shape[2:])
                top = Stem(self._new("concat"), shape, stem.positive and other.positive)
                self._layer("Concat", [stem.name, other.name], [top.name], self._down(2))
                self._open.append(top)
                return True
        return False

    def _finish(self) -> None:
        """Lead an open blob to a loss, or nowhere."""
        stem = self._open.pop(self._random.randrange(len(self._open)))
        if (self._losses or self._open) and self._chance(0.15):
            if self._chance(0.5):
                self._layer("Silence", [stem.name], [])
            return
        self._losses += 1
        same = next((other for other in self._open if other.shape == stem.shape), None)
        if same is not None and self._chance(0.3):
            self._open.remove(same)
            self._layer("EuclideanLoss", [stem.name, same.name], [self._new("loss")])
            return
        if len(stem.shape) == 4 and self._chance(0.4):
            stem = self._pooling(stem, "pool: AVE global_pooling: true", (*stem.shape[:2], 1, 1))
        stem = self._inner_product(stem, CLASSES)
        kind, target = self._random.choice([("SoftmaxWithLoss", "label"), ("EuclideanLoss", "target")])
        self._unused.discard(target)
        weight = "loss_weight: 0.5" if self._chance(0.2) else ""
        self._layer(kind, [stem.name, target], [self._new("loss")], weight)

    # -- layers ----------------------------------------------------------------------------------------

    def _unit(self, stem: Stem) -> Stem:
        """A layer and a chain behind it, often the usual one: normalised, scaled, rectified."""
        stem = self._base(stem)
        if self._chance(0.5):
            return self._chain(stem, self._random.randint(0, 4))
        for kind in ("BatchNorm", "Scale", "ReLU")[: self._random.choice([1, 2, 3, 3])]:
            stem = self._elementwise(stem, kind)
        return stem

    def _chain(self, stem: Stem, length: int) -> Stem:
        """Layers of one bottom and one top, most of them in place."""
        for _ in range(length):
            stem = self._elementwise(stem)
        return stem

    def _elementwise(self, stem: Stem, kind: str = "") -> Stem:
        kinds = [kind for kind in ELEMENTWISE if self._fits(kind, stem)]
        if not kind:
            kind = USUAL[stem.kind] if stem.kind in USUAL and self._chance(0.4) else self._weighted(kinds)
        settings, positive = self._random.choice(ELEMENTWISE[kind])
        if kind == "Power" and "power:" in settings and not stem.bounded:
            settings, positive = ELEMENTWISE["Power"][0]
        if kind == "Scale":
            settings %= FACTORS
        if kind == "BatchNorm" and "%g" in settings:
            settings %= 1.0 if self.phase == caffe_pb2.TEST else self._random.choice([1e-3, 0.01, 0.1])
        growing = kind in GROWING or "power:" in settings
        top = Stem(
            stem.name if stem.free and self._chance(0.75) else self._new(kind),
            stem.shape,
            stem.positive if positive is None else positive,
            kind in BOUNDING or (stem.bounded and not growing),
            kind=kind,
        )
        self._layer(kind, [stem.name], [top.name], settings + self._parameters(kind, stem, settings) + self._down(1))
        return top

    def _fits(self, kind: str, stem: Stem) -> bool:
        if kind == "Log":
            return stem.positive
        return stem.bounded or kind not in GROWING

    def _base(self, stem: Stem) -> Stem:
        """A layer that does not work in place."""
        if len(stem.shape) == 2:
            return self._inner_product(stem, self._random.choice([3, 4]))
        kinds = [self._convolution] * 6 + [self._inner_product] * 2 + [self._other]
        return self._random.choice(kinds)(stem)

    def _reader(self, stem: Stem) -> Stem:
        """A layer that leaves its bottom to others."""
        return self._elementwise(stem) if self._chance(0.5) else self._base(stem)

    def _convolution(self, stem: Stem, outputs: int = 0, same: bool = False) -> Stem:
        outputs = outputs or self._random.choice([3, 3, 4])
        kind = "Deconvolution" if self._chance(0.1) else "Convolution"
        kernel = self._random.choice([1, 3])
        bias = self._chance(0.4)
        stride = 2 if not same and kind == "Convolution" and self._chance(0.1) else 1
        settings = (
            f"convolution_param {{ num_output: {outputs} kernel_size: {kernel} pad: {kernel // 2} stride: {stride} "
            f'bias_term: {str(bias).lower()} weight_filler {{ type: "msra" }} '
            'bias_filler { type: "uniform" min: -0.5 max: 0.5 } }'
        )
        top = Stem(self._new("conv"), (stem.shape[0], outputs, *(-(-s // stride) for s in stem.shape[2:])), kind=kind)
        self._layer(kind, [stem.name], [top.name], settings + self._parameters(kind, stem, settings) + self._down(1))
        return top

    def _inner_product(self, stem: Stem, outputs: int = 4) -> Stem:
        bias = self._chance(0.7)
        settings = (
            f"inner_product_param {{ num_output: {outputs} bias_term: {str(bias).lower()} "
            'weight_filler { type: "xavier" } bias_filler { type: "uniform" min: -0.5 max: 0.5 } }'
        )
        top = Stem(self._new("ip"), (stem.shape[0], outputs), kind="InnerProduct")
        parameters = self._parameters("InnerProduct", stem, settings)
        self._layer("InnerProduct", [stem.name], [top.name], settings + parameters + self._down(1))
        return top

    def _other(self, stem: Stem) -> Stem:
        """A layer that reshapes, pools or normalises."""
        n, c, h, w = stem.shape
        whats = ["lrn", "pool", "flatten", "reshape", *(["slice", "softmax"] if c > 1 else [])]
        what = self._random.choice(whats)
        top = Stem(self._new(what), stem.shape, stem.positive, stem.bounded)
        if what == "pool":
            method = self._random.choice(["MAX", "AVE"])
            return self._pooling(stem, f"pool: {method} kernel_size: 3 pad: 1 stride: 1", stem.shape)
        if what == "slice":
            other = Stem(self._new(what), (n, 1, h, w), stem.positive, stem.bounded)
            top.shape = (n, c - 1, h, w)
            self._layer("Slice", [stem.name], [other.name, top.name], "slice_param { axis: 1 slice_point: 1 }")
            self._open.append(other)
        elif what == "lrn":
            self._layer("LRN", [stem.name], [top.name], "lrn_param { local_size: 3 alpha: 0.5 }" + self._down(1))
        elif what == "softmax":
            self._layer("Softmax", [stem.name], [top.name], self._down(1))
            top.positive = True
        elif what == "reshape":
            top.shape = (n, c, w, h)
            dims = f"reshape_param {{ shape {{ dim: 0 dim: 0 dim: {w} dim: {h} }} }}"
            self._layer("Reshape", [stem.name], [top.name], dims + self._down(1))
        else:
            top.shape = (n, c * h * w)
            self._layer("Flatten", [stem.name], [top.name], self._down(1))
        return top

    def _pooling(self, stem: Stem, settings: str, shape: Shape) -> Stem:
        top = Stem(self._new("pool"), shape, stem.positive, stem.bounded)
        self._layer("Pooling", [stem.name], [top.name], f"pooling_param {{ {settings} }}")
        return top

    def _combine(self, first: Stem, second: Stem) -> Stem:
        """An Eltwise, mostly the plain sum."""
        settings = self._random.choices(
            [
                "",
                "eltwise_param { coeff: 1 coeff: -0.5 }",
                "eltwise_param { operation: PROD }",
                "eltwise_param { operation: MAX }",
            ],
            [8, 1, 1, 1],
        )[0]
        positive = first.positive and second.positive and "coeff" not in settings
        bounded = first.bounded and second.bounded and "PROD" not in settings
        top = Stem(self._new("sum"), first.shape, positive, bounded, kind="Eltwise")
        self._layer("Eltwise", [first.name, second.name], [top.name], settings + self._down(2))
        return top

    # -- their text ------------------------------------------------------------------------------------

    def _down(self, bottoms: int) -> str:
        """`propagate_down`, now and then."""
        if not self._chance(0.04 if bottoms == 1 else 0.1):
            return ""
        return "".join(f" propagate_down: {str(self._chance(0.5)).lower()}" for _ in range(bottoms))

    def _parameters(self, kind: str, stem: Stem, settings: str) -> str:
        """Parameters that are not learned, and parameters that layers of one kind and one bottom's shape share."""
        count = 1 if "bias_term: false" in settings else PARAMETERS.get(kind, 0)
        if kind == "Scale" and "bias_term" not in settings:
            count = 1
        if kind == "BatchNorm" and "scale_bias" not in settings:
            count = 3
        learned = [kind != "BatchNorm" and not self._chance(0.05) for _ in range(count)]
        if self._chance(0.1):
            learned = [False] * count
        share = count and self._chance(0.2)
        key = f"{kind}{stem.shape[1:] if kind == 'InnerProduct' or 'axis: 0' in settings else stem.shape[1]}{settings}"
        if share and key in self._shared:
            return self._shared[key]
        names = [f'name: "{self._new("shared")}"' if share else "" for _ in range(count)]
        if not share and all(learned):
            return ""
        pairs = zip(names, learned, strict=True)
        text = "".join(f" param {{ {name} {'' if learns else 'lr_mult: 0'} }}" for name, learns in pairs)
        if share:
            self._shared[key] = text
        return text

    def _take(self) -> Stem:
        return self._open.pop(self._random.randrange(len(self._open)))

    def _weighted(self, kinds: list[str]) -> str:
        return self._random.choices(kinds, [WEIGHTS.get(kind, 1) for kind in kinds])[0]
