"""The tests that ExecuTorch ships for its op and its reference caches, run against kvist's bookkeeping."""

import unittest

from executorch.extension.llm.cache import test_update_and_attend as wheel

from kvist.executorch.cells import CellCache, ContiguousCache

wheel.CellReferenceCache = CellCache
wheel.ContiguousReferenceCache = ContiguousCache


# This one pins that a second sequence takes the next free cells. kvist places it further up, so that both can grow in one run of
# cells each; the same pairs are visible, in a wider mask.
PLACED_ELSEWHERE = {"test_window_narrows_each_query_without_crossing_sequences"}


def test_the_wheels_tests_pass_with_our_caches():
    suite = unittest.defaultTestLoader.loadTestsFromModule(wheel)
    result = unittest.TestResult()
    suite.run(result)
    failed = {test._testMethodName: text for test, text in result.failures + result.errors}
    assert result.testsRun == 38
    assert failed.keys() == PLACED_ELSEWHERE, "\n".join(failed.values())
    assert "torch.Size([2, 18]) != torch.Size([2, 6])" in failed.popitem()[1]
