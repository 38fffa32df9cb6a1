"""What hooks in serving stacks share."""

from cute_kernels.integrations.hooks import SayOnce, or_original


def test_lines_that_differ_in_numbers_are_said_once() -> None:
    said: list[str] = []
    say = SayOnce(said.append)
    for n in range(300):
        say(f"q: got shape ({n}, 8)")
        say(f"k: got shape ({n}, 8)")
        say(f"k: got shape ({n}, 8)")
    assert said == ["q: got shape (0, 8)", "k: got shape (0, 8)"] and len(say._said) == 2


def test_what_ours_refuses_the_original_gets_as_it_came() -> None:
    said: list[str] = []

    def ours(a: int, *, b: int = 0) -> str:
        if a < 0:
            raise ValueError("a: got a negative number")
        return "ours"

    def call(*args: object, **kwargs: object) -> object:
        return or_original(ours, lambda *args, **kwargs: (args, kwargs), said.append, *args, **kwargs)

    assert call(1, b=2) == "ours" and said == []
    assert call(-1, b=2) == ((-1,), {"b": 2}) and said == ["a: got a negative number"]
    assert call(1, 2) == ((1, 2), {}) and call(1, c=3) == ((1,), {"c": 3})
    assert "unexpected keyword argument 'c'" in said[-1]
