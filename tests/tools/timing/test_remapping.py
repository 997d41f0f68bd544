"""The tool that times the agreement on experts."""

from tools.timing import remapping


def test_every_router_and_step_has_a_line(capsys):
    """Times are above 0, and a token's part of a step is its time by the number of tokens."""
    remapping.main(["--rounds", "2", "--layers", "10"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["ms", "per", "token"]
    found = [tuple(map(float, line.split())) for line in lines]
    assert [(e, k, n) for e, k, n, *_ in found] == [
        (*r, n) for r in remapping.ROUTERS for n in remapping.STEPS
    ]
    for *_, tokens, us, ms in found:
        assert us > 0
        assert abs(ms - us * 10 / 1e3 / tokens) < 1e-3
