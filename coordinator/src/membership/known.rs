//! One member, and when its silence makes it suspect or has it removed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use larder_protocol::table::{Member, NodeNumber};
use larder_protocol::version::Version;

use super::{Millis, Patience};

/// A member, and what is known of it.
#[derive(Debug)]
pub(super) struct KnownMember {
    pub(super) member: Member,
    pub(super) heard: Millis,
    /// The coordinator before this one had it as a member, and it has not come back yet.
    pub(super) is_awaited: bool,
    /// It leaves soon. It is home to nothing, if another node can be home.
    pub(super) drains: bool,
    /// The version that it speaks; the latest one if that is not known.
    pub(super) version: Version,
    /// The times of reports that it does not answer, by reporting member, since it was heard last.
    pub(super) reports: BTreeMap<NodeNumber, Millis>,
    /// Since when members report that it does not answer, whether it is heard or not.
    pub(super) unanswered: BTreeMap<NodeNumber, Millis>,
    /// Whether most members have not reached it for a while. It is home to nothing, if another node can be home.
    pub(super) is_unreached: bool,
    /// The members that it reported last.
    pub(super) reported: BTreeSet<NodeNumber>,
    pub(super) rival: Option<Rival>,
    /// Whether this life of it is to join again at another address.
    pub(super) has_moved: bool,
}

/// Another process of a member's name.
#[derive(Debug)]
pub(super) struct Rival {
    pub(super) address: SocketAddr,
    /// The time at which it first appeared.
    pub(super) since: Millis,
    /// Whether the member was told of it.
    pub(super) is_told: bool,
}

impl KnownMember {
    pub(super) fn new(member: Member, heard: Millis) -> Self {
        Self {
            member,
            heard,
            is_awaited: false,
            drains: false,
            version: Version::LATEST,
            reports: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            is_unreached: false,
            reported: BTreeSet::new(),
            rival: None,
            has_moved: false,
        }
    }

    /// Whether its drain probably ended while no coordinator led: an earlier leader knew that it drains, and it has not come back.
    /// It counts as a member that left in order.
    pub(super) fn may_have_left(&self) -> bool {
        self.is_awaited && self.drains
    }

    /// The time at which the member is suspect, unless it is heard before. The silence of awaited members counts from the end of
    /// the grace time. A member that may have left is never suspect, and so never lost for followers.
    pub(super) fn suspect_at(&self, patience: &Patience, graced: Millis) -> Millis {
        let Patience { heartbeat_ms, suspect_after_ms, .. } = *patience;
        if self.may_have_left() {
            return Millis::MAX;
        }
        let reported_ms = if self.is_reported() { 2 * heartbeat_ms + 1 } else { suspect_after_ms };
        self.silent_since(graced).saturating_add(reported_ms.min(suspect_after_ms))
    }

    /// The time at which the member is removed, unless it is heard before.
    pub(super) fn removed_at(&self, patience: &Patience, graced: Millis) -> Millis {
        let Patience { suspect_after_ms, remove_after_ms, remove_reported_after_ms, .. } = *patience;
        if self.may_have_left() {
            return self.silent_since(graced).saturating_add(suspect_after_ms);
        }
        let reported_ms = if self.is_reported() { remove_reported_after_ms } else { remove_after_ms };
        self.silent_since(graced).saturating_add(reported_ms.min(remove_after_ms))
    }

    fn silent_since(&self, graced: Millis) -> Millis {
        if self.is_awaited { self.heard.max(graced) } else { self.heard }
    }

    /// Whether enough other members get no answer from it.
    pub(super) fn is_reported(&self) -> bool {
        self.reports.len() >= REPORTERS
    }
}

/// The number of members whose reports make another member suspect early, and have it removed early. One reporter alone may be
/// cut off itself.
pub const REPORTERS: usize = 2;
