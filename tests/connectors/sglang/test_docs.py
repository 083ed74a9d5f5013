"""What docs/sglang.md says of configurations is what is tested."""

from __future__ import annotations

from pathlib import Path

from tests.connectors.sglang.support import configurations

DOCS = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()


def test_the_table_of_configurations_is_the_one_that_is_tested() -> None:
    assert configurations.table() in DOCS
    for row in configurations.ROWS:
        module, _, name = row.test.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / module).read_text(), row.name
