"""All tests of the norms run over the plain implementation and over the fused one for CPUs."""

import pytest

from powernorm_fairseq.norms import kernels


@pytest.fixture(autouse=True, params=["torch", "native"])
def implementation(request):
    if request.param == "native" and kernels.available("native") is None:
        pytest.skip("the CPU kernels are not built")
    with kernels.use(request.param):
        yield request.param
