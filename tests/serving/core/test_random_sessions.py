"""Two hundred random sessions of forty actions each, on the tell-tale runner; each is the same every time."""

from random_sessions import play


def test_no_schedule_of_two_hundred_random_sessions_reads_a_wrong_state_or_page_or_loses_anything() -> None:
    seen = play(range(1000, 1200))
    assert seen["hit_tokens"] > 0
    assert seen["preemptions"] > 0
