"""CUDA C text of kernels that run a formula over arrays.

Owns the text and nothing else: given a formula and the kinds of its arguments it writes a kernel; `cuda_elementwise.py`
chooses which and launches it. Names ending in an underscore are ours, so no argument of a formula can clash with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from caffepy.backend.expression import Expression, Kind, cuda_name

LANES = "xyzw"


@dataclass(frozen=True)
class Variant:
    """What apart from the formula decides the text of a kernel.

    Args:
        width: elements a thread takes at once, 1 or 4.
        index: C type of an element's index.
        device_scalars: which scalars are read from device memory.
        splat: which Channel arguments are the same for the `width` elements of one thread.
        fixed: which Channel arguments repeat as the outputs of a reduction do.
    """

    width: int = 1
    index: str = "unsigned int"
    device_scalars: frozenset[str] = frozenset()
    splat: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()


def _outputs(expression: Expression) -> list[str]:
    return [f"o{k}_" for k in range(expression.output_count)]


def _named(expression: Expression, kind: Kind) -> list[str]:
    return [name for name, k in zip(expression.parameters, expression.kinds, strict=True) if k is kind]


def formula_text(expression: Expression) -> str:
    """The formula as a device function `formula_(arguments..., float &o0_, ...)`."""
    outputs = _outputs(expression)
    parameters = [f"float {cuda_name(name)}" for name in expression.parameters]
    parameters += [f"float &{name}" for name in outputs]
    body = "\n    ".join(expression.cuda_lines(outputs))
    return f"__device__ __forceinline__ void formula_({', '.join(parameters)}) {{\n    {body}\n}}\n"


def _argument_list(expression: Expression, variant: Variant) -> list[str]:
    """Kernel parameters of the formula's arguments, in the formula's order."""
    parameters = []
    for name, kind in zip(expression.parameters, expression.kinds, strict=True):
        if kind is Kind.SCALAR and name not in variant.device_scalars:
            parameters.append(f"float {cuda_name(name)}")
            continue
        parameters.append(f"const float *{name}_p_")
        if kind is Kind.CHANNEL:
            parameters.append(f"unsigned int {name}_divisor_, unsigned int {name}_modulus_")
    return parameters


def _scalar_loads(variant: Variant) -> list[str]:
    return [f"const float {cuda_name(name)} = *{name}_p_;" for name in sorted(variant.device_scalars)]


def _loads(expression: Expression, variant: Variant, index: str) -> list[str]:
    """Statements that bring Each and Channel arguments of element (or four elements) `index` into registers."""
    vector = variant.width == 4
    lines = []
    for name in _named(expression, Kind.EACH):
        lines.append(_load(name, index, vector))
    for name in _named(expression, Kind.CHANNEL):
        if name not in variant.fixed:
            place = f"({index} / {name}_divisor_) % {name}_modulus_"
            lines.append(_load(name, place, vector and name not in variant.splat))
    return lines


def _load(name: str, index: str, vector: bool) -> str:
    if vector:
        return f"const float4 {cuda_name(name)} = reinterpret_cast<const float4 *>({name}_p_)[{index}];"
    return f"const float {cuda_name(name)} = {name}_p_[{index}];"


def _call(expression: Expression, variant: Variant, lane: str) -> str:
    """A call of the formula on one element; `lane` is a member of float4 or empty."""
    suffix = f".{lane}" if lane else ""
    single = set(_named(expression, Kind.SCALAR)) | variant.splat
    inputs = [cuda_name(name) + ("" if name in single else suffix) for name in expression.parameters]
    return f"formula_({', '.join(inputs + [name + suffix for name in _outputs(expression)])});"


@cache
def apply_text(expression: Expression, variant: Variant) -> str:
    """A kernel `apply_` that sets outputs to the formula of inputs for each of n_ (groups of `width`) elements."""
    outputs = _outputs(expression)
    kind = "float4" if variant.width == 4 else "float"
    calls = [_call(expression, variant, lane) for lane in (LANES if variant.width == 4 else [""])]
    lines = _loads(expression, variant, "i_") + [f"{kind} {', '.join(outputs)};"] + calls
    lines += [f"reinterpret_cast<{kind} *>({name}p_)[i_] = {name};" for name in outputs]
    parameters = [f"{variant.index} n_"] + _argument_list(expression, variant)
    parameters += [f"float *{name}p_" for name in outputs]
    return f"""{formula_text(expression)}
