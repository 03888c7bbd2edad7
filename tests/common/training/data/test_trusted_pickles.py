"""common/trusted_pickles: only the child may unpickle, with its limits set; what it starts ends with it."""

import io
import os
import pickle
import subprocess
import time

import pytest

from common.training.data import trusted_pickles
from common.training.data.trusted_pickles import Limits, run

LIMITS = Limits(memory_gib=1, minutes=0.5)
HERE = "tests.common.training.data.test_trusted_pickles"


def answer(value):
    return {"value": value, "unpickled": trusted_pickles.load_bytes(pickle.dumps([1, 2]))}


def chatter():
    print("to stdout", flush=True)
    os.write(2, b"to stderr")
    return os.read(0, 10).decode()


def leaves_a_process(path):
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    with open(path, "w") as file:
        file.write(str(child.pid))


def fails():
    raise KeyError("a\nb")


def says(text):
    raise ValueError(text)


def spins():
    while True:
        pass


def test_nothing_is_unpickled_outside_of_the_child():
    with pytest.raises(AssertionError, match="only a child"):
        trusted_pickles.load(io.BytesIO(pickle.dumps(1)))


def test_arguments_and_answers_are_plain_data(tmp_path):
    assert run(f"{HERE}:answer", [{"a": [1, "\u00fc"]}], LIMITS) == {"value": {"a": [1, "\u00fc"]}, "unpickled": [1, 2]}
    assert run(f"{HERE}:chatter", [], LIMITS) == ""


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("fails", [], r"cannot be converted: KeyError: 'a\nb'"),
        ("says", ["\x1b[31mred"], r"'\x1b[31mred'"),
        ("none", [], "the process that unpickles died of status 1"),
    ],
)
def test_what_goes_wrong_is_one_line(name, arguments, told):
    with pytest.raises(ValueError) as caught:
        run(f"{HERE}:{name}", arguments, LIMITS)
    assert str(caught.value) == told


def test_what_the_child_started_ends_with_it(tmp_path):
    run(f"{HERE}:leaves_a_process", [str(tmp_path / "pid")], LIMITS)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(2400):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")


def test_a_child_that_nobody_waits_for_ends_by_its_own_clock(monkeypatch):
    """The limit of processor time, a second beyond that of waiting."""
    waiting = subprocess.Popen.communicate
    monkeypatch.setattr(subprocess.Popen, "communicate", lambda self, given, timeout: waiting(self, given, 300))
    with pytest.raises(ValueError, match="the process that unpickles died of status -"):
        run(f"{HERE}:spins", [], Limits(memory_gib=1, minutes=0.01))
