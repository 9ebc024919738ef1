"""Code generation: CUDA C kernels that apply a formula to arrays or reduce its results.

Each function returns the kernel text for a formula, the dtypes of its arguments and their indexing. The text requires
kernels/common.cu, and for reductions kernels/reduce.cu. `expression.py` chooses the variant and launches it.
Generated names end in an underscore, so they cannot clash with a formula's arguments.

In a reduction a thread sums a few values in float and these sums in double. If several blocks share a result, the last
block to finish adds the partial sums of all blocks in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from caffepy.backend.expression import Expression, Kind, cuda_name


@dataclass(frozen=True)
class Access:
    """How a thread computes the index into a Channel argument from a pack's number.

    Args:
        divides: divide the number by the packs that share an element.
        wraps: take that index modulo the argument's size.
        packed: load as many elements as a pack has; otherwise one element for the whole pack.
        once: all packs of a thread share the load.
    """

    divides: bool = False
    wraps: bool = False
    packed: bool = False
    once: bool = False


@dataclass(frozen=True)
class Variant:
    """Everything besides the formula that determines the kernel's text.

    Args:
        inputs: C type of each Each argument, in the formula's order.
        outputs: C type of each output.
        width: contiguous elements in a pack, a power of two.
        unroll: packs that a thread loads before it computes.
        index: C type of a pack's number.
        device_scalars: scalars that are read from device memory.
        channels: the access of each Channel argument, in the formula's order.
        images: whether each image has its own part of the Channel arguments that have a period.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    width: int = 1
    unroll: int = 1
    index: str = "unsigned int"
    device_scalars: frozenset[str] = frozenset()
    channels: tuple[Access, ...] = ()
    images: bool = False


def output_names(expression: Expression) -> list[str]:
    return [f"o{k}_" for k in range(expression.output_count)]


def named(expression: Expression, kind: Kind) -> list[str]:
    return [name for name, k in zip(expression.parameters, expression.kinds, strict=True) if k is kind]


def accesses(expression: Expression, variant: Variant) -> dict[str, Access]:
    return dict(zip(named(expression, Kind.CHANNEL), variant.channels, strict=True))


def formula_text(expression: Expression) -> str:
    """Return the formula as a device function `formula_(arguments..., float &o0_, ...)`."""
    outputs = output_names(expression)
    parameters = [f"float {cuda_name(name)}" for name in expression.parameters]
    parameters += [f"float &{name}" for name in outputs]
    body = "\n    ".join(expression.cuda_lines(outputs))
    return f"__device__ __forceinline__ void formula_({', '.join(parameters)}) {{\n    {body}\n}}\n"


@cache
def formula_of(expression: Expression, *kinds: Kind) -> str:
    """Return `formula_text` for hand-written kernels; the formula has these argument kinds and one result."""
    assert expression.kinds == list(kinds) and expression.output_count == 1, (expression, kinds)
    return formula_text(expression)


def argument_list(expression: Expression, variant: Variant) -> list[str]:
    """Return the kernel parameters of the formula's arguments, in the formula's order."""
    types: Iterator[str] = iter(variant.inputs)
    parameters = []
    for name, kind in zip(expression.parameters, expression.kinds, strict=True):
        if kind is Kind.EACH:
            parameters.append(f"const {next(types)} *{name}_p_")
        elif kind is Kind.CHANNEL:
            parameters.append(f"const float *{name}_p_")
            parameters.append(f"unsigned int {name}_inner_, Divider {name}_by_inner_")
            parameters.append(f"unsigned int {name}_size_, Divider {name}_by_size_")
        elif name in variant.device_scalars:
            parameters.append(f"const float *{name}_p_")
        else:
            parameters.append(f"float {cuda_name(name)}")
    return parameters


def output_list(expression: Expression, variant: Variant) -> list[str]:
    return [f"{t} *{name}p_" for t, name in zip(variant.outputs, output_names(expression), strict=True)]


def image_lines(expression: Expression, variant: Variant, image: str, inputs: str, outputs: str) -> list[str]:
    """Return statements that move the pointers to one image's part.

    Args:
        expression: the formula.
        variant: its variant.
        image: the image's number.
        inputs: packs per image of the Each arguments.
        outputs: packs per image of the outputs.
    """
    if not variant.images:
        return []
    lines = [f"{name}_p_ += {image} * (size_t){inputs} * {variant.width};" for name in named(expression, Kind.EACH)]
    lines += [f"{name}p_ += {image} * (size_t){outputs} * {variant.width};" for name in output_names(expression)]
    for name, access in accesses(expression, variant).items():
        if access.wraps:
            width = variant.width if access.packed else 1
            lines.append(f"{name}_p_ += {image} * (size_t){name}_size_ * {width};")
    return lines