extern "C" __global__ void apply_({", ".join(parameters)}) {{
    {" ".join(_scalar_loads(variant))}
    const {variant.index} step_ = gridDim.x * blockDim.x;
    for ({variant.index} i_ = blockIdx.x * blockDim.x + threadIdx.x; i_ < n_; i_ += step_) {{
        {_lines(lines, 8)}
    }}
}}
"""


def _lines(lines: list[str], indent: int) -> str:
    return ("\n" + " " * indent).join(lines)


def _reduce_parameters(expression: Expression, variant: Variant) -> str:
    outputs = [f"float *{name}p_" for name in _outputs(expression)]
    return ", ".join(_argument_list(expression, variant) + outputs + ["double *partial_", "int accumulate_"])


def _lanes(variant: Variant) -> list[str]:
    """Suffixes of the elements that a thread takes at once."""
    return [f".{lane}" for lane in LANES] if variant.width == 4 else [""]


def _reduce_prologue(expression: Expression, variant: Variant) -> list[str]:
    fixed = [_load(name, "c_", variant.width == 4 and name not in variant.splat) for name in sorted(variant.fixed)]
    count = len(_lanes(variant))
    sums = [f"double {name}sum_[{count}] = {{0.0}};" for name in _outputs(expression)]
    return _scalar_loads(variant) + fixed + sums


def _reduce_step(expression: Expression, variant: Variant) -> list[str]:
    """Add the formula of element i_ to the float sums of a few elements."""
    outputs, lanes = _outputs(expression), _lanes(variant)
    kind = "float4" if variant.width == 4 else "float"
    lines = _loads(expression, variant, "i_") + [f"{kind} {', '.join(outputs)};"]
    lines += [_call(expression, variant, lane.lstrip(".")) for lane in lanes]
    return lines + [f"{name}few_[{k}] += {name}{lane};" for name in outputs for k, lane in enumerate(lanes)]


def _reduce_loop(expression: Expression, variant: Variant, start: str, end: str, step: str, index: list[str]) -> str:
    """A loop that adds up four elements in float and these sums in double, then what is left over."""
    outputs, count = _outputs(expression), len(_lanes(variant))
    clear = [f"float {name}few_[{count}] = {{0.0f}};" for name in outputs]
    flush = [f"{name}sum_[{k}] += {name}few_[{k}];" for name in outputs for k in range(count)]
    body = _lines(index + _reduce_step(expression, variant), 12)
    return f"""{variant.index} j_ = {start};
    for (; j_ < {end} && {end} - j_ > 3 * {step}; j_ += 4 * {step}) {{
        {_lines(clear, 8)}
        #pragma unroll
        for (int u_ = 0; u_ < 4; ++u_) {{
            const {variant.index} at_ = j_ + u_ * {step};
            {body}
        }}
        {_lines(flush, 8)}
    }}
    for (; j_ < {end}; j_ += {step}) {{
        {_lines(clear, 8)}
        {{
            const {variant.index} at_ = j_;
            {body}
        }}
        {_lines(flush, 8)}
    }}"""


def _reduce_write(name: str, k: int, place: str, size: str) -> list[str]:
    """Write a total, or a partial one if the sum is split."""
    return [
        f"if (gridDim.y > 1) partial_[((size_t){k} * gridDim.y + blockIdx.y) * {size} + {place}] = total_;",
        f"else {name}p_[{place}] = (float)((accumulate_ ? (double){name}p_[{place}] : 0.0) + total_);",
    ]


_BLOCK_SUM = """
// The sum over threads that share threadIdx.x; the first of them gets it.
__device__ double column_sum_(double *shared_, double sum_) {
    const int t_ = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
    shared_[t_] = sum_;
    __syncthreads();
    for (int half_ = blockDim.y / 2; half_ > 0; half_ /= 2) {
        if (threadIdx.y < half_) shared_[t_] += shared_[t_ + half_ * blockDim.x];
        __syncthreads();
    }
    return shared_[threadIdx.x];
}
// The sum over a block of one row of threads.
__device__ double row_sum_(double *shared_, double sum_) {
    __syncthreads();
    shared_[threadIdx.x] = sum_;
    __syncthreads();
    for (int half_ = blockDim.x / 2; half_ > 0; half_ /= 2) {
        if (threadIdx.x < half_) shared_[threadIdx.x] += shared_[threadIdx.x + half_];
        __syncthreads();
    }
    return shared_[0];
}
"""


@cache
def reduce_columns_text(expression: Expression, variant: Variant) -> str:
    """A kernel `reduce_` that sums each column of a matrix of size_ columns (or groups of `width` columns).

    blockIdx.y takes a range of rows.
    """
    width = variant.width
    write = []
    for k, name in enumerate(_outputs(expression)):
        for lane in range(width):
            write += [f"total_ = column_sum_(shared_, {name}sum_[{lane}]);", "if (inside_ && threadIdx.y == 0) {"]
            write += _reduce_write(name, k, f"(c_ * {width} + {lane})", f"(size_ * {width})") + ["}"]
    loop = _reduce_loop(
        expression, variant, "blockIdx.y * rows_each_ + threadIdx.y", "end_", "blockDim.y",
        [f"const {variant.index} i_ = at_ * size_ + c_;"],
    )  # fmt: skip
    return f"""{formula_text(expression)}{_BLOCK_SUM}
