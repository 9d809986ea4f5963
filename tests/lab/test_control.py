import json


def test_controllers_are_compared(lab):
    result = lab("control", "--rounds", 20, "--json")
    assert result.exit_code == 0
    arms = json.loads(result.stdout.splitlines()[-1])["arms"]
    worlds = {arm["world"] for arm in arms}
    assert len(worlds) == 4
    names = {"goodput", "on_the_fly, last 4 rounds", "fsm", "hedge", "linear_selection"}
    assert {arm["controller"] for arm in arms} >= names
    assert all(arm["speed"] > 0 for arm in arms)
    assert sum(arm["ratio"] == 1.0 and "the best" in arm["controller"] for arm in arms) == 4
