"""Query parameters: what is given twice, or is no parameter of the route, is refused."""

from __future__ import annotations

from tests.service.conftest import check_problem


def test_a_parameter_that_is_given_twice_is_refused(client):
    paths = client.app.openapi()["paths"].items()
    routes = [(method, path, one) for path, methods in paths for method, one in methods.items()]
    asked = 0
    for method, path, operation in routes:
        for parameter in operation.get("parameters", ()):
            if parameter["in"] != "query":
                continue
            name = parameter["name"]
            answer = client.request(method.upper(), f"{path}?{name}=1&{name}=1")
            document = check_problem(answer, 422, "invalid-request")
            assert document["detail"] == f"query: {name!r} is given more than once; send each parameter once"
            asked += 1
    assert asked >= 12


def test_different_parameters_are_served(client):
    assert client.get("/canary/violations?limit=1&before=3").status_code == 200


def test_what_changes_something_refuses_parameters_that_it_does_not_have(client):
    """`POST /canary/pause?ranks=3` paused every rank; `POST /canary/acknowledge?incident=ID` cleared all."""
    paths = client.app.openapi()["paths"].items()
    changing = [
        (method, path)
        for path, methods in paths
        for method in methods
        if method in ("post", "delete") and path not in ("/console/session", "/canary/drill")
    ]
    assert len(changing) >= 9
    for method, path in changing:
        answer = client.request(method.upper(), f"{path}?rank=3")
        assert "'rank' is not a parameter" in check_problem(answer, 422, "invalid-request")["detail"], path
    assert not client.app.state.context.hub.acknowledgements.newest_first()