def scalar_loads(variant: Variant) -> list[str]:
    """Return statements that load scalars from device memory."""
    return [f"const float {cuda_name(name)} = *{name}_p_;" for name in sorted(variant.device_scalars)]


def part_type(access: Access, width: int) -> str:
    """Return the C type of the elements that a thread loads of a Channel argument."""
    return f"Pack<float, {width}>" if access.packed else "float"


def part(name: str, access: Access, width: int, offset: str) -> str:
    """Return the expression for the elements that a thread loads of a Channel argument."""
    return f"load<{width}>({name}_p_, {offset})" if access.packed else f"{name}_p_[{offset}]"


def channel_offset(name: str, access: Access, index: str) -> str:
    """Return the offset into a Channel argument for pack i_."""
    wide = index != "unsigned int"
    offset = "i_"
    if access.divides:
        offset = f"({offset} / {name}_inner_)" if wide else f"{name}_by_inner_({offset})"
    if access.wraps:
        offset = f"{offset} % {name}_size_" if wide else f"remainder_({offset}, {name}_size_, {name}_by_size_)"
    return offset


HELPERS = """
__device__ __forceinline__ unsigned int remainder_(unsigned int n, unsigned int size, Divider by) {
    return n - by(n) * size;
}
"""


def call(expression: Expression, variant: Variant) -> str:
    """Return a call of the formula on element k_ of the packs number u_ in registers."""
    access_of = accesses(expression, variant)
    inputs = []
    for name, kind in zip(expression.parameters, expression.kinds, strict=True):
        value = cuda_name(name)
        if kind is Kind.EACH:
            value = f"to_float({value}[u_][k_])"
        elif kind is Kind.CHANNEL:
            access = access_of[name]
            value += ("" if access.once else "[u_]") + ("[k_]" if access.packed else "")
        inputs.append(value)
    return f"formula_({', '.join(inputs + [f'{name}[k_]' for name in output_names(expression)])});"


def load_lines(expression: Expression, variant: Variant) -> list[str]:
    """Return statements that load the operands of pack i_ into the registers number u_."""
    lines = [
        f"{cuda_name(name)}[u_] = load_raw<{variant.width}>({name}_p_, i_);" for name in named(expression, Kind.EACH)
    ]
    for name, access in accesses(expression, variant).items():
        if not access.once:
            offset = channel_offset(name, access, variant.index)
            lines.append(f"{cuda_name(name)}[u_] = {part(name, access, variant.width, offset)};")
    return lines


def registers(expression: Expression, variant: Variant) -> list[str]:
    """Return declarations of the registers for `unroll` packs."""
    lines = [
        f"Pack<{t}, {variant.width}> {cuda_name(name)}[{variant.unroll}];"
        for t, name in zip(variant.inputs, named(expression, Kind.EACH), strict=True)
    ]
    for name, access in accesses(expression, variant).items():
        if not access.once:
            lines.append(f"{part_type(access, variant.width)} {cuda_name(name)}[{variant.unroll}];")
    return lines


def once_lines(expression: Expression, variant: Variant, pack: str) -> list[str]:
    """Return statements that load the operands shared by all packs of a thread; `pack` is the number of any of them."""
    lines = []
    for name, access in accesses(expression, variant).items():
        if access.once:
            offset = f"{pack} % {name}_size_" if access.wraps else "0"
            value = part(name, access, variant.width, offset)
            lines.append(f"const {part_type(access, variant.width)} {cuda_name(name)} = {value};")
    return lines


