"""The Eagle loop of the design: a target and a draft head, two programs, each with a tree session."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def test_drafts_change_nothing_but_the_number_of_passes(tmp_path):
    import eagle

    target, draft = eagle.export_pair(tmp_path)
    plain = eagle.generate(target, [5, 17, 3, 88], 40)
    text, passes = eagle.generate_with_drafts(target, draft, [5, 17, 3, 88], 40)
    assert text == plain
    assert passes < 30, passes
