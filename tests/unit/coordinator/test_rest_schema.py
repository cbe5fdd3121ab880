"""Requests made from the OpenAPI schema: whatever is sent, no answer is a 500, and the schema names each."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from rest_stage import AUTH, PEER, Stage
from rest_thread import served

from echo2.coordinator.rest_roles import NEEDS

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402 - after the library was found
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)

KNOWN = {"peer": PEER, "run": "sums", "token": "00112233aabb", "name": "a-viewer", "id": 1}

EXAMPLES = 8
"""Of each route and way of making them: half a minute in all."""


@schemathesis.serializer("application/toml")
def as_it_is(_context, value):
    return value.encode() if isinstance(value, str) else b""


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """The schema of a coordinator on a real socket: the server under the routes takes part."""
    stage = Stage(tmp_path_factory.mktemp("stage"))
    stage.post_credits(1, 2, 3)
    stage.token("viewer")
    with served(stage) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
    stage.close()


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_is_answered_with_a_failure(api, mode):
    """As the schema has them and as it does not, by an operator, who reaches every route."""
    operations = [found.ok() for found in api.get_all_operations()]
    asked = Counter()

    def ask(case):
        asked[case.operation.label] += 1
        if asked[case.operation.label] % 2:  # or all names would be strangers'
            case.path_parameters = {name: KNOWN[name] for name in case.path_parameters or {}}
        case.call_and_validate(headers=AUTH, checks=CHECKS)

    for operation in operations:
        plan = settings(
            max_examples=EXAMPLES, deadline=None, phases=[Phase.generate], database=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        try:
            plan(given(case=operation.as_strategy(generation_mode=mode))(ask))()
        except Unsatisfiable:
            assert mode is schemathesis.GenerationMode.NEGATIVE, operation.label  # there is nothing to say wrongly
    assert len(asked) >= len(operations) * 3 // 4
    assert len(operations) == len(NEEDS) - 1, "all but the schema itself"
