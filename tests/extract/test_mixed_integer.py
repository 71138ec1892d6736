"""Mixed-integer programs: what the solver says of itself is not among what a program prints."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import ctypes, os, sys, threading
import numpy as np
import scipy.optimize
from tapestry_egg.extract.search.mixed_integer import milp

solve, apart = scipy.optimize.milp, threading.Barrier(2)

def noisy(cost, **asked):
    apart.wait(10)  # two at a time, one of which ends while the other still runs
    ctypes.CDLL(None).printf(b"noise\\n")
    if cost[0] > 1.0:
        slow.join()
        ctypes.CDLL(None).printf(b"noise\\n")
    return solve(cost, **asked)

scipy.optimize.milp = noisy
print("before", flush=True)
slow = threading.Thread(target=milp, args=([1.0],), kwargs={"integrality": [1]})
slow.start()
found = milp(np.array([2.0]), integrality=np.ones(1), bounds=scipy.optimize.Bounds(0.5, 9.0))
print("after", found.fun)
ctypes.CDLL(None).printf(b"of C\\n")
"""


def test_what_a_solver_writes_goes_to_the_standard_error() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=60
    )
    assert sorted(ran.stdout.split("\n")) == ["", "after 2.0", "before", "of C"]
    assert ran.stderr.count("noise") == 3


def test_a_process_without_streams_solves_too() -> None:
    closed = "import os; os.close(1); os.close(2)\n"
    solved = (
        "from tapestry_egg.extract.search.mixed_integer import milp\n"
        "assert milp([3.0], integrality=[1], bounds=(1, 2)).fun == 3.0\n"
    )
    ran = subprocess.run([sys.executable, "-c", closed + solved], check=False, timeout=60)
    assert ran.returncode == 0
