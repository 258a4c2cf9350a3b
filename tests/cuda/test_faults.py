"""faults.py plants each fault in code, in exactly one place."""

import pytest

import faults
from faults import CSRC, FAULTS, planted, switch_of

TEXT = """
wait();  // all have read
x = "// no comment"; wait();
// wait for all
/* y = 2;
   wait again */
"""


@pytest.mark.parametrize("right", ["wait();  // all have read", 'x = "// no comment"; wait();', "x ="])
def test_code_is_replaced(right):
    assert planted(TEXT, "x.cuh", right, "SWITCH") == TEXT.replace(right, "SWITCH")


@pytest.mark.parametrize("right", ["wait for all", "y = 2;", "wait again", "all have read"])
def test_a_place_in_a_comment_is_refused(right):
    with pytest.raises(AssertionError, match=f"x.cuh has changed: '{right}' is in a comment"):
        planted(TEXT, "x.cuh", right, "SWITCH")


@pytest.mark.parametrize("right, times", [("wait();", 2), ("leave();", 0)])
def test_a_place_that_is_not_there_once_is_refused(right, times):
    with pytest.raises(AssertionError, match=rf"'{right[:-3]}.*' is there {times} times"):
        planted(TEXT, "x.cuh", right, "SWITCH")


def test_every_fault_is_planted_and_lines_stay_where_they_were(tmp_path):
    faults.plant(tmp_path)
    for x in FAULTS.values():
        text = (tmp_path / "cuda" / x.file).read_text()
        assert f"cudasim::fault({switch_of(x)})" in text
        assert text.count("\n") == (CSRC / "cuda" / x.file).read_text().count("\n")
