"""llama.cpp: responses of llama-server with timings.draft_n and timings.draft_n_accepted.

Verification steps are not in the response. Each pass after prefill emits its accepted drafts and one more token, so
they are predicted_n − 1 − draft_n_accepted; passes that drafted nothing are among them, and the last one may have been
cut at the end of the answer. Positions are not in the response either.
"""

from collections.abc import Mapping
from typing import Any

from decode.common.errors import UserError
from eval.engine_logs.counts import RequestCounts, checked, read_count


def from_response(body: Mapping[str, Any], where: str) -> RequestCounts:
    """The counts of one response. UserError without timings. A response without draft_n drafted nothing."""
    timings = body.get("timings")
    if not isinstance(timings, Mapping):
        raise UserError(f"{where} has no timings: log what llama-server answers")
    predicted = read_count(timings, "predicted_n", where)
    if "draft_n" not in timings:
        return RequestCounts(max(0, predicted - 1), 0, 0)
    drafted, accepted = (read_count(timings, key, where) for key in ("draft_n", "draft_n_accepted"))
    rounds = max(int(drafted > 0), predicted - 1 - accepted)
    return checked(RequestCounts(rounds, drafted, accepted), where)
