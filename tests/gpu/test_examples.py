"""The examples of README and docs/users run on a GPU as pasted."""

import pytest

from tests.kit import examples


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_an_example_can_be_pasted(name: str) -> None:
    examples.run(name)
