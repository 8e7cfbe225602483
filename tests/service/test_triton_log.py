"""Reading Triton's own log."""

import pytest

from service.triton_log import describe_end, find_complaint, first_line, read_tail
from service.triton_repair import backoff_s

TWO_ERRORS = """E1130 21:05:10.614066 14015 server.cc:2607] "older"
E1130 21:05:10.629303 14015 main.cc:245] "failed to start GRPC service: in use "
I1130 21:05:10.629403 14015 main.cc:250] "later"
"""


@pytest.mark.parametrize(
    ("tail", "complaint"),
    [
        (TWO_ERRORS, "failed to start GRPC service: in use"),
        ("error: creating server: Internal\n", "creating server: Internal"),
        (
            "usage\ntritonserver: error while loading shared libraries: libb64.so\n",
            "tritonserver: error while loading shared libraries: libb64.so",
        ),
        ('E1130 21:05:10.614066 14015 server.cc:241] "CudaDriverHelper has not been initialized."\n', ""),
        ("I1130 21:05:10.629403 14015 model_lifecycle.cc:839] \"successfully loaded 'a'\"\n", ""),
        ("", ""),
    ],
)
def test_the_complaint_is_the_last_error_that_says_something_else_what_came_before_the_log(tail, complaint):
    assert find_complaint(tail) == complaint


def test_the_tail_is_of_this_start_only(tmp_path):
    log = tmp_path / "triton.log"
    log.write_bytes(b"before\n" + b"x" * 10_000 + b"end")
    assert read_tail(log, 10_005) == "xxend"
    assert len(read_tail(log, 0)) == 4096
    assert read_tail(tmp_path / "none", 0) == ""


def test_a_reason_is_its_first_line():
    assert first_line("\nInternal: broken\n\nAt:\n  model.py(1)") == "Internal: broken"
    assert first_line("") == "no reason given"


def test_back_off_doubles_up_to_half_a_minute():
    assert [backoff_s(n) for n in (0, 1, 2, 3, 6, 7, 1000)] == [0.0, 0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("code", "words"),
    [(1, "with code 1"), (143, "by SIGTERM"), (139, "by SIGSEGV"), (-9, "by SIGKILL"), (255, "with code 255")],
)
def test_an_end_by_a_signal_is_said_by_its_name(code, words):
    assert describe_end(code).endswith(words)
