"""What steps with drafts cost the host, beside plain ones of as many rows: the machine's own speed divides out."""

from __future__ import annotations

from lab.drafts_host import PARTS, measure

# Plain steps of the same rows are a cohort's, which hardly look at any; with drafts 7 were measured, 18 before.
MOST_TIMES = 12


def test_the_host_of_64_rows_with_4_drafts_is_bounded() -> None:
    plain, drafted = (measure(64, drafts, 60) for drafts in (0, 4))
    assert all(drafted[part] > 0 for part in PARTS)
    assert drafted["least"] < MOST_TIMES * plain["least"]
