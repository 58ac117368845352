"""Stand-ins for the packages of fast kernels, with the places, signatures and decorators of the real ones, for a process of its own.

`LOOKED_AT` and `CONVOLUTION_LOOKED_AT` only raise when they are called. `COMPUTING` computes on the CPU what fla does on a GPU, with roundings.
"""

import json
import os
import subprocess
import sys

DISPATCH = """
import functools, inspect, torch

def dispatch(function):
    @functools.wraps(function)
    def wrapper(*arguments, **options):
        return function(*arguments, **options)
    return torch.compiler.disable(wrapper)
"""
LOOKED_AT = f"""
{DISPATCH}
@torch.compiler.disable
@dispatch
def chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False, **kwargs):
    raise RuntimeError("the package's chunk_gated_delta_rule was called")

@dispatch
def fused_recurrent_gated_delta_rule(q, k, v, g=None, beta=None, **kwargs):
    raise RuntimeError("the package's fused_recurrent_gated_delta_rule was called")
"""
CONVOLUTION_LOOKED_AT = """
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    raise RuntimeError("the package's causal_conv1d_fn was called")

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    raise RuntimeError("the package's causal_conv1d_update was called")
"""


def computing(noise=0.0):
    """fla's chunk kernel by transformers' torch version, its output changed by a share of itself that goes up and down with it."""
    return f"""
{DISPATCH}
@torch.compiler.disable
@dispatch
def chunk_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    own = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
    output, state = own(q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return output * (1 + {noise} * torch.sin(100 * output)), state

fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""


def fla_convolution(factor=1.0):
    """fla's convolution, channels last, in another order of summation."""
    return f"""
import torch
def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
                  backend="triton", cu_seqlens=None, **kwargs):
    assert x.shape[-1] == weight.shape[0] and cu_seqlens is None
    taps, length = weight.shape[1], x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, 0, taps - 1, 0))
    total = sum(padded[:, n : n + length] * weight[:, n].float() for n in reversed(range(taps)))
    return {factor} * torch.nn.functional.silu(total).to(x), None
"""


def install(folder, fla=None, convolution=None, fla_conv=None):
    """Write the packages below `folder`."""
    files = {
        "fla/ops/gated_delta_rule/chunk.py": fla,
        "fla/modules/causal_conv1d/ops.py": fla_conv,
        "causal_conv1d/interface.py": convolution,
    }
    for name, text in files.items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
            (path.parent / "__init__.py").write_text(f"from .{path.stem} import *")
            for part in list(path.relative_to(folder).parents)[1:-1]:
                (folder / part / "__init__.py").touch()
    return folder


def run(folder, program, *arguments):
    """The last line, as JSON, of what `program` prints in a process that has the packages of `folder`."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
