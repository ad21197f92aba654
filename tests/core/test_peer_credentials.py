"""What a process shows to others is set once, and never printed."""

from dataclasses import replace

from flexmarl.core.peer_credentials import PeerCredentials, current_credentials, use_credentials


def test_the_process_has_one_set():
    before = current_credentials()
    try:
        mine = PeerCredentials(token="t")
        use_credentials(mine)
        assert current_credentials() is mine
    finally:
        use_credentials(before)
    assert before == PeerCredentials()


def test_a_connection_outlives_another_token_and_no_other_certificate():
    shown = PeerCredentials(ca=b"ca", certificate=b"cert", key=b"key", token="old")
    assert shown.connection == replace(shown, token="new").connection
    for name in ("ca", "certificate", "key"):
        assert shown.connection != replace(shown, **{name: b"other"}).connection


def test_secrets_are_not_printed():
    shown = repr(PeerCredentials(ca=b"c1", certificate=b"c2", key=b"c3", token="c4"))
    assert shown == "PeerCredentials(insecure=False)"
