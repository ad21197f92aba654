from flexmarl.core.silence import Verdict, judge_silence


def judge(*, heard_at: float, asked_at: float | None, now: float) -> Verdict:
    return judge_silence(heard_at=heard_at, asked_at=asked_at, now=now, silence_s=8.0)


def test_a_silent_engine_is_asked_and_given_up_when_it_does_not_answer():
    assert judge(heard_at=0.0, asked_at=None, now=1.9) is Verdict.FINE
    assert judge(heard_at=0.0, asked_at=None, now=2.0) is Verdict.ASK
    assert judge(heard_at=0.0, asked_at=2.0, now=9.9) is Verdict.FINE
    assert judge(heard_at=0.0, asked_at=2.0, now=10.0) is Verdict.HANGS


def test_an_answer_begins_anew():
    assert judge(heard_at=9.0, asked_at=2.0, now=10.0) is Verdict.FINE
    assert judge(heard_at=9.0, asked_at=2.0, now=11.0) is Verdict.ASK