@cache
def apply_text(expression: Expression, variant: Variant) -> str:
    """Return a kernel `apply_` that sets outputs to the formula of inputs for each of n_ packs, of image blockIdx.y."""
    names = output_names(expression)
    parameters = [f"{variant.index} n_", *argument_list(expression, variant), *output_list(expression, variant)]
    before = image_lines(expression, variant, "blockIdx.y", "n_", "n_")
    before += scalar_loads(variant) + once_lines(expression, variant, "threadIdx.x")
    outputs = ", ".join(names)
    return f"""{HELPERS}{formula_text(expression)}
extern "C" __global__ void __launch_bounds__(512) apply_({", ".join(parameters)}) {{
    {lines_of(before, 4)}
    const {variant.index} first_ = ({variant.index})blockIdx.x * (blockDim.x * {variant.unroll}) + threadIdx.x;
    {lines_of(registers(expression, variant), 4)}
    #pragma unroll
    for (int u_ = 0; u_ < {variant.unroll}; ++u_) {{
        const {variant.index} i_ = min(({variant.index})(first_ + u_ * blockDim.x), n_ - 1);
        {lines_of(load_lines(expression, variant), 8)}
    }}
    #pragma unroll
    for (int u_ = 0; u_ < {variant.unroll}; ++u_) {{
        const {variant.index} i_ = first_ + u_ * blockDim.x;
        Pack<float, {variant.width}> {outputs};
        #pragma unroll
        for (int k_ = 0; k_ < {variant.width}; ++k_) {call(expression, variant)}
        if (i_ < n_) {{
            {lines_of([f"store<{variant.width}>({name}p_, i_, {name});" for name in names], 12)}
        }}
    }}
}}
"""


def lines_of(lines: list[str], indent: int) -> str:
    """Return the lines joined, all but the first indented."""
    return ("\n" + " " * indent).join(lines)


def _parameters(expression: Expression, variant: Variant) -> str:
    last = ["double *partial_", "unsigned int *tickets_", "int accumulate_"]
    return ", ".join([*argument_list(expression, variant), *output_list(expression, variant), *last])


def _sums(expression: Expression, variant: Variant) -> list[str]:
    return [f"double {name}sum_[{variant.width}] = {{0.0}};" for name in output_names(expression)]


def _loop(expression: Expression, variant: Variant, start: str, end: str, step: str, pack: list[str]) -> str:
    """Return the summation loop over at_ = start, start + step, ... below end; `pack` computes i_ from at_."""
    unroll = variant.unroll
    few = [f"float {name}few_[{variant.width}] = {{0.0f}};" for name in output_names(expression)]
    add = [f"{name}few_[k_] += {name}[k_];" for name in output_names(expression)]
    flush = [f"{name}sum_[k_] += {name}few_[k_];" for name in output_names(expression)]
    return f"""for ({variant.index} first_ = {start}; first_ < {end}; first_ += {unroll} * {step}) {{
        {lines_of(registers(expression, variant), 8)}
        {lines_of(few, 8)}
        #pragma unroll
        for (int u_ = 0; u_ < {unroll}; ++u_) {{
            const {variant.index} at_ = min(({variant.index})(first_ + u_ * {step}), {end} - 1);
            {lines_of(pack + load_lines(expression, variant), 12)}
        }}
        #pragma unroll
        for (int u_ = 0; u_ < {unroll}; ++u_) {{
            if (first_ + u_ * {step} >= {end}) break;
            Pack<float, {variant.width}> {", ".join(output_names(expression))};
            #pragma unroll
            for (int k_ = 0; k_ < {variant.width}; ++k_) {{
                {call(expression, variant)}
                {lines_of(add, 16)}
            }}
        }}
        #pragma unroll
        for (int k_ = 0; k_ < {variant.width}; ++k_) {{
            {lines_of(flush, 12)}
        }}
    }}"""