extern "C" __global__ void reduce_(unsigned int rows_, unsigned int size_, unsigned int rows_each_,
        {_reduce_parameters(expression, variant)}) {{
    extern __shared__ double shared_[];
    const unsigned int c_ = min(blockIdx.x * blockDim.x + threadIdx.x, size_ - 1);
    const bool inside_ = blockIdx.x * blockDim.x + threadIdx.x < size_;
    const unsigned int end_ = min(rows_, (blockIdx.y + 1) * rows_each_);
    {_lines(_reduce_prologue(expression, variant), 4)}
    {loop}
    double total_;
    {_lines(write, 4)}
}}
"""


@cache
def reduce_segments_text(expression: Expression, variant: Variant) -> str:
    """A kernel `reduce_` that sums an (outer, size, inner) array for each of size; blockIdx.y takes a range.

    With width 4, inner_ counts groups of four and outer_ is 1.
    """
    lanes = range(variant.width)
    write = []
    for k, name in enumerate(_outputs(expression)):
        parts = " + ".join(f"{name}sum_[{lane}]" for lane in lanes)
        write += [f"total_ = row_sum_(shared_, {parts});", "if (threadIdx.x == 0) {"]
        write += _reduce_write(name, k, "c_", "size_") + ["}"]
    loop = _reduce_loop(
        expression, variant, "from_ + threadIdx.x", "end_", "blockDim.x",
        [f"const {variant.index} o_ = outer_ == 1 ? 0 : at_ / inner_;",
         f"const {variant.index} i_ = (o_ * size_ + c_) * inner_ + (at_ - o_ * inner_);"],
    )  # fmt: skip
    return f"""{formula_text(expression)}{_BLOCK_SUM}
extern "C" __global__ void reduce_({variant.index} outer_, unsigned int size_, {variant.index} inner_,
        {variant.index} each_, {_reduce_parameters(expression, variant)}) {{
    extern __shared__ double shared_[];
    const unsigned int c_ = blockIdx.x;
    const {variant.index} n_ = outer_ * inner_, from_ = blockIdx.y * each_;
    const {variant.index} end_ = n_ - from_ < each_ ? n_ : from_ + each_;
    {_lines(_reduce_prologue(expression, variant), 4)}
    {loop}
    double total_;
    {_lines(write, 4)}
}}
"""
