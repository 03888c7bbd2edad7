"""CUDA's error log: its lines as the driver prints them, and those of a failed capture."""

import threading

import pytest
import torch

from graph_worth.capture import error_log
from graph_worth.capture.pool import CaptureError, Pool


def test_lines_of_both_formats_name_call_thread_and_message():
    own = threading.main_thread().native_id
    log = (
        f"[22:21:32.099][{own}][CUDA][E][cuStreamSynchronize] the stream is capturing\n"
        "[22:21:32.100][7][CUDA][E] the stream is capturing\n"
        "[22:21:32.100][7][CUDA][E] Returning 900 (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) from cuMemHostAlloc\n"
        "no line of the log\n"
    )
    assert error_log.told(log) == [
        "cuStreamSynchronize in the main thread: the stream is capturing",
        "thread 7, which is none of Python's: the stream is capturing",
        "cuMemHostAlloc in thread 7, which is none of Python's: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    ]


def test_a_thread_of_python_has_its_name_and_lines_are_few_and_unlike():
    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (ready.set(), done.wait()), name="loader")
    thread.start()
    ready.wait()
    lines = [f"[0][{thread.native_id}][CUDA][E][cuCall{index // 2}] no" for index in range(40)]
    found = error_log.told("\n".join(lines))
    done.set()
    thread.join()
    assert found == [f"cuCall{index} in loader: no" for index in range(error_log.MOST_LINES)]


@pytest.mark.gpu
def test_failed_capture_names_the_call_in_its_log():
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(3, device="cuda")
        with pytest.raises(CaptureError) as error:
            Pool(x.device).capture(lambda: x.sum().item())
        # A capture that failed leaves torch's generator as in a capture.
        torch.cuda.default_generators[0].graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
    if error_log.end() is not None:
        assert any("in the main thread" in line for line in error.value.log), error.value.log
