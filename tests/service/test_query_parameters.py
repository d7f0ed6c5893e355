"""Query parameters: one that is given twice is refused on every route that has any."""

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
