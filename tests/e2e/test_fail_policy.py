"""With ``kv_load_failure_policy=fail`` a cache that does not arrive is an error for its client, in OpenAI's
form and with the transfer's id, and for nobody else.
"""

import re
import urllib.error

import msgspec
import pytest
from dfirst.connector.chaos.orders import CopyFault
from dfirst.connector.engine_spec import Mode

from .breaking import SLACK_SECONDS, assert_conforms, breakable, offer, wait_until_free
from .engines import EngineHouse, assert_equal, kv_cache_usage, prompts, wait_until
from .http_json import complete

TRANSFER = re.compile(r"\b[0-9a-f]{32}\b")


@pytest.mark.parametrize("fault", ["copy fails", "copy in part"])
@pytest.mark.parametrize("mode", ["blockwise", "layerwise"])
def test_a_copy_that_fails_is_an_error_for_its_client_alone(
    engines: EngineHouse, mode: Mode, fault: CopyFault
) -> None:
    pair = breakable(engines, "fail")
    mover, way = ("decode", "read") if mode == "blockwise" else ("prefill", "write")
    for stream in (False, True):
        lost = prompts(mode, 200, title=f"lost {stream} {fault}")
        known = set(pair.traces().transfers())
        pair.faults.order(mover, fault, way)
        (answer,) = pair.ask([msgspec.structs.replace(lost[0], stream=stream)])
        assert answer.error is not None
        (transfer,) = set(pair.traces().transfers()) - known
        assert TRANSFER.search(answer.error), answer.error
        assert transfer in answer.error
        assert "message" in answer.error
        after = prompts(mode, 100, title=f"after {stream} {fault}")
        assert_equal(after, pair.ask(after), engines.references("gqa", after))
    wait_until_free(pair)
    assert_conforms(pair)


@pytest.mark.full
def test_prefill_killed_fails_the_request_where_that_is_the_policy(engines: EngineHouse) -> None:
    pair = breakable(engines, "fail")
    request = prompts("blockwise", 200, title="prefill is killed, fail")[0]
    offered = offer(pair, request.prompt)
    pair.prefill.kill()
    with pytest.raises(urllib.error.HTTPError) as failure:
        complete(pair.decode.url, request.prompt, max_tokens=4, params=offered)
    assert failure.value.code == 500
    assert complete(pair.decode.url, "D goes on.", max_tokens=4)
    wait_until(lambda: kv_cache_usage(pair.decode) == 0, SLACK_SECONDS, "D's blocks to be free")
    pair.revive(pair.prefill)
