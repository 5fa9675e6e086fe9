"""With ``kv_load_failure_policy=fail`` a cache that does not arrive is an error for its client, and for
nobody else.
"""

import urllib.error

import pytest

from .engines import EngineHouse, kv_cache_usage, prompts, wait_until
from .http_json import complete
from .test_crashes import SLACK_SECONDS, TIMERS, offer


def test_prefill_killed_fails_the_request_where_that_is_the_policy(engines: EngineHouse) -> None:
    pair = engines.pair("gqa", load_failure_policy="fail", **TIMERS)
    request = prompts("blockwise", 200, title="prefill is killed, fail")[0]
    offered = offer(pair, request.prompt)
    pair.prefill.kill()
    with pytest.raises(urllib.error.HTTPError) as failure:
        complete(pair.decode.url, request.prompt, max_tokens=4, params=offered)
    assert failure.value.code == 500
    assert complete(pair.decode.url, "D goes on.", max_tokens=4)
    wait_until(lambda: kv_cache_usage(pair.decode) == 0, SLACK_SECONDS, "D's blocks to be free")
    pair.revive(pair.prefill)
