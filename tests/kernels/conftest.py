"""Triton's kernels on the CPU, by Triton's interpreter."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def triton_kernels() -> Iterator[SimpleNamespace]:
    """`logprob_cuda` and `policy_cuda` with their kernels interpreted.

    Triton chooses between compiler and interpreter where a kernel is defined, which for its own library is
    when it is imported, long before this; so the functions are exchanged one by one.
    """
    import triton.language
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from bucketrl.kernels import logprob_cuda, logprob_triton, policy_cuda, policy_triton

    modules = [triton.language, triton.language.standard, logprob_triton, policy_triton]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(policy_cuda, "_stream", lambda device: 0)  # a CPU has none
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(value.fn))
        yield SimpleNamespace(logprob=logprob_cuda, policy=policy_cuda)
