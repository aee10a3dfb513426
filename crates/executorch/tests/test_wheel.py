"""The tests that ExecuTorch ships for its op and its reference caches, run against kvist's bookkeeping."""

import unittest

from executorch.extension.llm.cache import test_update_and_attend as wheel

from kvist.executorch.cells import CellCache, ContiguousCache

wheel.CellReferenceCache = CellCache
wheel.ContiguousReferenceCache = ContiguousCache


def load_tests(loader, _tests, _pattern):
    return loader.loadTestsFromModule(wheel)


def test_the_wheels_tests_pass_with_our_caches():
    suite = unittest.defaultTestLoader.loadTestsFromModule(wheel)
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun >= 30
    assert not result.failures and not result.errors, "\n".join(text for _, text in result.failures + result.errors)
