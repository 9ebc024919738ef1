"""CUDA C text of kernels that add up a formula over arrays.

Owns the text and nothing else, as `cuda/elementwise/codegen.py` does for formulas without sums; the kernels stand on
kernels/common.cu and kernels/reduce.cu. A thread adds up a few values in float and these sums in double. Where several
blocks share a result, the last of them to finish adds up what all have left behind, in the order of their numbers.
"""

from __future__ import annotations

from functools import cache

from caffepy.backend.cuda.elementwise.codegen import (
    HELPERS,
    Variant,
    argument_list,
    call,
    formula_text,
    lines_of,
    load_lines,
    once_lines,
    output_list,
    output_names,
    registers,
    scalar_loads,
)
from caffepy.backend.elementwise import Expression


def _parameters(expression: Expression, variant: Variant) -> str:
    last = ["double *partial_", "unsigned int *tickets_", "int accumulate_"]
    return ", ".join([*argument_list(expression, variant), *output_list(expression, variant), *last])


def _sums(expression: Expression, variant: Variant) -> list[str]:
    return [f"double {name}sum_[{variant.width}] = {{0.0}};" for name in output_names(expression)]


def _loop(expression: Expression, variant: Variant, start: str, end: str, step: str, pack: list[str]) -> str:
    """Add up the packs at_ = start, start + step, ... below end; `pack` are statements that make i_ of at_."""
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
            {lines_of(pack + load_lines(expression, variant, "[u_]", "i_"), 12)}
        }}
        #pragma unroll
        for (int u_ = 0; u_ < {unroll}; ++u_) {{
            if (first_ + u_ * {step} >= {end}) break;
            Pack<float, {variant.width}> {", ".join(output_names(expression))};
            #pragma unroll
            for (int k_ = 0; k_ < {variant.width}; ++k_) {{
                {call(expression, variant, "[u_]")}
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
    """A kernel `reduce_` that sums each column of a matrix of rows_ rows and size_ packs.

    A block takes `across` packs of columns; blockIdx.y takes a range of rows. Channel arguments that are the same for
    all packs of a thread (`once`) repeat as the columns do.
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
    before = scalar_loads(variant) + once_lines(expression, variant, "c_") + _sums(expression, variant)
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
    """A kernel `reduce_` that sums an (outer, size, inner) array for each of size; blockIdx.y takes a range.

    inner_ counts packs. Channel arguments that are `once` have an element for each of size.
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
