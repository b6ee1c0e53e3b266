"""Arrays on their way to a device: what arrives, and that the host does not wait."""

import numpy as np
import pytest
import torch

from bucketrl.kernels.transfer import to_device

ARRAY = np.arange(100_000)


def test_what_arrives_is_what_was_sent() -> None:
    assert to_device(ARRAY, torch.device("cpu")).tolist() == ARRAY.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_is_busy_is_not_waited_for() -> None:
    device = torch.device("cuda")
    to_device(ARRAY, device)  # the first one asks the driver for memory
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second
    ended = torch.cuda.current_stream().record_event()
    sent = to_device(ARRAY, device)
    assert not ended.query()
    assert sent.cpu().tolist() == ARRAY.tolist()