@cache
def reduce_columns_text(expression: Expression, variant: Variant, across: int) -> str:
    """Return a kernel `reduce_` that sums each column of a matrix of rows_ rows and size_ packs.

    A block takes `across` packs of columns; blockIdx.y takes a range of rows, blockIdx.z an image. Channel arguments
    that are the same for all packs of a thread (`once`) have the period of the columns.
    """
    columns = across * variant.width
    outputs = output_names(expression)
    totals = [f"double {o}total_ = column_total<{across}, {variant.width}>({o}sum_, shared_);" for o in outputs]
    write = [f"put_total({o}p_ + column_, {o}total_, accumulate_);" for o in outputs]
    keep = [
        f"partial_[({k} * (size_t)gridDim.y + blockIdx.y) * all_ + column_] = {o}total_;" for k, o in enumerate(outputs)
    ]
    combine = [
        f"{o}total_ = split_total<{columns}>(partial_ + {k} * (size_t)gridDim.y * all_ + left_, gridDim.y, all_, "
        "all_ - left_, shared_);"
        for k, o in enumerate(outputs)
    ]
    pack = [f"const {variant.index} i_ = at_ * size_ + c_;"]
    before = image_lines(expression, variant, "blockIdx.z", "rows_ * size_", "size_")
    if variant.images:
        before.append(f"partial_ += blockIdx.z * (size_t)gridDim.y * {len(outputs) * variant.width} * size_;")
        before.append("tickets_ += blockIdx.z * gridDim.x;")
    before += scalar_loads(variant) + once_lines(expression, variant, "c_") + _sums(expression, variant)
    return f"""{HELPERS}{formula_text(expression)}
extern "C" __global__ void __launch_bounds__(BLOCK) reduce_(unsigned int rows_, unsigned int size_,
        unsigned int rows_each_, {_parameters(expression, variant)}) {{
    __shared__ double shared_[WARPS * {max(columns, 32)}];
    const unsigned int c_ = min(blockIdx.x * {across} + threadIdx.x % {across}, size_ - 1);
    const {variant.index} from_ = ({variant.index})blockIdx.y * rows_each_;
    const {variant.index} end_ = min(({variant.index})rows_, from_ + rows_each_);
    {lines_of(before, 4)}
    {_loop(expression, variant, f"from_ + threadIdx.x / {across}", "end_", f"(BLOCK / {across})", pack)}
    const unsigned int all_ = size_ * {variant.width}, left_ = blockIdx.x * {columns}, column_ = left_ + threadIdx.x;
    const bool mine_ = threadIdx.x < {columns} && column_ < all_;
    {lines_of(totals, 4)}
    if (gridDim.y > 1) {{
        if (mine_) {{
            {lines_of(keep, 12)}
        }}
        if (!is_last_block(tickets_ + blockIdx.x, gridDim.y)) return;
        {lines_of(combine, 8)}
    }}
    if (mine_) {{
        {lines_of(write, 8)}
    }}
}}
"""


@cache
def reduce_segments_text(expression: Expression, variant: Variant) -> str:
    """Return a kernel `reduce_` that sums an (outer, size, inner) array for each of size; blockIdx.y takes a range.

    inner_ counts packs. `once` Channel arguments have one element for each of size.
    """
    outputs = output_names(expression)
    lanes = range(variant.width)
    totals = [f"double {o}total_ = block_sum({' + '.join(f'{o}sum_[{lane}]' for lane in lanes)});" for o in outputs]
    write = [f"put_total({o}p_ + c_, {o}total_, accumulate_);" for o in outputs]
    keep = [
        f"partial_[({k} * (size_t)gridDim.y + blockIdx.y) * gridDim.x + c_] = {o}total_;" for k, o in enumerate(outputs)
    ]
    combine = [
        f"{o}total_ = split_total(partial_ + {k} * (size_t)gridDim.y * gridDim.x + c_, gridDim.y, gridDim.x);"
        for k, o in enumerate(outputs)
    ]
    index = variant.index
    divide = "by_inner_(at_)" if index == "unsigned int" else "at_ / inner_"
    pack = [
        f"const {index} o_ = outer_ == 1 ? 0 : {divide};",
        f"const {index} i_ = (o_ * gridDim.x + c_) * inner_ + (at_ - o_ * inner_);",
    ]
    before = scalar_loads(variant) + once_lines(expression, variant, "c_") + _sums(expression, variant)
    return f"""{HELPERS}{formula_text(expression)}
extern "C" __global__ void __launch_bounds__(BLOCK) reduce_({index} outer_, {index} inner_, Divider by_inner_,
        {index} each_, {_parameters(expression, variant)}) {{
    const unsigned int c_ = blockIdx.x;
    const {index} n_ = outer_ * inner_, from_ = blockIdx.y * each_;
    const {index} end_ = n_ - from_ < each_ ? n_ : from_ + each_;
    {lines_of(before, 4)}
    {_loop(expression, variant, "from_ + threadIdx.x", "end_", "blockDim.x", pack)}
    {lines_of(totals, 4)}
    if (gridDim.y > 1) {{
        if (threadIdx.x == 0) {{
            {lines_of(keep, 12)}
        }}
        if (!is_last_block(tickets_ + c_, gridDim.y)) return;
        {lines_of(combine, 8)}
    }}
    if (threadIdx.x == 0) {{
        {lines_of(write, 8)}
    }}
}}
"""
