"""Terms, versions, keys, the account of a batch, retention."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core import fencing, retention
from flexmarl.core import store_keys as keys
from flexmarl.core.batch_account import BatchAccount
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.states import VertexStatus, VoidReason


class TestFencing:
    def test_current_term_passes_and_is_no_news(self):
        assert not fencing.check_term(scope="x", current=3, term=3, issued_here=True)

    def test_older_term_is_refused(self):
        with pytest.raises(DomainError, match="TERM_STALE"):
            fencing.check_term(scope="x", current=3, term=2, issued_here=False)

    def test_newer_term_is_learnt_where_terms_are_not_issued(self):
        assert fencing.check_term(scope="x", current=3, term=4, issued_here=False)
        with pytest.raises(DomainError, match="never issued"):
            fencing.check_term(scope="x", current=3, term=4, issued_here=True)

    @pytest.mark.parametrize("scope", [fencing.ORCHESTRATOR_SCOPE, fencing.policy_scope("p")])
    def test_known_scopes(self, scope):
        fencing.check_scope(scope)

    @pytest.mark.parametrize("scope", ["", "policy/", "policy/a/b", "policy/../x", "trainer/p"])
    def test_unknown_scopes_are_refused(self, scope):
        with pytest.raises(ValueError, match=r"scope|policy"):
            fencing.check_scope(scope)

    @pytest.mark.parametrize(("newest", "version"), [(None, 0), (4, 5)])
    def test_next_version_commits(self, newest, version):
        fencing.check_commit(newest=newest, expected=newest, version=version)

    @pytest.mark.parametrize(("newest", "expected"), [(None, 0), (5, 4), (5, None)])
    def test_unexpected_version_is_refused(self, newest, expected):
        with pytest.raises(DomainError) as caught:
            fencing.check_commit(newest=newest, expected=expected, version=5)
        assert caught.value.reason is ErrorReason.VERSION_MISMATCH

    def test_manifest_must_be_the_next(self):
        with pytest.raises(DomainError, match="INVALID_ARGUMENT"):
            fencing.check_commit(newest=4, expected=4, version=6)


class TestKeys:
    def test_prefix_of_one_run_never_covers_another(self):
        assert not keys.row("ab", "x", "v").startswith(keys.prefix("a"))
        assert keys.row("a", "x", "v").startswith(keys.prefix("a"))

    @given(st.integers(0, 2**63), st.integers(0, 2**63))
    def test_numbers_sort(self, a, b):
        first, second = keys.numbered(a, "r"), keys.numbered(b, "r")
        assert (a < b) == (first < second)
        assert keys.number_of(first) == a

    @given(st.binary(min_size=1), st.binary())
    def test_after_a_prefix_comes_nothing_of_it(self, prefix, rest):
        if prefix.rstrip(b"\xff"):
            assert prefix + rest < keys.after(prefix)

    @pytest.mark.parametrize("prefix", [b"", b"\xff\xff"])
    def test_no_key_after_everything(self, prefix):
        with pytest.raises(ValueError, match="no key"):
            keys.after(prefix)


class TestAccount:
    def add(self, account, **changes):
        row = {
            "status": VertexStatus.DONE,
            "trainable": True,
            "void_reason": None,
            "micro_batch_id": "",
        }
        return account.add("p", **{**row, **changes})

    def test_every_kind_of_row_is_counted_in_its_place(self):
        account = BatchAccount(["m1"])
        assert not self.add(account, micro_batch_id="m1")
        assert not self.add(account, void_reason=VoidReason.NO_REWARD)
        assert not self.add(account, trainable=False)
        assert not self.add(account, status=VertexStatus.CANCELLED)
        assert not self.add(account, status=VertexStatus.FAILED)
        counts = account.policies["p"]
        assert (counts.finished, counts.consumed, counts.untrained) == (3, 1, 1)
        assert (counts.cancelled, counts.voided) == (1, {VoidReason.NO_REWARD: 1})
        assert counts.balances()

    def test_unsaved_micro_batch_leaves_its_row_open(self):
        account = BatchAccount(["m1"])
        assert self.add(account, micro_batch_id="m2")
        assert not account.policies["p"].balances()

    def test_row_that_is_both_does_not_balance(self):
        account = BatchAccount(["m1"])
        self.add(account, micro_batch_id="m1", void_reason=VoidReason.NON_FINITE)
        assert not account.policies["p"].balances()


class TestRetention:
    def keep(self, manifests, saved, retain=2, **bounds):
        return retention.keep(
            manifests=manifests,
            saved=[retention.SavedSet(policy=p, version=v, keys=frozenset(k)) for p, v, k in saved],
            retain_versions=retain,
            **bounds,
        )

    def test_newest_manifests_and_newest_records_stay(self):
        kept = self.keep(
            {1: ["w1"], 2: ["w2"], 3: ["w3"]},
            [("p", 1, ["w1", "g1"]), ("p", 2, ["w2", "g2"]), ("p", 3, ["w3", "g3"])],
        )
        assert kept.keys == {"w2", "w3", "g3"}
        assert kept.records == {("p", 2), ("p", 3)}

    @pytest.mark.parametrize(
        ("bounds", "kept_versions"),
        [
            ({}, {4, 5}),
            ({"on_disk": 5}, {4, 5}),
            ({"on_disk": 3}, {3, 4, 5}),
            ({"on_disk": 4, "pinned": [2]}, {2, 3, 4, 5}),
            ({"pinned": [5, 3]}, {3, 4, 5}),
        ],
    )
    def test_nothing_is_given_up_from_the_floor_on(self, bounds, kept_versions):
        manifests = {version: [f"w{version}"] for version in range(1, 6)}
        saved = [("p", version, [f"w{version}", f"g{version}"]) for version in manifests]
        kept = self.keep(manifests, saved, **bounds)
        assert kept.floor == min(kept_versions)
        assert kept.keys == {f"w{version}" for version in kept_versions} | {"g5"}
        assert kept.records == {("p", version) for version in kept_versions}

    def test_record_beyond_the_commit_stays_with_the_set_before_it(self):
        kept = self.keep({3: ["w3"]}, [("p", 3, ["w3", "g3"]), ("p", 4, ["w4"])])
        assert kept.keys == {"w3", "w4"}

    def test_policy_that_did_not_step_keeps_its_old_record(self):
        kept = self.keep({5: ["w1"], 6: ["w1"]}, [("p", 1, ["w1", "g1"])])
        assert kept.keys == {"w1", "g1"}
        assert kept.records == {("p", 1)}

    def test_order_of_records_does_not_matter(self):
        kept = self.keep({5: []}, [("p", 4, ["new"]), ("p", 1, ["old"])], retain=1)
        assert kept.keys == {"new"}

    def test_before_the_first_commit_all_stays(self):
        kept = self.keep({}, [("p", 0, ["a"]), ("q", 0, ["b"]), ("p", 1, ["c"])])
        assert kept.keys == {"a", "b", "c"}
        assert len(kept.records) == 3
